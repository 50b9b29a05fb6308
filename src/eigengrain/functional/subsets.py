"""Subsets of the eigenvalues, selected by rank."""

import re
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from eigengrain.errors import ArgumentError

_TERM = re.compile(r"(top|last):([0-9]{1,9})")

#: limits of a subset, far above any use: the number of its terms, its nesting, and the length of its text
_MOST_TERMS, _DEEPEST, _LONGEST = 1000, 50, 20_000


def _terms(sum_: str) -> list[str]:
    """Split a sum at each + outside of brackets."""
    start, depth, terms = 0, 0, []
    for place, character in enumerate(sum_):
        depth += (character == "(") - (character == ")")
        if character == "+" and depth == 0:
            terms.append(sum_[start:place])
            start = place + 1
    return [*terms, sum_[start:]]


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"


def _too_large(value: str) -> ArgumentError:
    return ArgumentError("subset", f"must have at most {_MOST_TERMS} terms, nested at most {_DEEPEST} deep", value)


def small_part(d: int) -> int:
    """Number of the d eigenvalues that count as small: the share of the paper, 50 of 256, and at least one.

    Example:
        >>> small_part(256), small_part(64), small_part(512), small_part(2)
        (50, 12, 100, 1)
    """
    return max(round(d * 50 / 256), 1)


