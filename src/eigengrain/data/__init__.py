"""Data sets, transforms and loaders.

Names are loaded on first use (PEP 562), so that the config dataclasses of this folder can be read without torch.
"""

from typing import TYPE_CHECKING

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain.data.check import find_unreadable as find_unreadable
    from eigengrain.data.datasets.catalogue import list_datasets as list_datasets
    from eigengrain.data.datasets.registry import open_dataset as open_dataset
    from eigengrain.data.device_cache import DeviceCache as DeviceCache
    from eigengrain.data.image_set import ImageSet as ImageSet
    from eigengrain.data.image_set import split_validation as split_validation
    from eigengrain.data.loader import Loader as Loader
    from eigengrain.data.loader import make_loader as make_loader
    from eigengrain.data.transforms import build_transform as build_transform
    from eigengrain.data.transforms_config import Transforms as Transforms

_EXPORTS = {
    "DeviceCache": "eigengrain.data.device_cache",
    "ImageSet": "eigengrain.data.image_set",
    "Loader": "eigengrain.data.loader",
    "Transforms": "eigengrain.data.transforms_config",
    "build_transform": "eigengrain.data.transforms",
    "find_unreadable": "eigengrain.data.check",
    "list_datasets": "eigengrain.data.datasets.catalogue",
    "make_loader": "eigengrain.data.loader",
    "open_dataset": "eigengrain.data.datasets.registry",
    "split_validation": "eigengrain.data.image_set",
}

__all__ = [*_EXPORTS]


if not TYPE_CHECKING:  # type checkers read the names above, and should refuse all others
    __getattr__ = loader(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
