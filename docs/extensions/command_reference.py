"""The directive ``command-reference`` NAME: the usage line and the options of a command, as its ``--help`` shows them.

Every option is an entry of the index and a target that the search finds.
"""

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from eigengrain.cli.commands import COMMANDS, PROGRAM
from eigengrain.cli.help import subjects, usage

COMMAND_OF = {command.name: command for command in COMMANDS}


class CommandReference(SphinxDirective):
    """The options of a command by subject."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = COMMAND_OF[self.arguments[0]]
        typed = usage(command, PROGRAM)
        result: list[nodes.Node] = [nodes.literal_block(typed, typed, language="none")]
        for subject, rows in subjects(command):
            title = subject.replace("_", " ").capitalize()
            section = nodes.section(ids=[nodes.make_id(f"{command.name} {subject}")])
            section += nodes.title(title, title)
            entries = nodes.definition_list()
            for name, text in rows:
                entries += self._entry(command.name, name, text.replace("\0", " "))
            section += entries
            result.append(section)
        return result

    def _entry(self, command: str, name: str, text: str) -> nodes.definition_list_item:
        term = nodes.term("", "", nodes.literal(name, name))
        if option := re.match(r"--([\w.]+)", name):
            label = nodes.make_id(f"{command}-{option[1]}")
            term["ids"].append(label)
            pair = f"--{option[1]}; {PROGRAM} {command}"
            term.insert(0, addnodes.index(entries=[("pair", pair, label, "", None)]))
            self.env.domains.standard_domain.add_program_option(f"{PROGRAM} {command}", option[0], self.env.docname, label)
        parts = re.split(r"(--[\w.]*\w)", text)
        words = [nodes.literal(part, part) if part.startswith("--") else nodes.Text(part) for part in parts]
        return nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", "", *words)))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
