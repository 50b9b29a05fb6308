"""Second-order (global covariance) pooling for fine-grained visual recognition.

Everything is loaded on first use (PEP 562), so ``import eigengrain`` itself imports nothing, not even torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eigengrain import functional as functional
    from eigengrain.functional import EigenSubset as EigenSubset

__version__ = "0.1.0"

# public name -> module that defines it; a name equal to its module's last part is the module itself
_EXPORTS = {
    "functional": "eigengrain.functional",
    "EigenSubset": "eigengrain.functional",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'eigengrain' has no attribute {name!r}")
    module = import_module(_EXPORTS[name])
    value = module if _EXPORTS[name].endswith("." + name) else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
