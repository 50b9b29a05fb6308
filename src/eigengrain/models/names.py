"""Which backbones there are, and what an unknown name is answered."""

from difflib import get_close_matches
from fnmatch import fnmatch

import timm
from torchvision import models as torchvision_models

from eigengrain.errors import did_you_mean
from eigengrain.models import small  # noqa: F401  (registers its network with timm)
from eigengrain.models.torchvision_trunk import PREFIX

#: timm's prefixes for a network whose description lies on the Hugging Face hub or in a folder
SOURCES = ("hf-hub:", "local-dir:")


def list_backbones(pattern: str = "*") -> list[str]:
    """Names of the backbones that match a shell pattern: timm's, our own ``plumage_net``, torchvision's behind ``tv:``.

    Example:
        >>> list_backbones("*alexnet")
        ['tv:alexnet']
    """
    return [name for name in (*timm.list_models(), *_torchvision_names()) if fnmatch(name, pattern)]


def _torchvision_names() -> list[str]:
    return [PREFIX + name for name in torchvision_models.list_models(module=torchvision_models)]


def check_backbone(name: str) -> None:
    """Refuse a name that neither library has, and say which names are near.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> check_backbone("resnet500")
        Traceback (most recent call last):
        ...
        ValueError: unknown backbone 'resnet500': did you mean 'resnet50' or ...? All names: list_backbones()...
    """
    if name.startswith(SOURCES):
        return
    bare = name if name.startswith(PREFIX) else name.partition(".")[0]  # timm's weights come as name.tag
    if timm.is_model(bare) or bare in _torchvision_names():
        return
    near = get_close_matches(bare, list_backbones(), n=3, cutoff=0.6)
    said = " ".join(filter(None, (did_you_mean(near), "All names: list_backbones(), or 'eigengrain models'")))
    raise ValueError(f"unknown backbone {name!r}: {said}")
