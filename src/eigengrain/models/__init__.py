"""A backbone of timm or torchvision plus a head, with timm's interface; weights and whole models from local files."""

from eigengrain import _torchvision  # noqa: F401  (torchvision must be importable before timm is imported)
from eigengrain.models.card import ModelCard
from eigengrain.models.create import create_model, list_backbones
from eigengrain.models.hub import push_to_hub
from eigengrain.models.model import CovarianceNet
from eigengrain.models.param_groups import parameter_groups
from eigengrain.models.pretrained import from_pretrained, save_pretrained
from eigengrain.models.weights import LoadReport, load_weights

__all__ = [
    "CovarianceNet",
    "LoadReport",
    "ModelCard",
    "create_model",
    "from_pretrained",
    "list_backbones",
    "load_weights",
    "parameter_groups",
    "push_to_hub",
    "save_pretrained",
]