@dataclass(frozen=True)
class EigenSubset:
    """Eigenvalues selected by their rank in descending order, for any dimension d.

    Functions with a subset argument also accept text: ``all``, ``top:k`` (the k largest), ``last:k`` (the k smallest), sums
    such as ``top:1+last:50``, and complements such as ``~(top:206)``.

    Subsets are combined with ``|``, ``&`` and :meth:`complement`. Only :meth:`mask` takes the dimension, and raises
    if the subset does not fit it.

    Example:
        >>> EigenSubset.parse("top:1+last:2").mask(5)
        tensor([ True, False, False,  True,  True])
        >>> str(EigenSubset.largest(206).complement())
        '~(top:206)'
    """

    kind: Literal["all", "top", "last", "union", "complement"] = "all"
    k: int = 0
    parts: tuple["EigenSubset", ...] = ()
    terms: int = field(init=False, repr=False, compare=False)
    depth: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # counted from the parts, which are counted already: the other methods are recursive
        object.__setattr__(self, "terms", sum([part.terms for part in self.parts]) or 1)
        object.__setattr__(self, "depth", 1 + max([0, *[part.depth for part in self.parts]]))
        if self.terms > _MOST_TERMS or self.depth > 2 * _DEEPEST:
            raise _too_large(f"{self.kind} of {self.terms} terms, {self.depth} deep")
        if self.kind in ("top", "last") and (isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1):
            raise ArgumentError("subset", "must have an integer k of at least 1", f"{self.kind}:{self.k}")

    @classmethod
    def all(cls) -> "EigenSubset":
        return cls("all")

    @classmethod
    def largest(cls, k: int) -> "EigenSubset":
        """λ_1 … λ_k."""
        return cls("top", k)

    @classmethod
    def smallest(cls, k: int) -> "EigenSubset":
        """The last k of the d eigenvalues."""
        return cls("last", k)

    @classmethod
    def parse(cls, text: "str | EigenSubset | None") -> "EigenSubset":
        """Parse the text of a subset; None is ``all``, and a subset is returned unchanged."""
        if text is None:
            return cls.all()
        if isinstance(text, EigenSubset):
            return text
        if not isinstance(text, str):
            raise ArgumentError("subset", "must be a string such as 'top:206'", text)
        depths = accumulate((character == "(") - (character == ")") for character in text[:_LONGEST])
        if len(text) > _LONGEST or text.count("+") >= _MOST_TERMS or max([0, *depths]) >= _DEEPEST:
            raise _too_large(_shorten(text))
        subset, *others = [cls._parse_term(term, text) for term in _terms(text.replace(" ", ""))]
        for other in others:
            subset |= other
        return subset

    @classmethod
    def _parse_term(cls, term: str, text: str) -> "EigenSubset":
        if term == "all":
            return cls.all()
        if term.startswith("~(") and term.endswith(")"):
            return cls.parse(term[2:-1]).complement()
        match = _TERM.fullmatch(term)
        if match is None:
            forms = "'all', 'top:k', 'last:k', a sum such as 'top:1+last:50' or a complement such as '~(top:206)'"
            raise ArgumentError("subset", f"must be {forms}", _shorten(text))
        return cls("top" if match[1] == "top" else "last", int(match[2]))

    def complement(self) -> "EigenSubset":
        return self.parts[0] if self.kind == "complement" else EigenSubset("complement", parts=(self,))

    def __or__(self, other: "EigenSubset") -> "EigenSubset":
        if not isinstance(other, EigenSubset):
            return NotImplemented
        parts = tuple(part for s in (self, other) for part in (s.parts if s.kind == "union" else (s,)))
        return EigenSubset("union", parts=parts)

    def __and__(self, other: "EigenSubset") -> "EigenSubset":
        if not isinstance(other, EigenSubset):
            return NotImplemented
        return (self.complement() | other.complement()).complement()

    def __str__(self) -> str:
        if self.kind == "all":
            return "all"
        if self.kind == "union":
            return "+".join(str(part) for part in self.parts)
        if self.kind == "complement":
            return f"~({self.parts[0]})"
        return f"{self.kind}:{self.k}"

    def _members(self, d: int) -> frozenset[int]:
        if self.kind == "all":
            return frozenset(range(d))
        if self.kind == "union":
            return frozenset().union(*(part._members(d) for part in self.parts))
        if self.kind == "complement":
            return frozenset(range(d)) - self.parts[0]._members(d)
        if self.k > d:
            raise ArgumentError("subset", f"must have a k of at most {d}, the number of eigenvalues", str(self))
        return frozenset(range(self.k) if self.kind == "top" else range(d - self.k, d))

    def _test(self, rank: Tensor, d: int) -> Tensor:
        """Membership by comparison of ranks, on the device of the data, so that there is no copy from the host."""
        if self.kind == "union":
            return torch.stack([part._test(rank, d) for part in self.parts]).any(0)
        if self.kind == "complement":
            return ~self.parts[0]._test(rank, d)
        low, high = {"all": (0, d), "top": (0, self.k), "last": (d - self.k, d)}[self.kind]
        return (rank >= low) & (rank < high)

    def covers(self, d: int) -> bool:
        """Whether all d eigenvalues are kept."""
        return self.kind == "all" or len(self._members(d)) == d

    def mask(self, d: int, device: torch.device | str | None = None) -> Tensor:
        """Boolean (d,), True where an eigenvalue is kept, in descending order; raises if k > d or nothing is kept."""
        if not self._members(d):
            raise ArgumentError("subset", f"must keep at least one of {d} eigenvalues", str(self))
        return self._test(torch.arange(d, device=device), d)

    def relative_gap(self, eigenvalues: Tensor) -> Tensor:
        r"""The smallest :math:`(\lambda_k - \lambda_{k+1})/\lambda_k` over the cuts of this subset, shape (*).

        The derivative of a cut spectrum grows as the inverse of this gap, because the kept subspace turns. The gap is
        infinite if nothing is cut. Cuts between zero eigenvalues are left out; it is NaN if all cuts are such, or if an
        eigenvalue at a cut is NaN.
        """
        mask = self.mask(eigenvalues.shape[-1], eigenvalues.device)
        cut = mask[1:] != mask[:-1]
        if not bool(cut.any()):
            return torch.full_like(eigenvalues[..., 0], float("inf"))
        upper, lower = eigenvalues[..., :-1][..., cut], eigenvalues[..., 1:][..., cut]
        zero = upper <= 0
        gaps = torch.where(zero, float("inf"), (upper - lower) / upper)
        return torch.where(zero.all(-1), float("nan"), gaps.amin(-1))
