"""Nothing that an option, a file of options or a record names is imported or called."""

import contextlib
import json
from pathlib import Path
from typing import get_origin

import pytest
import yaml
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from studies.__main__ import COMMANDS as STUDIES

from eigengrain.cli import main as cli
from eigengrain.cli.commands import COMMANDS
from eigengrain.cli.parser import parse_command
from eigengrain.errors import FileError
from eigengrain.options import build, options_of
from eigengrain.training import config as training
from eigengrain.training.config import Train, from_mapping, to_mapping
from eigengrain.yaml_files import MAX_DEPTH, load, read_mapping

OPTIONS = [(command, option) for command in (*COMMANDS, *BENCHMARKS, *STUDIES) for option in options_of(command.config)]


@pytest.fixture
def trap(tmp_path):
    """Values that create a file if anything calls them, and a check that nothing did."""
    mark = tmp_path / "code-ran"
    call = {"class_path": "pathlib.Path.touch", "init_args": {"self": str(mark)}}
    system = {"class_path": "os.system", "init_args": {"command": f"touch {mark}"}}
    yield [call, system, {"deeper": [{"at": system}]}, [system]]
    assert not mark.exists()


def nest(name, value):
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def try_to_build(command, values):
    """Build the config of a command; None if the values are refused."""
    try:
        return build(command.config, values)
    except ValueError:
        return None


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{c.name}-{o.name}" for c, o in OPTIONS])
def test_no_option_of_any_command_runs_what_a_mapping_names(command, option, trap, tmp_path):
    for value in trap:
        values = nest(option.name, value)
        config = try_to_build(command, values)
        if config is not None and isinstance(value, dict):
            kept = config
            for part in option.name.split("."):
                kept = getattr(kept, part)
            assert kept == value  # as plain data
            assert get_origin(option.hint) is dict
        file = tmp_path / "options.yaml"
        file.write_text(yaml.safe_dump(values))
        for words in (["--config", str(file)], [f"--{option.name}={json.dumps(value)}"]):
            with contextlib.suppress(ValueError, SystemExit):
                parse_command(command, words)


def test_sections_are_not_classes_by_name(trap):
    for section in ("data", "model", "optimiser", "schedule", "data.transforms"):
        for value in trap:
            with pytest.raises(ValueError):
                from_mapping(nest(section, value))


def test_a_shared_run_folder_runs_nothing(trap, tmp_path):
    for number, value in enumerate(trap):
        for name in ("optimiser.options", "model.head_options", "model.backbone_options", "data.options"):
            folder = tmp_path / f"run-{number}-{name}"
            (folder / "model").mkdir(parents=True)
            values = to_mapping(Train())
            section, last = name.split(".")
            values[section][last] = value
            (folder / "args.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(values))))
            for command in ("evaluate", "explain"):
                for place in (folder, folder / "model"):
                    assert cli.main([command, str(place), "--device", "cpu"]) == 2
            assert cli.main(["train", "--config", str(folder / "args.yaml"), "--dry_run"]) == 2


def test_a_recipe_runs_nothing(trap, tmp_path, monkeypatch):
    for value in trap:
        file = tmp_path / "hostile.yaml"
        file.write_text(yaml.safe_dump({"optimiser": {"options": value}}))
        monkeypatch.setattr(training, "recipe_path", lambda name, file=file: str(file))
        if isinstance(value, dict):
            assert training.load_recipe("any").optimiser.options == value  # as plain data
        else:
            with pytest.raises(ValueError):
                training.load_recipe("any")


HOSTILE = {
    "tag": "a: !!python/object/apply:os.system ['echo code ran']",
    "own tag": "a: !thing 3",
    "standard tag": "a: !!int '3'",
    "laughs": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "\n".join(f"{n}: &{n} [{', '.join(['*' + m] * 9)}]" for m, n in zip("abcdefgh", "bcdefghi", strict=True)),
    "cycle": "a: &a [*a]",
    "deep": "a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "very deep": "a: " + "[" * 20_000,
    "deep by aliases": "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2 * MAX_DEPTH)),
    "key": "? [1, 2]\n: 3",
    "date": "a: 2026-01-01",
    "number": "a: " + "9" * 10_000,
    "two documents": "a: 1\n---\nb: 2",
    "unprintable": "a: \x00",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_refused(name, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(HOSTILE[name])
    with pytest.raises(FileError) as error:
        read_mapping(file)
    assert error.value.path == file
    assert "\n" not in str(error.value)


def test_large_and_special_files_are_refused(tmp_path):
    large = tmp_path / "large.yaml"
    large.write_text("a: 1\n" + "#" * (1 << 20))
    for file in (large, Path("/dev/zero"), tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(FileError):
            read_mapping(file)


def test_aliases_that_do_not_multiply_are_read():
    assert load("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}
