"""The named errors of the package, and how an unknown name is answered."""

from collections.abc import Iterable
from difflib import get_close_matches


class NonFiniteError(ValueError):
    """The input of a decomposition contains NaN or infinity."""


class LayoutError(ValueError):
    """A folder is not laid out as its data set is; the message shows both, on several lines."""


class FailedError(ValueError):
    """The work itself failed, as when a training diverges: the options could be read, and what they ask for went wrong."""


class MissingPackageError(ImportError):
    """An optional package is needed; the message says how it is installed."""


class EigenSolverError(RuntimeError):
    """A decomposition failed on every rung of the repair ladder."""


class SecondOrderError(RuntimeError):
    """A second derivative was asked of an operation that has a first derivative only."""


def did_you_mean(near: Iterable[str]) -> str:
    """A question about names that are near a wrong one; nothing where there are none.

    Example:
        >>> did_you_mean(["torch", "cpu"]), did_you_mean([])
        ("did you mean 'torch' or 'cpu'?", '')
    """
    names = " or ".join(map(repr, near))
    return f"did you mean {names}?" if names else ""


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> ValueError:
    """The error for a name that is not in a registry: what came, what is near, what there is.

    Example:
        >>> str(unknown_name("backend", "tosch", ["torch", "cpu"]))
        "unknown backend 'tosch': did you mean 'torch'? Choose from: torch, cpu"
        >>> str(unknown_name("backend", "magma", ["torch", "cpu"]))
        "unknown backend 'magma': choose from: torch, cpu"
    """
    known = list(choices)
    near = get_close_matches(str(name), known, n=3, cutoff=0.5) or [k for k in known if name and k.startswith(str(name))]
    said = f"{did_you_mean(near)} Choose from" if near else "choose from"
    return ValueError(f"unknown {kind} {name!r}: {said}: {', '.join(known)}")
