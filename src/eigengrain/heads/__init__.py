"""Heads from a feature map to a vector: one file per family, one registry, torch only.

Importing this package imports every module in its folder, so that a new head needs only one new file.
"""

from importlib import import_module
from pkgutil import iter_modules

from eigengrain.heads.base import Head, LossTerms, Parts, SpectralHead, Spectrum, TransformerHead
from eigengrain.heads.covariance import CovarianceHead
from eigengrain.heads.registry import create_head, list_heads, register_head

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "CovarianceHead",
    "Head",
    "LossTerms",
    "Parts",
    "SpectralHead",
    "Spectrum",
    "TransformerHead",
    "create_head",
    "list_heads",
    "register_head",
]
