"""Run the backbone in half precision, optionally compiled or as a CUDA graph; head and classifier stay in float32."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from eigengrain.models.model import CovarianceNet

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: passes before a CUDA graph is captured, in which libraries choose their kernels
_WARMUP = 3


class MixedPrecision(nn.Module):
    """A model whose backbone runs under autocast. Head and classifier get float32, which eigenvalues need.

    Args:
        model: from :func:`create_model`.
        amp: ``none``, ``bf16`` or ``fp16``.
        compile: compile the backbone.
        cuda_graphs: capture the backbone as a CUDA graph at the first training batch, and replay it afterwards.
    """

    def __init__(self, model: CovarianceNet, amp: str = "none", compile: bool = False, cuda_graphs: bool = False):
        super().__init__()
        self.model = model
        self.dtype = AUTOCAST.get(amp)
        self.cuda_graphs = cuda_graphs
        self._map: Callable[[Tensor], Tensor] = torch.compile(model.forward_features) if compile else model.forward_features
        self._captured: tuple[torch.Size, Callable[[Tensor], Tensor]] | None = None

    def features(self, images: Tensor) -> Tensor:
        """Images → feature map, in float32."""
        return widen(self.raw_features(images))

    def raw_features(self, images: Tensor) -> Tensor:
        """Images → feature map, in the precision in which the backbone ends."""
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype is not None):
            return self._map_for(images)(images)

    def _map_for(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        """The captured backbone if the batch has its shape; a smaller last batch runs without a graph."""
        if not (self.cuda_graphs and self.model.training):
            return self._map
        if self._captured is None:
            self._captured = images.shape, capture_features(self.model, images, self.dtype, self._map)
        shape, captured = self._captured
        return captured if images.shape == shape else self._map

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Any:
        """Images → scores; with the targets of a training batch, scores and what the head adds to the loss."""
        if targets is None:
            return self.model.forward_head(self.features(images))
        return self.model.forward_training(self.features(images), targets)


class FromFeatures(MixedPrecision):
    """A model that gets feature maps of its backbone instead of images, for a frozen backbone."""

    def features(self, images: Tensor) -> Tensor:
        return widen(images)


def widen(features: Tensor) -> Tensor:
    """Features in half precision as float32; others as they are."""
    return features.float() if features.dtype in AUTOCAST.values() else features


class _FeatureMap(nn.Module):
    """The part of the model that is captured, with no parameters but its own."""

    def __init__(self, parts: Iterable[nn.Module], features: Callable[[Tensor], Tensor]):
        super().__init__()
        self.parts, self.features = nn.ModuleList(parts), features

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images)


def capture_features(
    model: CovarianceNet, images: Tensor, dtype: torch.dtype | None, features: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """Capture ``model.forward_features`` as a CUDA graph for training on batches like ``images``.

    A ResNet-50 in half precision has so many short kernels that a step of 20 images waits for their launches; a graph
    launches them together, forward and backward. It uses the memory of the parameters, so they may only change in place, as
    optimisers and ``load_state_dict`` change them. Gradients of one backward pass are overwritten by the next, so they
    cannot be accumulated.

    Args:
        model: on a CUDA device, in training mode; its running statistics and the random state are restored.
        images: a batch with the shape, dtype and memory format of all others.
        dtype: dtype of autocast, or None.
        features: function to capture instead of ``model.forward_features``, such as a compiled version of it.
    """
    # the graph keeps the nodes that accumulate gradients alive, and torch would warn about that in every run
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    part = _FeatureMap(model.feature_modules, features or model.forward_features)
    before = [buffer.clone() for buffer in part.buffers()]
    random_state = torch.cuda.get_rng_state(images.device)
    # casts of the weights must be in the graph, not in a cache that the first pass fills
    with torch.cuda.device(images.device), torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False):
        captured: Any = torch.cuda.make_graphed_callables(part, (images,), num_warmup_iters=_WARMUP)
    with torch.no_grad():
        for buffer, value in zip(part.buffers(), before, strict=True):
            buffer.copy_(value)
    torch.cuda.set_rng_state(random_state, images.device)
    return captured
