"""What may be given to an option where its type does not say it. No torch here: the shell completes from this."""

from collections.abc import Callable, Sequence

from eigengrain.cli.explain import CUTS, DIRECTIONS, SCALES, TARGETS
from eigengrain.cli.listing import COVERED
from eigengrain.data.datasets.catalogue import list_datasets
from eigengrain.data.transforms_config import Kind
from eigengrain.options import Option
from eigengrain.recipes import list_recipes
from eigengrain.training import config as training
from studies import config as studies

#: as :func:`eigengrain.heads.list_heads` has them
HEADS = (
    *("bcnn", "bcnn-improved", "cbp", "gap", "gmp", "gp", "isqrt", "isqrt+seb", "kp", "logcov", "logcov+seb", "lrbp"),
    *("monet", "mpa", "mpa+seb", "mpncov", "mpncov+seb", "mtp", "mtp+seb", "run"),
)
#: as :data:`studies.catalogue.STUDIES` has them
STUDIES = (
    *("spectrum", "subset-accuracy", "similarity", "gcp-methods", "truncation", "factors", "paths", "rates"),
    *("architectures", "normalisation", "curves", "speed", "sota", "imagenet", "gcp-pretrained"),
)
#: as :data:`eigengrain.explain.relu_rules.RULES` and :data:`eigengrain.explain.survey.MEASURES` have them
RULES = ("vanilla", "deconv", "guided")
MEASURES = (
    *("corr", "mae", "norm_ratio", "object_energy", "object_pointing", "object_over_area"),
    *("parts_energy", "parts_pointing", "parts_over_area", "gap", "deletion", "insertion"),
)
SHELLS = ("bash", "zsh", "fish")
DEVICES = ("auto", "cpu", "cuda", "mps")
SPLITS = ("train", "val", "test")

_Values = Sequence[str] | Callable[[], Sequence[str]]

#: by option, or by command and option
_VALUES: dict[str, _Values] = {
    "amp": training.AMP,
    "backbone": COVERED,
    "backbones": COVERED,
    "cache": training.CACHES,
    "completion shell": SHELLS,
    "cut": (*CUTS, "both"),
    "data.name": list_datasets,
    "datasets": list_datasets,
    "datasets action": ("list", "check"),
    "datasets name": list_datasets,
    "device": DEVICES,
    "evaluate data": list_datasets,
    "evaluate kind": Kind.__args__,  # type: ignore[attr-defined]
    "explain data": list_datasets,
    "explore data": list_datasets,
    "head": HEADS,
    "heads": HEADS,
    "heads pattern": HEADS,
    "log": training.LOGS,
    "measures": MEASURES,
    "models pattern": COVERED,
    "protocol": studies.PROTOCOLS,
    "recipe": list_recipes,
    "reference": HEADS,
    "rules": RULES,
    "scale": SCALES,
    "schedule.kind": training.SCHEDULES,
    "select": training.SELECTIONS,
    "split": SPLITS,
    "stride_on": training.STRIDES,
    "study name": (*studies.STUDY_ACTIONS, *STUDIES),
    "study scale": studies.SCALES,
    "target": TARGETS,
    "toward": (*DIRECTIONS, "both"),
}

#: values that are all there are; of the others, names that are worth offering
_OPEN = ("backbone", "backbones", "device", "models pattern", "heads pattern", "datasets name", "target")


def values_of(command: str, option: Option) -> tuple[str, ...]:
    """What the shell offers for an option of a command; nothing where it is a number, a file or free text.

    Example:
        >>> from eigengrain.options import options_of
        >>> [amp] = [option for option in options_of(training.Train) if option.name == "amp"]
        >>> values_of("train", amp)
        ('none', 'bf16', 'fp16')
    """
    if option.literals:
        return option.literals
    key = _key(command, option)
    found = _VALUES.get(key, ())
    return tuple(found() if callable(found) else found)


def choices_of(command: str, option: Option, most: int = 8) -> tuple[str, ...]:
    """The values of an option if there are no others and they are few enough for the help."""
    found = values_of(command, option)
    kinds = option.kinds
    closed = _key(command, option) not in _OPEN and len(kinds) == 1 and kinds[0] is not int
    return found if closed and len(found) <= most else ()


def _key(command: str, option: Option) -> str:
    for key in (f"{command} {option.name}", option.name, option.last):
        if key in _VALUES:
            # --model.head is a head, --data.transforms.scale is not the scale of a study
            return key if key != option.last or option.group in ("", "model") else ""
    return ""
