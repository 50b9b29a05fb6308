"""Training recipes: YAML files with the command, the hardware and the result in their first lines. No torch here."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from os.path import expanduser
from typing import TYPE_CHECKING, Any

from eigengrain.errors import UnknownName

if TYPE_CHECKING:
    from eigengrain.training.config import Train


def list_recipes() -> list[str]:
    """Names of the packaged recipes.

    Example:
        >>> "birds-resnet50-paper" in list_recipes()
        True
    """
    return sorted(file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name.endswith(".yaml"))


def recipe_path(name: str) -> str:
    """The file of a recipe.

    Raises:
        ValueError: for an unknown name, with near ones.
    """
    if name not in list_recipes():
        raise UnknownName("recipe", name, list_recipes())
    return str(files(__name__) / f"{name}.yaml")


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> "Train":
    """The options of a recipe, some of them replaced.

    Args:
        name: one of :func:`list_recipes`.
        overrides: option, in dots, to value.

    Raises:
        ValueError: for an unknown recipe or option.

    Example:
        >>> load_recipe("birds-resnet50-paper", {"data.root": "birds", "epochs": 3}).optimiser.classifier_lr_scale
        20.0
    """
    from eigengrain.training.config import from_mapping
    from eigengrain.yaml_files import read_mapping

    values = read_mapping(recipe_path(name))
    for option, value in (overrides or {}).items():
        *parents, last = option.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"there is no option {option!r}: {parent!r} has no options of its own")
        place[last] = value
    return from_mapping(values)


def expand(words: Sequence[str]) -> list[str]:
    """Words of a command line with ``--recipe NAME`` as ``--config FILE``, in front, so that all other options win.

    A file of ``--config`` may name its recipe too.

    Args:
        words: what follows the command's name.

    Raises:
        ValueError: for an unknown recipe, more than one, or none after ``--recipe``.

    Example:
        >>> expand(["--epochs", "3", "--recipe", "birds-resnet50-paper"])
        ['--config', '...birds-resnet50-paper.yaml', '--epochs', '3']
    """
    rest: list[str] = []
    names: list[str] = []
    in_files: list[str] = []
    pending = iter(words)
    for word in pending:
        if word == "--recipe":
            name = next(pending, "")
            if not name or name.startswith("--"):
                raise ValueError(f"--recipe needs a name. Choose from: {', '.join(list_recipes())}")
            names.append(name)
        elif word.startswith("--recipe="):
            names.append(word.partition("=")[2])
        elif word == "--config" or word.startswith("--config="):
            file = next(pending, "") if word == "--config" else word.partition("=")[2]
            in_files += _named_in(file)
            rest += ["--config", file] if file else [word]
        else:
            rest.append(word)
    names += [name for name in dict.fromkeys(in_files) if name not in names]
    if len(names) > 1:
        raise ValueError(f"--recipe was given {len(names)} times ({', '.join(names)}), in files or here: choose one")
    return [*(part for name in names for part in ("--config", recipe_path(name))), *rest]


def _named_in(file: str) -> list[str]:
    """The recipe that a file of options starts from, if any. A file that cannot be read is reported by the parser."""
    from eigengrain.yaml_files import read_mapping

    try:
        name = read_mapping(expanduser(file)).get("recipe")
    except ValueError:
        return []
    return [name] if isinstance(name, str) else []
