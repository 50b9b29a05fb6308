"""The command line: one entry a command, and nothing heavy imported before the command is known.

To add a command, add one :class:`Command` to ``COMMANDS``. Its config is a dataclass in a module without torch (the
options, their types, defaults and help are read from it), and ``run`` names the function that receives the config.
"""

import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast

from jsonargparse import ArgumentError, ArgumentParser

from eigengrain import __version__, errors
from eigengrain.bench.config import Doctor, FunctionalBench, GrowthBench, HeadsBench, SolversBench, StepBench
from eigengrain.bench.explain_config import ExplainBench
from eigengrain.bench.loader import LoaderBench
from eigengrain.commands.datasets import Datasets
from eigengrain.commands.evaluate import Evaluate
from eigengrain.commands.explain import Explain
from eigengrain.commands.explore import Explore
from eigengrain.commands.export import Export
from eigengrain.commands.listing import Heads, Models
from eigengrain.commands.predict import Predict
from eigengrain.errors import unknown_name
from eigengrain.studies.config import Demo, GradientTour, StudyRun
from eigengrain.training.config import Train

PROGRAM = "eigengrain"


@dataclass(frozen=True)
class Command:
    """A command: its words, its line in the help, the dataclass of its options and ``module:function`` that runs it.

    Example:
        >>> Command("bench functional", "time the layers", FunctionalBench, "eigengrain.bench.functional:run").group
        'bench'
    """

    name: str
    help: str
    config: type[Any]
    run: str
    #: options that are given without their name, as many of them as argparse's nargs says: ? or *
    positional: dict[str, str] = field(default_factory=dict)
    #: ``module:function`` that rewrites the words after the command's name before they are parsed, as for ``--recipe NAME``
    expand: str | None = None

    @property
    def group(self) -> str | None:
        """The first of two words, or None."""
        return self.name.split()[0] if " " in self.name else None

    @property
    def last_word(self) -> str:
        return self.name.split()[-1]

    def function(self) -> Callable[[Any], int | None]:
        """What runs the command, imported now; it may return an exit code."""
        return _imported(self.run)


#: help of the words that have commands of their own
GROUPS = {"bench": "measure speed, memory and gradients"}

COMMANDS = (
    Command(
        "train",
        "train a model, from a recipe or from options",
        Train,
        "eigengrain.commands.train:run",
        expand="eigengrain.recipes:expand",
    ),
    Command(
        "evaluate",
        "accuracy of a trained model on a split, also with eigenvalue subsets",
        Evaluate,
        "eigengrain.commands.evaluate:run",
        expand="eigengrain.commands.evaluate:expand",
    ),
    Command(
        "predict",
        "name what images show, with a trained model",
        Predict,
        "eigengrain.commands.predict:run",
        positional={"images": "*"},
    ),
    Command(
        "explain",
        "what large and small eigenvalues see in images: maps, measures and a page",
        Explain,
        "eigengrain.commands.explain:run",
        positional={"checkpoint": "?"},
        expand="eigengrain.commands.explain:expand",
    ),
    Command(
        "explore",
        "a local web page: split the eigenvalues of an image, and see what each part says and where it looks",
        Explore,
        "eigengrain.commands.explore:run",
        expand="eigengrain.commands.explore:expand",
    ),
    Command(
        "export",
        "write a trained model for ONNX Runtime or torch.export",
        Export,
        "eigengrain.commands.export:run",
    ),
    Command(
        "models",
        "the backbones, and the size of their feature maps",
        Models,
        "eigengrain.commands.listing:run_models",
        positional={"pattern": "?"},
    ),
    Command(
        "heads",
        "the heads, and the length of their vectors",
        Heads,
        "eigengrain.commands.listing:run_heads",
        positional={"pattern": "?"},
    ),
    Command(
        "datasets",
        "the data sets, their layouts, and a check of a folder's images",
        Datasets,
        "eigengrain.commands.datasets:run",
        positional={"action": "?", "name": "?", "root": "?"},
    ),
    Command(
        "demo",
        "train four heads on drawn birds in a few minutes, and write a report",
        Demo,
        "eigengrain.studies.demo:run",
    ),
    Command(
        "study",
        "a table or figure of the paper: train what is missing, show ours beside the paper's",
        StudyRun,
        "eigengrain.studies.campaign:run",
        positional={"name": "?"},
    ),
    Command(
        "bench functional",
        "time and memory of every square root of a covariance",
        FunctionalBench,
        "eigengrain.bench.functional:run",
    ),
    Command(
        "bench gradients",
        "every gradient rule of the covariance root against the exact one",
        GradientTour,
        "eigengrain.studies.gradients:run",
    ),
    Command(
        "bench heads",
        "time and memory of every head on a feature map",
        HeadsBench,
        "eigengrain.bench.heads:run",
    ),
    Command(
        "bench step",
        "time and memory of whole training steps (Table 8 of the paper)",
        StepBench,
        "eigengrain.bench.step:run",
    ),
    Command(
        "bench growth",
        "how the time of the SEB layer grows with batch and channels",
        GrowthBench,
        "eigengrain.bench.growth:run",
    ),
    Command(
        "bench solvers",
        "time of every eigensolver, and the errors of every root of a covariance",
        SolversBench,
        "eigengrain.bench.solvers:run",
    ),
    Command(
        "bench explain",
        "what maps of eigenvalue subsets cost beside the backbone's own passes, and a perturbation",
        ExplainBench,
        "eigengrain.bench.explain:run",
    ),
    Command(
        "bench loader",
        "images a second of the loader, beside torchvision's",
        LoaderBench,
        "eigengrain.bench.loader:run",
    ),
    Command(
        "doctor",
        "what is installed, which devices there are, which eigensolver each of them gets",
        Doctor,
        "eigengrain.bench.doctor:run",
    ),
)

