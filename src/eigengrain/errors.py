"""The errors and warnings of the package. They carry what they are about as attributes, not only as text."""

import re
from collections.abc import Callable, Iterable, Mapping
from copyreg import __newobj__  # type: ignore[attr-defined]
from difflib import get_close_matches
from pathlib import Path
from signal import Signals
from typing import Any

_NOT_GIVEN: Any = object()


class ArgumentError(ValueError):
    """An argument has a value that is not allowed.

    The message names Python arguments. ``{name}`` in ``problem`` and ``remedy`` refers to another argument, so that the
    command line can print the names of its options instead, see :meth:`describe`.

    Attributes:
        argument, problem, value, remedy: as given; ``argument`` is dotted for a field of a nested config, ``value`` is only
            printed if it is given.

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


class ReLURuleError(ArgumentError):
    """A backward rule needs ReLUs; ``calls`` counts the calls of each other non-linearity, none in a linear network."""

    def __init__(self, rule: str, problem: str, remedy: str, calls: Mapping[str, int]):
        self.calls = dict(calls)
        super().__init__("rule", problem, rule, remedy)


class UnknownName(ValueError):
    """A name of a ``kind``, such as "head", is not among the choices; ``listing`` is printed instead of a long list.

    Attributes:
        kind, name, choices, listing: as given.
        suggestions: as given, else choices that are close to the name.

    Example:
        >>> print(UnknownName("backend", "tosch", ["torch", "cpu"]))
        unknown backend 'tosch': did you mean 'torch'? Choose from: torch, cpu
        >>> print(UnknownName("backend", "magma", ["torch", "cpu"]))
        unknown backend 'magma': choose from: torch, cpu
    """

    def __init__(self, kind: str, name: object, choices: Iterable[str], listing: str = "", suggestions: Iterable[str] = ()):
        self.kind, self.name, self.choices, self.listing = kind, name, tuple(choices), listing
        self.suggestions = (
            list(suggestions)
            or get_close_matches(str(name), self.choices, n=3, cutoff=0.5)
            or [choice for choice in self.choices if name and choice.startswith(str(name))][:3]
        )
        rest = f"all names: {listing}" if listing else f"choose from: {', '.join(self.choices)}"
        hint = f"{did_you_mean(self.suggestions)} {rest[0].upper()}{rest[1:]}" if self.suggestions else rest
        super().__init__(f"unknown {kind} {name!r}: {hint}")


class FileError(ValueError):
    """A file or folder cannot be read, written or understood: ``cannot {verb} {path}: {problem}``."""

    def __init__(self, path: str | Path, problem: str, verb: str = "read"):
        self.path, self.problem, self.verb = Path(path), problem, verb
        super().__init__(f"cannot {verb} {path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return __newobj__, (type(self), *self.args), self.__dict__  # worker processes send it without calling __init__


class WeightsError(FileError):
    """A weights file does not fit a model; ``report`` is the ``LoadReport`` of what fits, None if nothing does."""

    def __init__(self, path: str | Path, problem: str, report: object = None):
        super().__init__(path, problem, "load")
        self.report = report


class NonFiniteError(ValueError):
    """The input of a decomposition contains NaN or infinity; ``samples`` are the indices of bad samples in the batch."""

    def __init__(self, message: str, samples: Iterable[int] = ()):
        self.samples = tuple(samples)
        super().__init__(message)


class ImageError(FileError):
    """An image cannot be read or used; ``path`` is empty if it is not shown, ``truncated`` if the file ends too early."""

    def __init__(self, problem: str, path: str | Path = "", truncated: bool = False):
        super().__init__(path, problem)
        self.truncated = truncated
        if not path:
            self.args = (problem,)


class AnnotationError(FileError):
    """A list or annotation file of a data set is wrong or does not fit other files; ``value`` is the first bad entry."""

    def __init__(self, dataset: str, path: str | Path, problem: str, value: object = None):
        super().__init__(path, problem)
        self.dataset, self.value = dataset, value


class BatchError(ValueError):
    """Images cannot be stacked to a batch; ``sizes`` are their different sizes, if that is the reason."""

    def __init__(self, message: str, sizes: Iterable[tuple[int, ...]] = ()):
        self.sizes = tuple(sizes)
        super().__init__(message)


class LayoutError(ValueError):
    """A folder does not have the layout of its data set; the message shows both, on several lines.

    Attributes:
        dataset, root, missing: name of the data set, the folder (None if none was given), and the names that it lacks.
    """

    def __init__(self, message: str, dataset: str = "", root: Path | None = None, missing: Iterable[str] = ()):
        self.dataset, self.root, self.missing = dataset, root, tuple(missing)
        super().__init__(message)


class FailedError(ValueError):
    """A command was understood and its work failed, for example because a training diverged."""


class Diverged(FailedError):
    """A training diverged: the loss, the features or the scores are not finite, or all covariances are zero.

    Attributes:
        reason, epoch, batch, batches: what happened, such as "the loss is nan", and where, counted from 1.
        loss, checkpoint: the loss, if it is the reason; the last good checkpoint, if one was written.
        event: reason, epoch and batch in one phrase.
    """

    def __init__(self, reason: str, epoch: int, batch: int, batches: int, loss: float | None, checkpoint: Path | None):
        self.reason, self.epoch, self.batch, self.batches = reason, epoch, batch, batches
        self.loss, self.checkpoint = loss, checkpoint
        self.event = f"{reason} in epoch {epoch} at batch {batch} of {batches}"
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written before"
        super().__init__(
            f"{self.event}: start again in a new folder with a lower learning rate (optimiser.lr), a warm-up "
            f"(schedule.warmup_epochs) or limited gradients (clip_grad); {kept}"
        )


class CheckpointError(FileError):
    """A checkpoint or another file of a training cannot be written or read."""


class Interrupted(Exception):
    """A training was stopped by a signal after its checkpoint was written, at a ``position`` such as "after epoch 3"."""

    def __init__(self, signal: int, position: str):
        self.signal, self.position, self.exit_code = signal, position, 128 + signal  # as shells report it
        super().__init__(f"stopped by {Signals(signal).name} {position}")


class UnreadableImages(FileError):
    """Images of a data set cannot be read; ``problems`` are (path, reason) pairs, and the file ``listing`` lists them."""

    def __init__(self, problems: Iterable[tuple[str, str]], listing: Path):
        self.problems, self.listing = tuple(problems), listing
        (path, reason), number = self.problems[0], len(self.problems)
        remedy = f"replace or remove the {number} unreadable images that {listing} lists, or set data.skip_unreadable"
        super().__init__(path, f"{reason}; {remedy}")


class MissingPackageError(ImportError):
    """An optional package is not installed; the message contains the command that installs it."""


class EigenSolverError(RuntimeError):
    """An eigendecomposition failed after every fallback."""


class SecondOrderError(RuntimeError):
    """A second derivative was requested from a ``function`` that only has a first derivative."""

    def __init__(self, message: str, function: str = ""):
        self.function = function
        super().__init__(message)


class ShortRankWarning(UserWarning):
    """A feature map has fewer ``positions`` than ``channels``, so that the covariance is singular for every image."""

    def __init__(self, message: str, channels: int = 0, positions: int = 0):
        self.channels, self.positions = channels, positions
        super().__init__(message)


class UnfinishedWarning(UserWarning):
    """A model is that of an unfinished training: of a ``checkpoint`` after ``epoch`` (of ``epochs``) and ``batch``."""

    def __init__(self, checkpoint: Path, epoch: int, batch: int, epochs: int):
        self.checkpoint, self.epoch, self.batch, self.epochs = checkpoint, epoch, batch, epochs
        place = f"batch {batch} of epoch {epoch + 1}" if batch else f"epoch {epoch}"
        super().__init__(f"the training has not finished: {checkpoint} has the weights after {place} of {epochs}")


def did_you_mean(suggestions: Iterable[str]) -> str:
    """A question that lists close matches; empty if there are none."""
    names = " or ".join(map(repr, suggestions))
    return f"did you mean {names}?" if names else ""
