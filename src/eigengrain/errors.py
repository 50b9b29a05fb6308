"""The errors and warnings of the package. They carry what they are about as attributes, not only as text."""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_NOT_GIVEN: Any = object()


class ArgumentError(ValueError):
    """An argument has a value that is not allowed.

    The message names Python arguments. ``{name}`` in ``problem`` and ``remedy`` refers to another argument, so that the
    command line can print the names of its options instead, see :meth:`describe`.

    Args:
        argument: name of the argument, dotted for a field of a nested config.
        problem: what is wrong, such as "must be at least 1".
        value: the value that was given, if it should be printed.
        remedy: what to do about it.

    Attributes:
        argument, problem, value, remedy: as given; ``value`` is None if it was not given.

    Example:
        >>> error = ArgumentError("ema", "must be between 0 and 1", 2.0, "try 0.999")
        >>> print(error)
        ema must be between 0 and 1, got 2.0: try 0.999
        >>> print(ArgumentError("save_every", "must be a multiple of {accumulate}", 3).describe(lambda name: f"--{name}"))
        --save_every must be a multiple of --accumulate, got 3
    """

    def __init__(self, argument: str, problem: str, value: Any = _NOT_GIVEN, remedy: str = ""):
        self.argument, self.problem, self.remedy = argument, problem, remedy
        self._printed = "" if value is _NOT_GIVEN else f", got {value!r}"
        self.value = None if value is _NOT_GIVEN else value
        super().__init__(self.describe(str))

    def describe(self, name: Callable[[str], str]) -> str:
        """The message, with every argument named by a function."""

        def fill(text: str) -> str:
            return re.sub(r"\{([\w.]+)\}", lambda match: name(match[1]), text)

        remedy = f": {fill(self.remedy)}" if self.remedy else ""
        return f"{name(self.argument)} {fill(self.problem)}{self._printed}{remedy}"


class UnknownName(ValueError):
    """A name is not among the choices.

    Args:
        kind: what the name is of, such as "head".
        name: the name that was given.
        choices: the names that exist.

    Attributes:
        kind, name, choices: as given.
        suggestions: choices that are close to the name.

    Example:
        >>> print(UnknownName("backend", "tosch", ["torch", "cpu"]))
        unknown backend 'tosch': did you mean 'torch'? Choose from: torch, cpu
        >>> print(UnknownName("backend", "magma", ["torch", "cpu"]))
        unknown backend 'magma': choose from: torch, cpu
    """

    def __init__(self, kind: str, name: object, choices: Iterable[str]):
        self.kind, self.name, self.choices = kind, name, tuple(choices)
        self.suggestions = get_close_matches(str(name), self.choices, n=3, cutoff=0.5) or [
            choice for choice in self.choices if name and choice.startswith(str(name))
        ]
        hint = f"{did_you_mean(self.suggestions)} Choose from" if self.suggestions else "choose from"
        super().__init__(f"unknown {kind} {name!r}: {hint}: {', '.join(self.choices)}")


class FileError(ValueError):
    """A file or folder cannot be read, written or understood.

    Args:
        path: the file.
        problem: why, such as "it is not valid YAML".

    Example:
        >>> print(FileError("args.yaml", "it is not valid YAML"))
        cannot read args.yaml: it is not valid YAML
    """

    def __init__(self, path: str | Path, problem: str, verb: str = "read"):
        self.path, self.problem, self.verb = Path(path), problem, verb
        super().__init__(f"cannot {verb} {path}: {problem}")


class NonFiniteError(ValueError):
    """The input of a decomposition contains NaN or infinity."""


class LayoutError(ValueError):
    """A folder does not have the layout of its data set; the message shows both, on several lines."""


class FailedError(ValueError):
    """A command was understood and its work failed, for example because a training diverged."""


class MissingPackageError(ImportError):
    """An optional package is not installed; the message contains the command that installs it."""


class EigenSolverError(RuntimeError):
    """An eigendecomposition failed after every fallback."""


class SecondOrderError(RuntimeError):
    """A second derivative was requested from an operation that only has a first derivative."""


def did_you_mean(suggestions: Iterable[str]) -> str:
    """A question that lists close matches; empty if there are none.

    Example:
        >>> did_you_mean(["torch", "cpu"]), did_you_mean([])
        ("did you mean 'torch' or 'cpu'?", '')
    """
    names = " or ".join(map(repr, suggestions))
    return f"did you mean {names}?" if names else ""
