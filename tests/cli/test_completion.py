"""The completion scripts, and the names that options accept."""

import re
import shutil
import subprocess
from typing import get_args

import pytest

from eigengrain import names
from eigengrain.cli import main as cli
from eigengrain.cli.completion import SHELLS, Completion
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.options import options_of


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """One file per shell."""
    folder = tmp_path_factory.mktemp("shell")
    with pytest.MonkeyPatch.context() as patch:
        for shell in SHELLS:
            with (folder / shell).open("w") as file:
                patch.setattr("sys.stdout", file)
                assert cli.main(["completion", shell]) == 0
    return folder


def offered(script, lines):
    """What bash offers at the end of each line, with the words split as bash splits them."""
    code = [f'source "{script}"']
    for line in lines:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        code.append(f"COMP_WORDS=({words}); COMP_CWORD={line.count(' ')}; COMPREPLY=(); _shtab_eigengrain")
        code.append('printf "%s " "${COMPREPLY[@]}"; printf "\\n"')
    done = subprocess.run(["bash", "--norc", "-c", "\n".join(code)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash(scripts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    expected = {
        "eigengrain tr": ["train"],
        "eigengrain ex": ["explain", "explore", "export"],
        "eigengrain --v": ["--version"],
        "eigengrain train --amp ": ["none", "bf16", "fp16"],
        "eigengrain train --amp b": ["bf16"],
        "eigengrain train --recipe birds-vg": ["birds-vgg16-paper"],
        "eigengrain train --model.head mpn": ["mpncov", "mpncov+seb"],
        "eigengrain train --data.name c": ["cars", "cub"],
        "eigengrain train --epochs 3 --optimiser.mo": ["--optimiser.momentum"],
        "eigengrain train --data.transforms.flip t": ["true"],
        "eigengrain export --format ": ["onnx", "pt2"],
        "eigengrain explain runs/x --data plu": ["plumage"],
        "eigengrain explain x --rules vanilla de": ["deconv"],
        "eigengrain datasets ch": ["check"],
        "eigengrain completion ": list(SHELLS),
        "eigengrain heads --js": ["--json"],
        "eigengrain predict pho": ["photos"],
        "eigengrain train --config pho": ["photos"],
        "eigengrain train --epochs ": [],
    }
    assert dict(zip(expected, offered(scripts / "bash", list(expected)), strict=True)) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_offers_every_option_and_its_names(scripts):
    lines, expected = [], []
    for command in cli.COMMANDS:
        for option in options_of(command.config):
            lines.append(f"eigengrain {command.name} --{option.name}")
            expected.append({f"--{option.name}"})
            if option.offers and not option.switch:
                lines.append(f"eigengrain {command.name} --{option.name} ")
                expected.append(set(option.offers))
    for line, offers, least in zip(lines, offered(scripts / "bash", lines), expected, strict=True):
        assert least <= set(offers), line


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_contains_every_option_and_the_names(scripts, shell):
    text = (scripts / shell).read_text()
    for command in cli.COMMANDS:
        for option in options_of(command.config):
            assert re.search(rf"(--|-l ?[\"']?){re.escape(option.name)}\b", text), (command.name, option.name)
    for name in (*names.HEADS, *names.AMP, "plumage", "birds-vgg16-paper"):
        assert name in text


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish(scripts):
    code = f"source {scripts / 'fish'}; complete -C 'eigengrain train --amp '"
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["none", "bf16", "fp16"]


def test_a_shell_is_required():
    with pytest.raises(ArgumentError) as missing:
        Completion()
    assert missing.value.argument == "shell"
    with pytest.raises(UnknownName) as unknown:
        Completion("bsh")
    assert unknown.value.suggestions[0] == "bash"


def test_names_are_those_of_the_registries():
    from eigengrain.data.preprocessing import Interpolation, Kind
    from eigengrain.explain.relu_rules import RULES
    from eigengrain.explain.survey import MEASURES
    from eigengrain.functional import SOLVERS
    from eigengrain.heads import list_heads
    from eigengrain.models import list_backbones

    assert tuple(list_heads()) == names.HEADS
    assert set(names.BACKBONES) <= set(list_backbones())
    assert set(names.RULES) == set(RULES)
    assert set(names.MEASURES) == set(MEASURES)
    assert set(names.SOLVERS) == set(SOLVERS)
    assert get_args(Kind) == names.TRANSFORMS
    assert get_args(Interpolation) == names.INTERPOLATIONS


def test_the_choices_of_the_help_are_those_that_are_accepted():
    required = {"checkpoint": ".", "images": ["."], "shell": "bash"}
    for command in cli.COMMANDS:
        options = options_of(command.config)
        given = {name: value for name, value in required.items() if name in {option.name for option in options}}
        if command.name == "explore":
            given["checkpoint"] = ["."]
        for option in options:
            if not option.facts.get("choices") or option.group or option.is_list:
                continue
            for choice in option.choices:
                if (command.name, choice) not in (("train", "best-val"), ("datasets", "check")):
                    command.config(**{**given, option.name: choice})
            with pytest.raises(UnknownName) as error:
                command.config(**{**given, option.name: "none-of-them"})
            assert error.value.choices == option.choices
