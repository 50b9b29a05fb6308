"""Data sets, transforms and loaders.

Names are loaded on first use (PEP 562), so that the config dataclasses of this folder can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eigengrain.data.cache import DeviceCache as DeviceCache
    from eigengrain.data.catalogue import list_datasets as list_datasets
    from eigengrain.data.check import find_unreadable as find_unreadable
    from eigengrain.data.config import Transforms as Transforms
    from eigengrain.data.imageset import ImageSet as ImageSet
    from eigengrain.data.imageset import split_validation as split_validation
    from eigengrain.data.loader import Loader as Loader
    from eigengrain.data.loader import make_loader as make_loader
    from eigengrain.data.registry import open_dataset as open_dataset
    from eigengrain.data.transforms import build_transform as build_transform

_EXPORTS = {
    "DeviceCache": "cache",
    "ImageSet": "imageset",
    "Loader": "loader",
    "Transforms": "config",
    "build_transform": "transforms",
    "find_unreadable": "check",
    "list_datasets": "catalogue",
    "make_loader": "loader",
    "open_dataset": "registry",
    "split_validation": "imageset",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'eigengrain.data' has no attribute {name!r}")
    value = getattr(import_module(f"eigengrain.data.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
