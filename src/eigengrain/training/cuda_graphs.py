"""The backbone as a CUDA graph: its kernels are launched together, forward and backward, instead of one by one.

A ResNet-50 in half precision has so many short kernels that a step of 20 images waits for their launches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eigengrain.models import CovarianceNet

#: passes before the recording, in which libraries choose their kernels
_WARMUP = 3


class _FeatureMap(nn.Module):
    """The part of the model that is recorded, with its parameters and no others."""

    def __init__(self, backbone: nn.Module, features: Callable[[Tensor], Tensor]):
        super().__init__()
        self.backbone, self.features = backbone, features

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images)


def recorded_features(
    model: CovarianceNet, images: Tensor, dtype: torch.dtype | None, features: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """``model.forward_features`` for training on batches like ``images``, recorded.

    The recording is of the parameters' memory, so they may change in place only, as optimisers and ``load_state_dict``
    change them. Gradients of one backward pass are in the memory of the next: they cannot be accumulated.

    Args:
        model: on a CUDA device, in training mode; its running statistics and the random numbers are left as they were.
        images: one batch; the shape, type and memory layout of all others.
        dtype: of autocast, or None.
        features: what is recorded if not ``model.forward_features`` itself, such as the same compiled.
    """
    # the recording keeps the nodes that accumulate gradients alive, which torch would warn of in every run
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    part = _FeatureMap(model.backbone, features or model.forward_features)
    before = [buffer.clone() for buffer in part.buffers()]
    generator = torch.cuda.get_rng_state(images.device)
    # casts of the weights must be in the recording, not in a cache that the first pass fills
    with torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False):
        recorded: Any = torch.cuda.make_graphed_callables(part, (images,), num_warmup_iters=_WARMUP)
    with torch.no_grad():
        for buffer, value in zip(part.buffers(), before, strict=True):
            buffer.copy_(value)
    torch.cuda.set_rng_state(generator, images.device)
    return recorded
