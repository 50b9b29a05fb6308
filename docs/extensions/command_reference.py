"""The directive ``command-reference``: what every command says when it is asked for ``--help``, taken at build time."""

import contextlib
import io
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from eigengrain import cli


def help_of(name: str) -> str:
    """What ``eigengrain NAME --help`` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*name.split(), "--help"])
    # the parser puts a mark of no width into its text
    return "".join(letter for letter in said.getvalue() if letter == "\n" or letter.isprintable()).rstrip()


def without_usage(text: str) -> str:
    """The help without the list of all options at its top, which repeats those that follow."""
    return re.sub(r"\Ausage:.*?\n\n", "", text, flags=re.DOTALL)


class CommandReference(SphinxDirective):
    """A section for each command, with its help."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for command in cli.COMMANDS:
            title = f"eigengrain {command.name}"
            section = nodes.section(ids=[nodes.make_id(title)], names=[nodes.fully_normalize_name(title)])
            section += nodes.title(title, title)
            # the first line of the help is the line of the command
            first, _, rest = without_usage(help_of(command.name)).partition("\n")
            section += nodes.paragraph("", first[:1].upper() + first[1:] + ".")
            block = nodes.literal_block(rest.strip(), rest.strip())
            block["language"] = "none"
            section += block
            sections.append(section)
            self.state.document.note_implicit_target(section, section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
