"""The command line: quick to start, one line for a user's mistake, a traceback for ours."""

import subprocess
import sys
import types
from dataclasses import dataclass, fields

import pytest

from eigengrain import __version__, cli
from eigengrain.errors import EigenSolverError, FailedError, LayoutError, NonFiniteError

HEAVY = ("torch", "timm", "torchvision", "captum", "matplotlib", "rich")


def imported_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after a statement."""
    code = f"import sys; {statement}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_and_the_command_line_import_nothing_heavy():
    assert imported_by("import eigengrain") == set()
    assert imported_by("from eigengrain.cli import main; [main.help_of(c) for c in main.COMMANDS]") == set()
    assert imported_by("import eigengrain.cli.main; eigengrain.cli.main.parse(['train', '--epochs', '3'])") == set()


def test_functional_and_heads_import_torch_alone():
    assert imported_by("import eigengrain.functional, eigengrain.heads") == {"torch"}


@dataclass(frozen=True)
class Options:
    """Of the command of these tests.

    Args:
        steps: how many.
        widths: one or several.
    """

    steps: int = 3
    widths: list[int] | int = 1

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"--steps must be at least 0, got {self.steps}")


@pytest.fixture
def command(monkeypatch):
    """A command ``try`` and ``bench try`` that call a function of the test's choice; returns what it was called with."""
    module = types.ModuleType("command_of_a_test")
    module.calls = []
    module.act = lambda config: None

    def run(config):
        module.calls.append(config)
        return module.act(config)

    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = [cli.Command(name, "of a test", Options, "command_of_a_test:run") for name in ("try", "bench try")]
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, *entries))
    return module


