"""Second-order (global covariance) pooling for fine-grained visual recognition.

Everything is loaded on first use (PEP 562), so ``import eigengrain`` itself imports nothing, not even torch.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain import explain as explain
    from eigengrain import functional as functional
    from eigengrain import heads as heads
    from eigengrain import models as models
    from eigengrain.explain import EigenPerturbation as EigenPerturbation
    from eigengrain.explain import EigenSaliency as EigenSaliency
    from eigengrain.functional import EigenSubset as EigenSubset
    from eigengrain.heads import CovarianceHead as CovarianceHead
    from eigengrain.heads import Head as Head
    from eigengrain.heads import create_head as create_head
    from eigengrain.heads import list_heads as list_heads
    from eigengrain.heads import register_head as register_head
    from eigengrain.models import CovarianceNet as CovarianceNet
    from eigengrain.models import create_model as create_model
    from eigengrain.models import from_pretrained as from_pretrained
    from eigengrain.models import list_backbones as list_backbones
    from eigengrain.models import load_weights as load_weights
    from eigengrain.models import parameter_groups as parameter_groups
    from eigengrain.models import save_pretrained as save_pretrained
    from eigengrain.training.run_folder import open_run as open_run

__version__ = "0.1.0"

# public name -> module that defines it; a name equal to its module's last part is the module itself
_EXPORTS = {
    "explain": "eigengrain.explain",
    "functional": "eigengrain.functional",
    "heads": "eigengrain.heads",
    "models": "eigengrain.models",
    "EigenSubset": "eigengrain.functional",
    **dict.fromkeys(("EigenPerturbation", "EigenSaliency"), "eigengrain.explain"),
    **dict.fromkeys(("CovarianceHead", "Head", "create_head", "list_heads", "register_head"), "eigengrain.heads"),
    **dict.fromkeys(("CovarianceNet", "create_model", "list_backbones", "parameter_groups"), "eigengrain.models"),
    **dict.fromkeys(("load_weights", "from_pretrained", "save_pretrained"), "eigengrain.models"),
    "open_run": "eigengrain.training.run_folder",
}

# what needs captum is listed where that is installed, so that dir(), help() and import * do not fail elsewhere
__all__ = ["__version__", *(name for name in _EXPORTS if name != "EigenSaliency" or find_spec("captum"))]

if not TYPE_CHECKING:  # type checkers read the names above, and should refuse all others
    __getattr__ = loader(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
