"""Imports torchvision where it would refuse: its build is linked against a GPU torch and the torch here is a CPU one.

Its compiled operators then do not load, and its own registrations stop with "operator torchvision::nms does not exist".
Detection operators are not used in this package, so the two that are missing are declared, without a body, and the import
is repeated. Where torchvision imports as it should, nothing is touched. Import this module before timm or torchvision.
"""

from importlib import import_module

import torch

# a library takes its operators along when it is collected, so it is kept here
_declared: torch.library.Library | None = None


def _import_torchvision() -> None:
    global _declared
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        _declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")


_import_torchvision()
