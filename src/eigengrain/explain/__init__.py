"""Explanations by eigenvalue subsets: gradient maps, perturbed images, measures and reports.

Names are loaded on first use (PEP 562), so that captum is needed only by the names that use it.
"""

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain.explain.perturbation import EigenPerturbation as EigenPerturbation
    from eigengrain.explain.perturbation import Perturbed as Perturbed
    from eigengrain.explain.relu_rules import ReLURules as ReLURules
    from eigengrain.explain.saliency import EigenSaliency as EigenSaliency
    from eigengrain.explain.saliency import SubsetMaps as SubsetMaps
    from eigengrain.explain.saliency import attribute_rules as attribute_rules
    from eigengrain.names import RULES as RULES

_EXPORTS = {
    **dict.fromkeys(("EigenPerturbation", "Perturbed"), "eigengrain.explain.perturbation"),
    "ReLURules": "eigengrain.explain.relu_rules",
    **dict.fromkeys(("EigenSaliency", "SubsetMaps", "attribute_rules"), "eigengrain.explain.saliency"),
    "RULES": "eigengrain.names",
}

# names that need captum are listed only if it is installed, so that dir(), help() and import * work without it
__all__ = [name for name, module in _EXPORTS.items() if module != "eigengrain.explain.saliency" or find_spec("captum")]

_load = loader(__name__, _EXPORTS)

if not TYPE_CHECKING:  # type checkers read the imports above and reject other names

    def __getattr__(name: str) -> Any:
        if name == "RectifierRules":
            warnings.warn("RectifierRules was renamed: use ReLURules", DeprecationWarning, stacklevel=2)
            name = "ReLURules"
        return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
