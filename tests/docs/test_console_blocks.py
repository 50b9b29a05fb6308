"""Every command on the pages parses, and every make target and script that they name exists."""

import re
import shlex

import benchmarks.__main__ as benchmarks
import pytest
import studies.__main__ as studies

from docs.pages import PAGES, ROOT, blocks, title
from eigengrain.cli.commands import COMMANDS
from eigengrain.cli.parser import parse_command
from eigengrain.recipes import list_recipes

#: commands of other programs
OTHERS = {"pip", ".", "echo", "cd", "curl", "accelerate", "torchrun", ".venv/bin/pre-commit"}
#: our programs: the words in front of a command, and the table of commands
PROGRAMS = {
    "eigengrain": COMMANDS,
    "python -m studies": studies.COMMANDS,
    "python -m benchmarks": benchmarks.COMMANDS,
}


def commands(text):
    """The commands of a block as lists of words, without comments, redirections and variables in front."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[: next((place for place, word in enumerate(words) if word in (">", ">>", "|")), None)]
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def block_commands(page):
    return [words for block in blocks(page, "console", "sh", "bash") for words in commands(block.text)]


def inline_commands(page):
    """Commands in the text, such as `eigengrain demo`, unless they leave something out."""
    for code in re.findall(r"(?<!`)`((?:eigengrain|python -m) [^`\n]*)`(?!`)", page.read_text(encoding="utf-8")):
        if not re.search(r"…|\b(?:COMMAND|NAME|RUN)\b", code):
            yield shlex.split(code)


def program_of(words):
    return next((name for name in PROGRAMS if words[: len(name.split())] == name.split()), None)


EVERY = [(page, words) for page in PAGES for words in (*block_commands(page), *inline_commands(page))]
OURS = [(page, words) for page, words in EVERY if program_of(words)]


def command_of(words):
    """The command of a line and the words after its name; None for --help and --version of the program."""
    program = program_of(words)
    rest = words[len(program.split()) :]
    table = {command.name: command for command in PROGRAMS[program]}
    if "" in table:
        return table[""], rest
    return (table[rest[0]], rest[1:]) if rest and not rest[0].startswith("-") else (None, rest)


@pytest.mark.parametrize(
    ("page", "words"), OURS, ids=lambda value: " ".join(value) if isinstance(value, list) else title(value)
)
def test_commands_parse(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (word for word in words if word.startswith("runs/")):  # some commands check that a model is there
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    command, rest = command_of(words)
    if command is not None and command.name and not rest:
        return  # only the name of the command, which may need more words
    if command is None or "--help" in rest:
        assert set(rest) <= {"--help", "--version"}
        return
    assert isinstance(parse_command(command, rest).config, command.config)


@pytest.mark.parametrize(("page", "words"), [pair for pair in EVERY if not program_of(pair[1])], ids=str)
def test_other_commands_name_files_that_exist(page, words):
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[0] in ("python", "python3"):
        script = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
        assert (ROOT / script).is_file()
    else:
        assert words[0] in OTHERS, f"{title(page)}: add {words[0]!r} to OTHERS if it is a command"


def test_every_command_is_on_a_page():
    shown = {command_of(words)[0].name for _, words in OURS if program_of(words) == "eigengrain" and command_of(words)[0]}
    assert {command.name for command in COMMANDS} == shown


def test_recipes_in_the_text_exist():
    families = {name.split("-")[0] for name in list_recipes()}
    for page in PAGES:
        for name in re.findall(
            r"`((?:\w+)-(?:resnet50|vgg16|alexnet|efficientnet_b5)-\w+)`", page.read_text(encoding="utf-8")
        ):
            if name.split("-")[0] in families:
                assert name in list_recipes(), f"{title(page)}: {name}"
