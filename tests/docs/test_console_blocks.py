"""Every command of the pages exists with all of its options, and every make target and script that they name."""

import re
import shlex

import pytest

from docs.pages import PAGES, ROOT, blocks, title
from eigengrain.cli import main as cli
from eigengrain.recipes import list_recipes

#: commands that are not ours, and words that set variables for one
FOREIGN = {"pip", ".", "echo", "cd", "accelerate", "torchrun", ".venv/bin/pre-commit"}


def commands(text):
    """Commands of a block as words, without comments, redirections and variables in front."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[: next((place for place, word in enumerate(words) if word in (">", ">>", "|")), None)]
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def written(page):
    return [words for block in blocks(page, "console", "sh", "bash") for words in commands(block.text)]


def inline(page):
    """Commands in the text itself, such as `eigengrain demo`, unless they leave something out."""
    for code in re.findall(r"(?<!`)`(eigengrain [^`\n]*)`(?!`)", page.read_text(encoding="utf-8")):
        if "…" not in code and "COMMAND" not in code:
            yield shlex.split(code)


EVERY = [(page, words) for page in PAGES for words in (*written(page), *inline(page))]
OURS = [(page, words[1:]) for page, words in EVERY if words[0] == "eigengrain"]


@pytest.mark.parametrize(
    ("page", "words"), OURS, ids=lambda value: " ".join(value) if isinstance(value, list) else title(value)
)
def test_a_command_can_be_read(page, words, tmp_path, monkeypatch):
    # some commands ask first whether the folder of a model is there
    monkeypatch.chdir(tmp_path)
    for folder in (word for word in words if word.startswith("runs/")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    if words in sorted([[*name.split()] for name in cli.GROUPS]):
        return  # `eigengrain bench` as the name of a group
    if words[-1] in ("--help", "--version"):
        with pytest.raises(SystemExit) as stop:
            cli.parse(words)
        assert stop.value.code == 0
        return
    asked = cli.parse(words)
    assert isinstance(asked.config, asked.command.config)


@pytest.mark.parametrize(("page", "words"), [pair for pair in EVERY if pair[1][0] != "eigengrain"], ids=str)
def test_other_commands_name_what_is_there(page, words):
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[0] in ("python", "python3"):
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] in FOREIGN, f"{title(page)}: say in FOREIGN that {words[0]!r} is a command"


def test_every_command_is_on_a_page():
    shown = {
        command.name
        for command in cli.COMMANDS
        for _, words in OURS
        if words[: len(command.name.split())] == command.name.split()
    }
    # bench loader is for those who change the loader, and the reference has it
    assert {command.name for command in cli.COMMANDS} - shown <= {"bench loader"}


def test_recipes_in_the_text_exist():
    families = {name.split("-")[0] for name in list_recipes()}
    for page in PAGES:
        for name in re.findall(
            r"`((?:\w+)-(?:resnet50|vgg16|alexnet|efficientnet_b5)-\w+)`", page.read_text(encoding="utf-8")
        ):
            if name.split("-")[0] in families:
                assert name in list_recipes(), f"{title(page)}: {name}"
