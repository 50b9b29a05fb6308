"""Import torchvision even if its binary was built for another torch, such as a GPU build beside a CPU torch.

Its compiled operators do not load then, and the import fails with "operator torchvision::nms does not exist". This package
does not use detection operators, so the two that are missing are declared without an implementation, and the import is
repeated. A torchvision that imports normally is not changed. Import this module before timm or torchvision.
"""

from importlib import import_module

import torch

# a library removes its operators when it is garbage-collected
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
