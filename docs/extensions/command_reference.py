"""The directive ``command-reference``: the output of ``--help`` for every command, taken at build time."""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from eigengrain.cli.commands import COMMANDS, Command
from eigengrain.cli.main import help_of as full_help


def help_of(command: Command) -> tuple[str, str]:
    """The sentence about a command, and the rest of its help without the options that all commands have."""
    usage, about, rest = full_help(command).split("\n\n", 2)
    rest = re.sub(r"^every command:\n.*?\n\n(?=examples:|\Z)", "", rest, flags=re.DOTALL | re.MULTILINE)
    return " ".join(about.split()), f"{usage}\n\n{rest.strip()}"


class CommandReference(SphinxDirective):
    """One section per command, with its help."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for command in COMMANDS:
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
