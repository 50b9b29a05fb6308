"""The classes: which small marks a bird wears. Silhouette, palette and everything else are the same for all."""

from dataclasses import dataclass

WINGS = ("plain-winged", "one-barred", "two-barred")
BREASTS = ("plain-breasted", "spotted", "banded")


@dataclass(frozen=True)
class Marks:
    """The five parts in which species differ.

    Args:
        bars: pale bars across the wing, 0, 1 or 2.
        ring: a pale ring around the eye.
        crown: a pale stripe over the crown.
        bright_bill: an orange bill instead of a dark one.
        breast: 0 plain, 1 spotted, 2 with a dark band.
    """

    bars: int
    ring: bool
    crown: bool
    bright_bill: bool
    breast: int

    @property
    def name(self) -> str:
        words = (
            WINGS[self.bars],
            "ringed" if self.ring else "",
            "crowned" if self.crown else "",
            "orange-billed" if self.bright_bill else "dark-billed",
            BREASTS[self.breast],
        )
        return " ".join(word for word in words if word)


def _field_guide() -> tuple[Marks, ...]:
    """Every choice of the last four parts, with the bars as a check digit: any two species differ in two parts or more."""
    guide = []
    for number in range(24):
        # neighbours in the guide differ in many parts, so that the first few species are a fair sample of all
        code = (number * 5 + 1) % 24
        ring, crown, bill, breast = code % 2, code // 2 % 2, code // 4 % 2, code // 8
        guide.append(Marks((ring + crown + bill + breast) % 3, bool(ring), bool(crown), bool(bill), breast))
    return tuple(guide)


SPECIES = _field_guide()
