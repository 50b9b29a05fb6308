"""First-order heads, the baselines of the covariance heads."""

from torch import Tensor

from eigengrain.functional.inputs import output_dtype
from eigengrain.heads.base import Head, Transformer, TransformerHead
from eigengrain.heads.registry import register_head


class _FirstOrder(Head):
    quadratic = False

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels


@register_head("gap")
class AveragePooling(_FirstOrder):
    r"""Global average pooling, :math:`v = \frac1N \sum_n x_n`; C numbers."""

    def pool(self, x: Tensor) -> Tensor:
        return x.to(output_dtype(x)).mean((2, 3))


@register_head("gmp")
class MaxPooling(_FirstOrder):
    r"""Global max pooling, :math:`v_c = \max_n x_{cn}`; C numbers."""

    def pool(self, x: Tensor) -> Tensor:
        return x.to(output_dtype(x)).amax((2, 3))


@register_head("token")
class ClassToken(TransformerHead):
    """The class token of a vision transformer after its last block and final normalisation; C numbers.

    With a linear classifier it is the ordinary ViT, as timm builds it with ``global_pool="token"``. Other poolings leave
    the class token out, or join it with their vector (``class_token="beside"``).

    Example:
        >>> import torch
        >>> from eigengrain.models import create_model
        >>> create_model("test_vit", "token", num_classes=5, img_size=64).forward_features(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 64, 1, 1])

    References:
        Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale, ICLR 2021.
    """

    selects_parts = False

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels

    def features(self, network: Transformer, images: Tensor) -> Tensor:
        tokens = network.embed(images)
        for block in range(network.depth):
            tokens = network.run(block, tokens)
        return network.normalise(tokens)[:, 0, :, None, None]

    def pool(self, x: Tensor) -> Tensor:
        return x[:, :, 0, 0].to(output_dtype(x))
