"""What eigenvalues see in an image: gradient maps and perturbed images of eigenvalue subsets, and measures on them.

Loaded on first use (PEP 562), so that what needs captum is asked for it only when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eigengrain.explain.perturbation import EigenPerturbation as EigenPerturbation
    from eigengrain.explain.perturbation import Perturbed as Perturbed
    from eigengrain.explain.rectifier_rules import RULES as RULES
    from eigengrain.explain.rectifier_rules import RectifierRules as RectifierRules
    from eigengrain.explain.saliency import EigenSaliency as EigenSaliency
    from eigengrain.explain.saliency import SubsetMaps as SubsetMaps
    from eigengrain.explain.saliency import attribute_rules as attribute_rules

# public name -> module of this package that defines it
_EXPORTS = {
    **dict.fromkeys(("EigenPerturbation", "Perturbed"), "perturbation"),
    **dict.fromkeys(("RULES", "RectifierRules"), "rectifier_rules"),
    **dict.fromkeys(("EigenSaliency", "SubsetMaps", "attribute_rules"), "saliency"),
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'eigengrain.explain' has no attribute {name!r}")
    value = getattr(import_module(f"eigengrain.explain.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
