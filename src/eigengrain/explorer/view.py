"""The state of the page: what a visitor has chosen, and its form in the address."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import urlencode

from eigengrain.explorer.limits import MAX_TEXT
from eigengrain.explorer.session import KINDS, SMOOTH, Session
from eigengrain.names import CUTS, SCALES

#: kinds of maps that are shown at first
FIRST_KINDS = (SMOOTH,)
#: target that is not a fixed class
PREDICTED = "predicted"


@dataclass(frozen=True)
class View:
    """A model, an image, a split and the options of the maps."""

    model: str
    image: str  # its key
    split: int  # number of eigenvalues that count as large
    maps: tuple[str, ...] = FIRST_KINDS  # kinds of maps
    custom: str = ""  # the visitor's subset; at first that with which the model was saved
    target: str = PREDICTED  # or the number of the explained class as text
    cut: str = CUTS[0]  # how a cut spectrum is differentiated
    scale: str = SCALES[0]  # colour scale
    other: str = ""  # model to compare with

    @property
    def target_class(self) -> int | None:
        return None if self.target == PREDICTED else int(self.target)

    def query(self) -> str:
        """The query of the address.

        Example:
            >>> View("seb", "example-3", 52, custom="top:1+last:12").query()
            'model=seb&image=example-3&split=52&custom=top:1%2Blast:12&maps=smooth'
        """
        defaults = {field.name: field.default for field in fields(self)}
        words = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        return urlencode({**words, "maps": ",".join(self.maps)}, safe=",:")

    @classmethod
    def from_query(cls, words: Mapping[str, str], sessions: Mapping[str, Session]) -> "View":
        """The view of an address. Missing and invalid values are replaced by the defaults."""
        name = words.get("model", "")
        session = sessions[name] if name in sessions else next(iter(sessions.values()))
        image, maps = _image(words.get("image", ""), session), words.get("maps", "").split(",")
        custom = _custom(words.get("custom", session.own_subset), session)
        rest = [words.get(name, "") for name in ("target", "cut", "scale", "other")]
        rest[-1] = rest[-1] if rest[-1] in sessions else ""
        return cls.from_controls(session, image, words.get("split", ""), maps, custom, *rest)

    @classmethod
    def from_controls(
        cls,
        session: Session,
        image: str,
        split: Any,
        maps: Any,
        custom: Any,
        target: Any,
        cut: Any,
        scale: Any,
        other: Any = "",
    ) -> "View":
        """The view of the controls on the page. A browser can send any value, so all but image and other are checked here.

        Raises:
            ValueError: if the custom subset cannot be read or does not fit.
        """
        text = str(custom or "").strip()
        number = 1 if split is None else _split(str(split), session, image)  # an emptied box becomes its lowest number
        session.subsets(number, text)
        names = maps if isinstance(maps, list | tuple) else ()
        chosen = tuple(kind for kind in KINDS if kind in names) or FIRST_KINDS
        rest = chosen, text, _target(str(target), session), _choice(cut, CUTS), _choice(scale, SCALES)
        return cls(session.name, image, number, *rest, other if isinstance(other, str) and other != session.name else "")


def _image(key: str, session: Session) -> str:
    if len(key) < MAX_TEXT:
        try:
            return session.analyse(key).key
        except ValueError:
            pass  # an upload that was dropped, or the address of another data set
    return session.first


def _split(text: str, session: Session, image: str) -> int:
    try:
        return min(max(int(float(text)), 1), session.channels - 1)
    except (ValueError, OverflowError):
        return session.default_split(session.analyse(image))


def _choice(word: object, choices: Sequence[str]) -> str:
    return str(word) if word in choices else choices[0]


def _custom(text: str, session: Session) -> str:
    try:
        session.subsets(1, text)
    except ValueError:
        return ""
    return text.strip()


def _target(text: str, session: Session) -> str:
    return text if text.isdecimal() and len(text) < 9 and int(text) < len(session.classes) else PREDICTED
