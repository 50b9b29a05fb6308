"""The completion scripts, asked as a shell asks them."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from eigengrain.cli import main as cli
from eigengrain.cli import values
from eigengrain.cli.completion import Completion, bash, fish, run
from eigengrain.options import options_of


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("shell") / "completion.bash"
    path.write_text(bash(cli.COMMANDS, cli.GROUPS, cli.PROGRAM))
    return path


def offered(script, line):
    """What bash has to offer at the end of a line, through the function and with its own cutting of words."""
    words = [part for word in line.split(" ") for part in re.split(r"(=)", word) if part or not word]
    code = (
        f'source "{script}"; COMP_WORDS=({" ".join(f"{chr(39)}{word}{chr(39)}" for word in words)}); '
        f'COMP_CWORD={len(words) - 1}; _eigengrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "--norc", "-u", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@needs_bash
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("eigengrain tr", ["train"]),
        ("eigengrain ex", ["explain", "explore", "export"]),
        ("eigengrain --v", ["--version"]),
        ("eigengrain bench h", ["heads"]),
        ("eigengrain bench heads --ref", ["--reference"]),
        ("eigengrain train --amp ", ["none", "bf16", "fp16"]),
        ("eigengrain train --amp b", ["bf16"]),
        ("eigengrain train --amp=b", ["bf16"]),
        ("eigengrain train --amp=", ["none", "bf16", "fp16"]),
        ("eigengrain train --recipe birds-v", ["birds-vgg16-paper"]),
        ("eigengrain train --model.head mpn", ["mpncov", "mpncov+seb"]),
        ("eigengrain train --data.name c", ["cub", "cars"]),
        ("eigengrain train --epochs 3 --optimiser.mo", ["--optimiser.momentum"]),
        ("eigengrain train --data.transforms.flip t", ["true"]),
        ("eigengrain export --format ", ["onnx", "pt2"]),
        ("eigengrain explain runs/x --data plu", ["plumage"]),
        ("eigengrain study --data plu", []),  # a folder
        ("eigengrain study gcp", ["gcp-methods", "gcp-pretrained"]),
        ("eigengrain datasets ch", ["check"]),
        ("eigengrain completion ", ["bash", "zsh", "fish"]),
        ("eigengrain -q heads --js", ["--json"]),
        ("eigengrain predict pho", []),  # files: the shell's own
        ("eigengrain train --config ", []),
        ("eigengrain train --epochs ", []),
        ("eigengrain nothing ", []),
    ],
)
def test_bash(script, line, expected):
    assert offered(script, line) == expected


@needs_bash
@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_bash_knows_every_option_and_its_values(script, command):
    found = offered(script, f"eigengrain {command.name} --")
    assert {f"--{option.name}" for option in options_of(command.config)} < set(found)
    for option in options_of(command.config):
        known = values.values_of(command.name, option)
        if known and not option.switch:
            assert offered(script, f"eigengrain {command.name} --{option.name} ") == list(known)


def test_names_are_those_of_the_registries():
    from studies.catalogue import STUDIES

    from eigengrain.explain.relu_rules import RULES
    from eigengrain.explain.survey import MEASURES
    from eigengrain.heads import list_heads

    assert set(values.HEADS) == set(list_heads())
    assert tuple(study.name for study in STUDIES) == values.STUDIES
    assert set(values.RULES) == set(RULES)
    assert set(values.MEASURES) == set(MEASURES)


def test_choices_are_those_that_are_accepted():
    """What the help shows as the only choices is what the dataclass lets through, and nothing else."""
    for command in cli.COMMANDS:
        first = {"checkpoint": ".", "images": ["."], "shell": "bash"}
        given = {name: value for name, value in first.items() if name in {f.name for f in options_of(command.config)}}
        if command.name == "explore":
            given["checkpoint"] = ["."]
        for option in options_of(command.config):
            choices = values.choices_of(command.name, option)
            if not choices or option.group or option.is_list or option.literals:
                continue
            if (command.name, option.name) in (("evaluate", "kind"), ("datasets", "action")):
                continue  # looked at later, and tested there
            for choice in choices:
                more = {"data": _with_validation()} if choice == "best-val" else {}
                command.config(**{**given, **more, option.name: choice})
            with pytest.raises(ValueError, match="unknown"):
                command.config(**{**given, option.name: "none-of-them"})


def _with_validation():
    from eigengrain.training.config import Data

    return Data(val_fraction=0.1)


def test_zsh_reads_the_script_of_bash(capsys):
    run(Completion("zsh"))
    text = capsys.readouterr().out
    assert text.endswith(bash(cli.COMMANDS, cli.GROUPS, cli.PROGRAM))
    assert "bashcompinit" in text.splitlines()[0]


def test_fish():
    text = fish(cli.COMMANDS, cli.GROUPS, cli.PROGRAM)
    assert (
        "complete -c eigengrain -n '__eigengrain_is' -f -a train -d 'train a model, from a recipe or from options'" in text
    )
    assert "complete -c eigengrain -n '__eigengrain_is bench' -f -a heads" in text
    assert "complete -c eigengrain -n '__eigengrain_is train' -l amp -x -a 'none bf16 fp16'" in text
    assert "complete -c eigengrain -n '__eigengrain_is bench heads' -l reference -x" in text
    assert "-l quiet -s q" in text
    for line in text.splitlines():
        # every quotation is closed
        assert re.sub(r"'(?:[^'\\]|\\.)*'", "", line).count("'") == (0 if not line.startswith("#") else line.count("'") % 2)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_reads_it(tmp_path):
    path = tmp_path / "eigengrain.fish"
    path.write_text(fish(cli.COMMANDS, cli.GROUPS, cli.PROGRAM))
    code = f"source {path}; complete -C 'eigengrain train --amp '"
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["none", "bf16", "fp16"]


def test_a_script_is_printed_without_torch():
    code = (
        "import sys, json; from eigengrain.cli import main as cli; cli.main(['completion', 'bash']); "
        "print(json.dumps(['torch' in sys.modules, 'rich' in sys.modules]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("complete -o default -F _eigengrain eigengrain\n")
    assert json.loads(done.stderr) == [False, False]
