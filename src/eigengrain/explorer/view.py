"""What a visitor looks at, as the words behind the question mark of an address."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from eigengrain.cli.explain import CUTS, SCALES, split_point
from eigengrain.explain.relu_rules import RULES
from eigengrain.explorer.limits import MAX_TEXT
from eigengrain.explorer.session import EXAMPLE, Lens
from eigengrain.explorer.uploads import UPLOAD

#: rules that are shown at first
FIRST_RULES = ("vanilla", "deconv")
#: a target that is no class
PREDICTED = "predicted"


@dataclass(frozen=True)
class View:
    """A model, an image, a split and how it is looked at.

    Args:
        model: name.
        image: key.
        split: eigenvalues that count as large.
        rules: at the rectifiers.
        custom: a subset of the visitor's own, or nothing; that of the model at first, if it keeps a part only.
        target: number of the class that is explained as text, or ``predicted``.
        cut: how a cut spectrum is differentiated.
        scale: of colours, ``row`` for one a rule, ``each`` for one a map.
    """

    model: str
    image: str
    split: int
    rules: tuple[str, ...] = FIRST_RULES
    custom: str = ""
    target: str = PREDICTED
    cut: str = "exact"
    scale: str = "row"

    @property
    def target_class(self) -> int | None:
        return None if self.target == PREDICTED else int(self.target)

    def query(self) -> str:
        """For the address.

        Example:
            >>> View("seb", "example-3", 52, custom="top:1+last:12").query()
            'model=seb&image=example-3&split=52&rules=vanilla,deconv&custom=top:1%2Blast:12'
        """
        words = {"model": self.model, "image": self.image, "split": str(self.split), "rules": ",".join(self.rules)}
        if self.custom:
            words["custom"] = self.custom
        for name in ("target", "cut", "scale"):
            if getattr(self, name) != getattr(View, name):
                words[name] = getattr(self, name)
        return urlencode(words, safe=",:")


def read_view(words: Mapping[str, str], lenses: Mapping[str, Lens]) -> View:
    """The view of an address; what is missing, or makes no sense, is as at first."""
    name = words.get("model", "")
    lens = lenses[name] if name in lenses else next(iter(lenses.values()))
    return View(
        model=lens.name,
        image=_image(words.get("image", ""), lens),
        split=_whole(words.get("split", ""), 1, lens.channels - 1, split_point(lens.channels, None)),
        rules=known_rules(words.get("rules", "").split(",")),
        custom=_custom(words.get("custom", lens.own), lens),
        target=_target(words.get("target", ""), lens),
        cut=_one_of(words.get("cut"), CUTS),
        scale=_one_of(words.get("scale"), SCALES),
    )


def make_view(
    lens: Lens,
    image: str,
    split: object,
    rules: object,
    custom: object,
    target: object,
    cut: object,
    scale: object,
) -> View:
    """The view of what stands on the page: a browser may send anything, so all but the image's key is looked at here.

    Raises:
        ValueError: for a custom subset that cannot be read or does not fit.
    """
    text = str(custom or "").strip()
    # the box of a split that is left empty goes to its lowest number
    kept = 1 if split is None else _whole(str(split), 1, lens.channels - 1, split_point(lens.channels, None))
    lens.subsets(kept, text)
    return View(
        model=lens.name,
        image=image,
        split=kept,
        rules=known_rules(rules if isinstance(rules, list | tuple) else ()),
        custom=text,
        target=_target(str(target), lens),
        cut=_one_of(cut, CUTS),
        scale=_one_of(scale, SCALES),
    )


def known_rules(asked: Sequence[str]) -> tuple[str, ...]:
    """Those of the rules that there are, in their order; the first ones if none is left."""
    return tuple(rule for rule in RULES if rule in asked) or FIRST_RULES


def _image(key: str, lens: Lens) -> str:
    if key.startswith((EXAMPLE, UPLOAD)) and len(key) < MAX_TEXT:
        try:
            return lens.look(key).key
        except ValueError:
            pass  # an upload that was forgotten, or an address of another data set
    return lens.first


def _whole(text: str, low: int, high: int, default: int) -> int:
    try:
        return min(max(int(float(text)), low), high)
    except (ValueError, OverflowError):
        return default


def _one_of(word: object, choices: Sequence[str]) -> str:
    return str(word) if word in choices else choices[0]


def _custom(text: str, lens: Lens) -> str:
    try:
        lens.subsets(1, text)
    except ValueError:
        return ""
    return text.strip()


def _target(text: str, lens: Lens) -> str:
    return text if text.isdecimal() and len(text) < 9 and int(text) < len(lens.classes) else PREDICTED
