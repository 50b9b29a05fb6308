"""Training recipes: YAML files whose header gives the command, the hardware and the result. No torch here."""

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from eigengrain._lazy import loader
from eigengrain.errors import UnknownName

#: ``load_recipe(name, overrides)`` returns a recipe as a :class:`eigengrain.training.Train`
__all__ = ["list_recipes", "load_recipe", "recipe_path"]

if TYPE_CHECKING:
    load_recipe: Any
else:
    __getattr__ = loader(__name__, {"load_recipe": "eigengrain.training.config"})


def list_recipes() -> list[str]:
    """Names of the packaged recipes.

    Example:
        >>> "birds-resnet50-paper" in list_recipes()
        True
    """
    return sorted(file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name.endswith(".yaml"))


def recipe_path(name: str) -> str:
    """Path of a recipe's file.

    Raises:
        UnknownName: for an unknown recipe, with close matches.
    """
    if name not in list_recipes():
        raise UnknownName("recipe", name, list_recipes())
    return str(files(__name__) / f"{name}.yaml")
