"""What eigenvalues see in an image: gradient maps and perturbed images of eigenvalue subsets, and measures on them.

Loaded on first use (PEP 562), so that what needs captum is asked for it only when it is used.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain.explain.perturbation import EigenPerturbation as EigenPerturbation
    from eigengrain.explain.perturbation import Perturbed as Perturbed
    from eigengrain.explain.relu_rules import RULES as RULES
    from eigengrain.explain.relu_rules import RectifierRules as RectifierRules
    from eigengrain.explain.saliency import EigenSaliency as EigenSaliency
    from eigengrain.explain.saliency import SubsetMaps as SubsetMaps
    from eigengrain.explain.saliency import attribute_rules as attribute_rules

_EXPORTS = {
    **dict.fromkeys(("EigenPerturbation", "Perturbed"), "eigengrain.explain.perturbation"),
    **dict.fromkeys(("RULES", "RectifierRules"), "eigengrain.explain.relu_rules"),
    **dict.fromkeys(("EigenSaliency", "SubsetMaps", "attribute_rules"), "eigengrain.explain.saliency"),
}

# what needs captum is listed where that is installed, so that dir(), help() and import * do not fail elsewhere
__all__ = [name for name, module in _EXPORTS.items() if module != "eigengrain.explain.saliency" or find_spec("captum")]


if not TYPE_CHECKING:  # type checkers read the names above, and should refuse all others
    __getattr__ = loader(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