#: what counts as a user's mistake and gets one line; anything else is a bug of ours and keeps its traceback
USER_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    *(e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)),
)


def _parser(description: str | None = None, **options: Any) -> ArgumentParser:
    # abbreviated options would turn a new option into a breaking change; errors are worded in _explain
    return ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False, **options)


def _imported(path: str) -> Callable[..., Any]:
    """What ``module:function`` names, imported now."""
    module, name = path.split(":")
    return cast(Callable[..., Any], getattr(import_module(module), name))


def _expanded(argv: Sequence[str]) -> list[str]:
    for command in COMMANDS:
        words = command.name.split()
        if command.expand and list(argv[: len(words)]) == words:
            return [*words, *_imported(command.expand)(argv[len(words) :])]
    return list(argv)


def _add_options(parser: ArgumentParser, command: Command) -> None:
    """The options of a command: positional ones, switches (--json, without a value), and the others by name."""
    draft = _parser()
    draft.add_class_arguments(command.config)
    said = {name.lstrip("-"): action.help for name, action in draft._option_string_actions.items()}
    switches = [f for f in fields(command.config) if f.type in (bool, "bool") and f.default is False]
    parser.add_class_arguments(command.config, skip={*command.positional, *(f.name for f in switches)})
    for name, many in command.positional.items():
        # where none is given nothing is set, so that a YAML file may say it
        parser.add_argument(name, nargs=many, type=str, default=SUPPRESS, help=said[name])
    for switch in switches:
        parser.add_argument(f"--{switch.name}", action="store_true", help=said[switch.name])


class _Parsers:
    """The tree of parsers, with those of single commands at hand by name."""

    def __init__(self) -> None:
        self.top = _parser("Second-order (global covariance) pooling for fine-grained visual recognition.", prog=PROGRAM)
        self.top.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}", help="print the version")
        branches: dict[str | None, Any] = {None: self.top.add_subcommands(required=True, metavar="command", dest="command")}
        self.of: dict[str, ArgumentParser] = {}
        for command in COMMANDS:
            if command.group is not None and command.group not in branches:
                group = _parser(GROUPS[command.group])
                branches[None].add_subcommand(command.group, group, help=GROUPS[command.group])
                branches[command.group] = group.add_subcommands(required=True, metavar="command", dest="command")
            parser = self.of[command.name] = _parser(command.help)
            parser.add_argument("--config", action="config", help="a YAML file with these options")
            _add_options(parser, command)
            branches[command.group].add_subcommand(command.last_word, parser, help=command.help)

    def parse(self, argv: Sequence[str]) -> tuple[Command, Any]:
        """The command that ``argv`` asks for and its config; ValueError for what cannot be read."""
        try:
            namespace = self.top.parse_args(_expanded(argv))
        except ArgumentError as error:
            raise ValueError(self._explain(argv, str(error))) from error
        # jsonargparse before 4.49 has another name for it
        instantiate = getattr(self.top, "instantiate", None) or self.top.instantiate_classes
        namespace = instantiate(namespace)
        name, options = namespace.command, namespace[namespace.command]
        if name in GROUPS:
            name, options = f"{name} {options.command}", options[options.command]
        command = next(c for c in COMMANDS if c.name == name)
        return command, command.config(**{f.name: options[f.name] for f in fields(command.config) if f.name in options})

    def _explain(self, argv: Sequence[str], message: str) -> str:
        """One line for a command line that cannot be read: misspelt words first, with what is near them."""
        path = ""
        for place, token in enumerate(argv):
            name = f"{path} {token}".strip()
            if name in self.of or token.startswith("-"):
                who, parser = (f"{PROGRAM} {name}", self.of[name]) if name in self.of else (PROGRAM, self.top)
                line = _misspelt_option(argv[place:], message, parser) or _one_line(message)
                return f"{line} (see '{who} --help')"
            if name not in GROUPS:
                return str(unknown_name(f"{path} command".strip(), token, self._choices(path)))
            path = name
        return f"a command is needed after '{f'{PROGRAM} {path}'.strip()}'. Choose from: {', '.join(self._choices(path))}"

    def _choices(self, path: str) -> list[str]:
        """Commands that may follow the words so far."""
        if path:
            return [c.last_word for c in COMMANDS if c.group == path]
        return list(dict.fromkeys(c.group or c.name for c in COMMANDS))


def _misspelt_option(tokens: Sequence[str], message: str, parser: ArgumentParser) -> str | None:
    """What to say about the first option, typed or in a YAML file, that the parser does not have; None if it has all."""
    known = [o[2:] for o in parser._option_string_actions if o.startswith("--") and not o.endswith("+")]
    typed = [token[2:].split("=")[0].removesuffix("+") for token in tokens if token.startswith("--")]
    in_file = re.findall(r"(?:option|key) '([\w.]+)'", message)
    for option in (*typed, *in_file):
        if option not in known:
            near = get_close_matches(option, known, n=3)
            hint = f"did you mean {' or '.join(repr(f'--{n}') for n in near)}?" if near else "there is none like it"
            return f"unknown option '--{option}': {hint}"
    return None


def _one_line(message: str) -> str:
    line = re.sub(r'^Parser key "([\w.]+)": ', r"option --\1: ", " ".join(message.split()))
    return re.sub(
        r"Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] Errors: .* Given value: (.*)$",
        r"cannot read '\2' as one of \1; a list is written [1,2]",
        line,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for a user's mistake (one line on stderr) or 130 after Ctrl-C."""
    try:
        command, config = _Parsers().parse(sys.argv[1:] if argv is None else argv)
        return command.function()(config) or 0
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        message = str(error) if isinstance(error, errors.LayoutError) else _one_line(str(error))
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
