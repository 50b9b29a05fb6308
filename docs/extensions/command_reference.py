"""The directive ``command-reference``: what every command says when it is asked for ``--help``, taken at build time."""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from eigengrain import cli


def help_of(command: cli.Command) -> tuple[str, str]:
    """(the sentence about a command, the rest of what ``--help`` prints), without what all commands have."""
    usage, about, rest = cli.help_of(command).split("\n\n", 2)
    rest = re.sub(r"^every command:\n.*?\n\n(?=examples:|\Z)", "", rest, flags=re.DOTALL | re.MULTILINE)
    return " ".join(about.split()), f"{usage}\n\n{rest.strip()}"


class CommandReference(SphinxDirective):
    """A section for each command, with its help."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for command in cli.COMMANDS:
            title = f"eigengrain {command.name}"
            section = nodes.section(ids=[nodes.make_id(title)], names=[nodes.fully_normalize_name(title)])
            section += nodes.title(title, title)
            about, rest = help_of(command)
            section += nodes.paragraph("", about)
            block = nodes.literal_block(rest, rest)
            block["language"] = "none"
            section += block
            sections.append(section)
            self.state.document.note_implicit_target(section, section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