def one_line(capsys) -> str:
    """The only line on stderr; nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("eigengrain: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("eigengrain: error: ").strip()


def test_options_come_from_the_dataclass(command):
    assert cli.main(["try"]) == 0
    assert cli.main(["try", "--steps", "5", "--widths=[1,2]"]) == 0
    assert cli.main(["bench", "try", "--widths", "7"]) == 0
    assert cli.main(["try", "--widths", "1,2"]) == 0
    assert command.calls == [Options(), Options(5, [1, 2]), Options(3, 7), Options(3, [1, 2])]


def test_options_come_from_a_file_and_the_line_wins(command, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("steps: 5\nwidths: [1, 2]\n")
    assert cli.main(["try", "--config", str(file), "--steps", "6"]) == 0
    assert command.calls == [Options(6, [1, 2])]


def test_a_command_may_return_an_exit_code(command):
    command.act = lambda config: 7
    assert cli.main(["try"]) == 7


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["ttry"], "unknown command 'ttry': did you mean 'try'? Choose from: "),
        (
            ["bench", "functonal"],
            "unknown bench command 'functonal': did you mean 'functional'? Choose from: functional",
        ),
        ([], "a command is needed after 'eigengrain'. Choose from: "),
        (["bench"], "a command is needed after 'eigengrain bench'. Choose from: functional"),
        (["try", "--setps", "3"], "unknown option '--setps': did you mean '--steps'? (see 'eigengrain try --help')"),
        (["try", "--setps=3"], "unknown option '--setps': did you mean '--steps'?"),
        (["try", "--step", "3"], "unknown option '--step': did you mean '--steps'?"),
        (["bench", "try", "--xyz"], "unknown option '--xyz': there is none like it (see 'eigengrain bench try --help')"),
        (["--verison"], "unknown option '--verison': did you mean '--version'? (see 'eigengrain --help')"),
        (["try", "--steps", "many"], "--steps must be an integer, got 'many' (see"),
        (
            ["try", "--widths", "1,b"],
            "--widths must be an integer or a list of integers such as 1,2, got '[1,b]'",
        ),
        (["try", "-x"], "unknown option '-x'"),
        (["-x"], "unknown option '-x': there is none like it (see 'eigengrain --help')"),
        (["try", "--steps"], "--steps needs a value"),
        (["try", "word"], "unexpected argument 'word': only options are expected here (see 'eigengrain try --help')"),
        (["try", "--steps", "-1"], "--steps must be at least 0, got -1"),
        (["try", "--config", "missing.yaml"], "cannot read missing.yaml"),
    ],
)
def test_a_mistake_gets_one_line_and_code_2(command, capsys, argv, said):
    assert cli.main(argv) == 2
    assert said in one_line(capsys)
    assert command.calls == []


def test_a_misspelt_key_of_a_file_is_refused_with_what_is_near(command, capsys, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("setps: 5\n")
    assert cli.main(["try", "--config", str(file)]) == 2
    assert one_line(capsys).startswith("unknown option 'setps': did you mean 'steps'?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data:\n  nam: cub\n", "unknown option 'data.nam': did you mean 'data.name'"),
        ("data:\n  transforms:\n    kindd: timm\n", "unknown option 'data.transforms.kindd': did you mean 'data.tra"),
        ("optimiser:\n  - lr: 3\n", "--optimiser must be a mapping of names to values, got [{'lr': 3}]"),
        ("seed: 1\ndata:\n", "--data must be a mapping of names to values, got None"),
        ("seed: 1\nepochs:\n", "--epochs must be an integer, got None"),
        ("optimiser: {lr: null}\n", "--optimiser.lr must be a number, got None"),
        ("resume: 'false'\n", "--resume must be true or false, got 'false'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(capsys, tmp_path, text, said):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    assert cli.main(["train", "--config", str(file)]) == 2
    assert one_line(capsys).startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps: [1\n", "not valid YAML"),
        ("steps: 1\n".encode("utf-16"), "it is not UTF-8 text"),
        (b"# steps: 1\n", "it holds nothing"),
        (b"- steps\n", "it holds a list"),
    ],
)
def test_a_file_that_holds_no_options_is_named(command, capsys, tmp_path, content, said):
    good, file = tmp_path / "good.yaml", tmp_path / "options.yaml"
    good.write_text("steps: 1\n")
    file.write_bytes(content)
    assert cli.main(["try", "--config", str(good), f"--config={file}"]) == 2
    assert one_line(capsys).startswith(f"cannot read {file}: {said}")


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "photos", "näher.jpg", "--checkpoint", "runs/1", "--topk", "3"],
        ["evaluate", "runs/1", "--subset", "top:3", "--flip"],
        ["datasets", "check", "cub", "birds"],
        ["models", "resnet18"],
        ["train", "--data.transforms.kind=timm", "--data.transforms.scale", "0.1,1", "--data.options", "{level: family}"],
    ],
)
def test_printed_options_are_read_back_with_what_was_given_without_its_name(capsys, tmp_path, words):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--print_config"])
    assert stop.value.code == 0
    file = tmp_path / "options.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert cli.parse([words[0], "--config", str(file)]).config == cli.parse(words).config


def test_null_and_switches_of_a_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("ema: null\nresume: false\ndry_run: true\n")
    config = cli.parse(["train", "--config", str(file)]).config
    assert (config.ema, config.resume, config.dry_run) == (None, False, True)


def test_a_home_folder_is_one_wherever_it_is_written(tmp_path, monkeypatch):
    """The shell expands '--out ~/runs', and neither '--out=~/runs' nor a file."""
    monkeypatch.setenv("HOME", "/home/ada")
    file = tmp_path / "options.yaml"
    file.write_text("out: ~/runs\ndata: {root: ~/birds}\n")
    config = cli.parse(["train", "--config", str(file), "--model.weights=~/w.pth"]).config
    assert (config.out, config.data.root, config.model.weights) == ("/home/ada/runs", "/home/ada/birds", "/home/ada/w.pth")
    config = cli.parse(["predict", "~/a.jpg", "b~.jpg", "--checkpoint=~/runs"]).config
    assert (config.images, config.checkpoint) == (["/home/ada/a.jpg", "b~.jpg"], "/home/ada/runs")
    assert cli.parse(["evaluate", "x", "--subset=~(top:2)"]).config.subset == ["~(top:2)"]


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["evaluate", "x", "--subset", "top:2,last:3", "--subset=all"], "subset", ["top:2", "last:3", "all"]),
        (["explain", "x", "--rules", "vanilla,guided"], "rules", ["vanilla", "guided"]),
        (["explain", "x", "--rules", "vanilla", "guided"], "rules", ["vanilla", "guided"]),
        (["explain", "x", "--images=1.jpg,2.jpg"], "images", ["1.jpg", "2.jpg"]),
    ],
)
def test_commas_make_a_list_in_every_command(words, option, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert getattr(cli.parse(words).config, option) == value


def test_a_comma_in_the_name_of_a_file(tmp_path):
    file = tmp_path / "1,2.jpg"
    file.touch()
    assert cli.parse(["explain", str(tmp_path), "--images", str(file)]).config.images == [str(file)]


def test_a_pair_of_numbers_is_a_list():
    words = ["train", "--data.transforms.kind", "timm", "--data.transforms.scale"]
    for pair in ("0.1,1", "[0.1,1]"):
        assert cli.parse([*words, pair]).config.data.transforms.scale == (0.1, 1.0)


@pytest.mark.parametrize(("error", "code"), [(ValueError, 2), (NonFiniteError, 1), (EigenSolverError, 1), (FailedError, 1)])
def test_an_error_of_the_package_gets_one_line(command, capsys, error, code):
    def act(config):
        raise error("first line\n  second line")

    command.act = act
    assert cli.main(["try"]) == code
    assert one_line(capsys) == "first line second line"


def test_the_layout_of_a_folder_keeps_its_lines(command, capsys):
    def act(config):
        raise LayoutError("first line\n  second line")

    command.act = act
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "eigengrain: error: first line\n  second line\n"


def test_a_bug_keeps_its_traceback(command):
    def act(config):
        raise RuntimeError("ours")

    command.act = act
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["try"])


def test_interrupt_exits_with_130_and_one_line(command, capsys):
    def act(config):
        raise KeyboardInterrupt

    command.act = act
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "eigengrain: interrupted\n"


def test_version_and_help_exit_with_0(capsys):
    for argv, said in (
        (["--version"], f"eigengrain {__version__}"),
        (["--help"], "demo"),
        (["demo", "--help"], "--per_class"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("entry", cli.COMMANDS, ids=lambda c: c.name)
def test_every_command_can_be_run_and_explains_its_options(entry):
    assert callable(entry.function())
    assert entry.group is None or entry.group in cli.GROUPS
    for field in fields(entry.config):
        assert f"        {field.name}: " in entry.config.__doc__, f"{entry.name}: --{field.name} has no help"


def test_the_installed_script_prints_no_traceback():
    done = subprocess.run([sys.executable, "-m", "eigengrain", "demo", "--epohcs", "2"], capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr
        == "eigengrain: error: unknown option '--epohcs': did you mean '--epochs'? (see 'eigengrain demo --help')\n"
    )


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "eigengrain", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"eigengrain {__version__}\n"), done.stderr


def test_a_package_that_is_not_installed_is_one_line():
    script = "import sys; sys.modules['captum'] = None; from eigengrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["bench", "explain", "--backbone", "test_resnet", "--batch", "1", "--img_size", "32", "--repeats", "1"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    said = "eigengrain: error: saliency maps need captum: pip install 'eigengrain[explain]'\n"
    assert (done.returncode, done.stderr) == (2, said)
