"""Data sets, transforms and loaders; names are loaded on first use (PEP 562), so that configs need no torch."""

from typing import TYPE_CHECKING

from eigengrain._lazy import loader

if TYPE_CHECKING:
    from eigengrain.data.check import find_unreadable as find_unreadable
    from eigengrain.data.datasets.registry import Entry as Entry
    from eigengrain.data.datasets.registry import list_datasets as list_datasets
    from eigengrain.data.datasets.registry import open_dataset as open_dataset
    from eigengrain.data.datasets.registry import open_splits as open_splits
    from eigengrain.data.datasets.registry import register_dataset as register_dataset
    from eigengrain.data.device_cache import DeviceCache as DeviceCache
    from eigengrain.data.image_set import ImageSet as ImageSet
    from eigengrain.data.image_set import split_validation as split_validation
    from eigengrain.data.loader import Batches as Batches
    from eigengrain.data.loader import Loader as Loader
    from eigengrain.data.loader import make_loader as make_loader
    from eigengrain.data.preprocessing import Transforms as Transforms
    from eigengrain.data.transforms import build_transform as build_transform

_EXPORTS = {
    "DeviceCache": "eigengrain.data.device_cache",
    "Transforms": "eigengrain.data.preprocessing",
    "build_transform": "eigengrain.data.transforms",
    "find_unreadable": "eigengrain.data.check",
    **dict.fromkeys(("Batches", "Loader", "make_loader"), "eigengrain.data.loader"),
    **dict.fromkeys(
        ("Entry", "list_datasets", "open_dataset", "open_splits", "register_dataset"), "eigengrain.data.datasets.registry"
    ),
    **dict.fromkeys(("ImageSet", "split_validation"), "eigengrain.data.image_set"),
}

__all__ = [*_EXPORTS]


if not TYPE_CHECKING:  # type checkers read the names above, and should refuse all others
    __getattr__ = loader(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(__all__)
