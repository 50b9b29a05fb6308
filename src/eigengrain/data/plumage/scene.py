"""What is drawn: the species, which differ in small marks, and the scene, which is independent of the species."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eigengrain.errors import ArgumentError

WINGS = ("plain-winged", "one-barred", "two-barred")
BREASTS = ("plain-breasted", "spotted", "banded")


@dataclass(frozen=True)
class Marks:
    """The five parts in which the species differ; silhouette, palette and everything else are the same."""

    bars: int  # pale bars across the wing, 0, 1 or 2
    ring: bool  # a pale ring around the eye
    crown: bool  # a pale stripe over the crown
    bright_bill: bool  # an orange bill instead of a dark one
    breast: int  # 0 plain, 1 spotted, 2 with a dark band

    @property
    def name(self) -> str:
        """Name of the species."""
        head = "ringed " * self.ring + "crowned " * self.crown
        bill = "orange-billed" if self.bright_bill else "dark-billed"
        return f"{WINGS[self.bars]} {head}{bill} {BREASTS[self.breast]}"


def _make_species(code: int) -> Marks:
    """A combination of the last four parts, with the bars as a check digit: any two species differ in at least two."""
    ring, crown, bill, breast = code % 2, code // 2 % 2, code // 4 % 2, code // 8
    return Marks((ring + crown + bill + breast) % 3, bool(ring), bool(crown), bool(bill), breast)


# this order makes neighbours differ in many parts, so that the first few species are a fair sample of all
SPECIES = tuple(_make_species((number * 5 + 1) % 24) for number in range(24))


@dataclass(frozen=True)
class Nuisance:
    """How much the scenes vary, which is the difficulty of the data set.

    Args:
        rotation: maximum rotation to either side, in degrees.
        length: minimum and maximum length of the bird, as a fraction of the image's side.
        shift: maximum distance of the bird from the centre, as a fraction of the side.
        light: maximum change of exposure, as a power of 2.
        tint: maximum relative change of one colour channel by the light.
        clutter: minimum and maximum number of shapes in the background.
        contrast: minimum and maximum opacity of the pale marks (bars, ring, crown), 0 to 1.
        faint: the same for the dark pattern of the breast and the orange of the bill.
        noise: standard deviation of the pixel noise; white is 1.
    """

    rotation: float = 25.0
    length: tuple[float, float] = (0.80, 0.95)
    shift: float = 0.04
    light: float = 0.45
    tint: float = 0.1
    clutter: tuple[int, int] = (9, 15)
    contrast: tuple[float, float] = (0.85, 1.0)
    faint: tuple[float, float] = (0.15, 0.5)
    noise: float = 0.03

    def __post_init__(self) -> None:
        for name, least, most in (("length", 0.3, None), ("clutter", 0, None), ("contrast", 0, 1), ("faint", 0, 1)):
            low, high = getattr(self, name)
            if not least <= low <= high or (most is not None and high > most):
                limits = f"at least {least}" if most is None else f"between {least} and {most}"
                raise ArgumentError(name, f"must be a minimum and a maximum, {limits}", (low, high))
        for name in ("rotation", "shift", "light", "tint", "noise"):
            if getattr(self, name) < 0:
                raise ArgumentError(name, "must be at least 0", getattr(self, name))


@dataclass(frozen=True)
class Scene:
    """Random choices for one image except the species; lengths are fractions of the side, colours RGB from 0 to 1."""

    flip: bool
    angle: float
    centre: tuple[float, float]
    length: float
    plump: float
    tail: float
    head: float
    back: NDArray[np.float32]
    pale: NDArray[np.float32]
    dark: NDArray[np.float32]
    bright: NDArray[np.float32]
    contrast: float
    faint: float
    exposure: NDArray[np.float32]
    sun: tuple[float, float]
    ground: NDArray[np.float32]
    patches: NDArray[np.float32]
    clutter: NDArray[np.float32]
    branch: NDArray[np.float32]
    noise: float
    grain: int


# colours of the plumage, common to all species: brown, olive, slate, rufous
_BACKS = np.array([[0.45, 0.34, 0.24], [0.42, 0.42, 0.26], [0.36, 0.38, 0.42], [0.52, 0.33, 0.22]], np.float32)
_PALE = np.array([0.95, 0.92, 0.82], np.float32)
_DARK = np.array([0.13, 0.11, 0.11], np.float32)
_BRIGHT = np.array([0.90, 0.55, 0.15], np.float32)
# colours of the background; they include the bird's own, so that no colour reveals it
_SCENERY = np.array(
    [
        *([0.30, 0.42, 0.20], [0.44, 0.52, 0.26], [0.55, 0.58, 0.42], [0.60, 0.68, 0.74], [0.36, 0.28, 0.20]),
        *([0.66, 0.58, 0.44], _PALE, _DARK, _BRIGHT, *_BACKS),
    ],
    np.float32,
)


def draw_scene(rng: np.random.Generator, nuisance: Nuisance) -> Scene:
    """Draw a scene; all its random numbers come from ``rng``."""

    def between(low: float, high: float) -> float:
        return float(low + (high - low) * rng.random())

    def near(colour: NDArray[np.float32], spread: float) -> NDArray[np.float32]:
        return np.clip(colour + spread * (2 * rng.random(3, np.float32) - 1), 0, 1).astype(np.float32)

    turn = between(0, 2 * math.pi)
    distance = nuisance.shift * math.sqrt(rng.random())
    weights = rng.random(len(_BACKS), np.float32) ** 3
    exposure = 2.0 ** between(-nuisance.light, nuisance.light)
    sun = between(-math.pi, 0)
    scenery = _SCENERY[rng.integers(6, size=2)]
    count = int(rng.integers(nuisance.clutter[0], nuisance.clutter[1] + 1))
    return Scene(
        flip=bool(rng.random() < 0.5),
        angle=math.radians(between(-nuisance.rotation, nuisance.rotation)),
        centre=(0.5 + distance * math.cos(turn), 0.5 + distance * math.sin(turn)),
        length=between(*nuisance.length),
        plump=between(0.92, 1.10),
        tail=between(0.88, 1.10),
        head=between(0.94, 1.06),
        back=near(weights @ _BACKS / weights.sum(), 0.06),
        pale=near(_PALE, 0.04),
        dark=near(_DARK, 0.04),
        bright=near(_BRIGHT, 0.05),
        contrast=between(*nuisance.contrast),
        faint=between(*nuisance.faint),
        exposure=(exposure * (1 + nuisance.tint * (2 * rng.random(3) - 1))).astype(np.float32),
        sun=(math.cos(sun), math.sin(sun)),
        ground=scenery,
        patches=rng.random((5, 5), np.float32),
        clutter=_draw_clutter(rng, count),
        branch=np.concatenate([near(_SCENERY[4], 0.08), rng.random(3, np.float32)]),
        noise=nuisance.noise * between(0.5, 1.0),
        grain=int(rng.integers(2**32)),
    )


def _draw_clutter(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Leaves, twigs and spots, (count, 9): x, y, angle, half length, half width, opacity, red, green, blue."""
    table = rng.random((count, 9), np.float32)
    kind = rng.integers(3, size=count)
    colours = _SCENERY[rng.integers(len(_SCENERY), size=count)]
    longest = np.array([0.16, 0.30, 0.035], np.float32)[kind]
    slender = np.array([0.45, 0.05, 0.9], np.float32)[kind]
    table[:, 2] *= np.pi
    table[:, 3] = longest * (0.4 + 0.6 * table[:, 3])
    table[:, 4] = table[:, 3] * slender * (0.6 + 0.4 * table[:, 4])
    table[:, 5] = 0.5 + 0.5 * table[:, 5]
    table[:, 6:] = np.clip(colours + 0.16 * (table[:, 6:] - 0.5), 0, 1)
    return table
