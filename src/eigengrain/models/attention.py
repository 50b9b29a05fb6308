"""Read the blocks and the attention of a vision transformer of timm, which returns neither."""

import copy
from typing import Any

import torch
from timm.layers import Attention, PatchDropout, PatchEmbed, resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer, init_weights_vit_timm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eigengrain.errors import ArgumentError
from eigengrain.functional.inputs import check_integer, full_precision, output_dtype


class TimmTransformer:
    """The parts of timm's ``VisionTransformer`` as a :class:`eigengrain.heads.base.Transformer`.

    The blocks run as in the network itself, with its fused attention and its gradient checkpointing. :meth:`attention`
    computes the attention of a block a second time, from the tokens before it:

    .. math:: A = \\mathrm{softmax}\\Big(\\frac{q k^T}{\\sqrt{d}}\\Big)
    """

    def __init__(self, net: nn.Module, name: str = ""):
        blocks = list(getattr(net, "blocks", ()))
        plain = all(type(block) is Block and type(block.attn) is Attention for block in blocks)
        if not isinstance(net, VisionTransformer) or net.cls_token is None or not plain:
            problem = f"{name!r} must be a VisionTransformer of timm with a class token and ordinary blocks for this head"
            remedy = "use vit_base_patch16_224, deit_tiny_patch16_224 or the like, or another {head}"
            raise ArgumentError("backbone", problem, type(net).__name__, remedy)
        if isinstance(net.patch_drop, PatchDropout):
            raise ArgumentError("patch_drop_rate", "must be 0 for this head, which selects patches", remedy="leave it out")
        if len(blocks) < 2:
            raise ArgumentError("backbone", f"{name!r} must have at least 2 blocks for this head", len(blocks))
        self.net = net
        self.depth = len(blocks)
        self.prefix_tokens = int(net.num_prefix_tokens)

    def embed(self, images: Tensor) -> Tensor:
        net = self.net
        tokens: Tensor = net.norm_pre(net._pos_embed(net.patch_embed(images)))
        return tokens

    def run(self, block: int, tokens: Tensor) -> Tensor:
        module = self.net.blocks[block]
        after: Tensor
        if self.net.grad_checkpointing and torch.is_grad_enabled():
            after = checkpoint(module, tokens, use_reentrant=False)
        else:
            after = module(tokens)
        return after

    def attention(self, block: int, tokens: Tensor) -> Tensor:
        module = self.net.blocks[block]
        layer = module.attn
        width = layer.num_heads * layer.head_dim
        bias = None if layer.qkv.bias is None else layer.qkv.bias[: 2 * width]
        projected = nn.functional.linear(module.norm1(tokens), layer.qkv.weight[: 2 * width], bias)
        q, k = projected.unflatten(2, (2, layer.num_heads, layer.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = layer.q_norm(q), layer.k_norm(k)
        with full_precision(q):
            kind = output_dtype(q)
            return (q.to(kind) * layer.scale @ k.to(kind).mT).softmax(-1)

    def normalise(self, tokens: Tensor) -> Tensor:
        normalised: Tensor = self.net.norm(tokens)
        return normalised

    def grid(self, images: Tensor) -> tuple[int, int]:
        rows, columns = self.net.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        return rows, columns

    def boxes(self, images: Tensor, first: Tensor, last: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        embedding = self.net.patch_embed
        if isinstance(embedding, PatchEmbed):
            (down, right), (tall, wide) = embedding.proj.stride, embedding.proj.kernel_size
        else:  # a convolutional stem, whose patches overlap
            rows, columns = self.grid(images)
            down, right = tall, wide = height / rows, width / columns
        (top, left), (bottom, last_column) = first.unbind(-1), last.unbind(-1)
        ends = (last_column * right + wide).clamp(max=width), (bottom * down + tall).clamp(max=height)
        return torch.stack([left * right, top * down, *ends], -1).to(output_dtype(images))

    def new_block(self) -> nn.Module:
        block: nn.Module = copy.deepcopy(self.net.blocks[-1]).requires_grad_(True)
        for module in block.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        return block.apply(init_weights_vit_timm)

    def train_last_block(self, train: bool) -> None:
        self.net.blocks[-1].requires_grad_(train)


class OverlappingPatchEmbed(PatchEmbed):
    """timm's patch embedding with a stride below the size of its patches."""

    patch_stride: tuple[int, int]

    @classmethod
    def like(cls, embedding: PatchEmbed, stride: int) -> "OverlappingPatchEmbed":
        """Copy an embedding with another stride; the copy replaces the original, whose convolution it shares."""
        overlapping = copy.copy(embedding)
        overlapping.__class__ = cls
        assert isinstance(overlapping, cls)
        overlapping.patch_stride = (stride, stride)
        overlapping.proj.stride = (stride, stride)
        if overlapping.img_size is not None:
            overlapping.grid_size = overlapping.dynamic_feat_size(overlapping.img_size)
            overlapping.num_patches = overlapping.grid_size[0] * overlapping.grid_size[1]
        return overlapping

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        (height, width), (rows, columns), (down, right) = img_size, self.patch_size, self.patch_stride
        return (height - rows) // down + 1, (width - columns) // right + 1


def overlap_patches(net: nn.Module, stride: int, name: str) -> None:
    """Move the patches of a vision transformer of timm by ``stride`` pixels instead of their size, in place.

    Its position embeddings are resampled to the larger grid, with timm's bicubic interpolation, and the stride becomes the
    reduction in its ``feature_info``.

    Raises:
        ArgumentError: if the network has no such patches, or the stride is larger than they are.

    Example:
        >>> import timm
        >>> net = timm.create_model("test_vit", img_size=64)
        >>> overlap_patches(net, 12, "test_vit")
        >>> net.patch_embed.grid_size, net.pos_embed.shape
        ((5, 5), torch.Size([1, 26, 64]))
    """
    check_integer(stride, "patch_stride")
    embedding: Any = getattr(net, "patch_embed", None)
    if not isinstance(net, VisionTransformer) or type(embedding) is not PatchEmbed or embedding.dynamic_img_pad:
        problem = f"is for a VisionTransformer of timm with plain patches, which backbone {name!r} is not"
        raise ArgumentError("patch_stride", problem, stride, "leave it out")
    if stride > min(embedding.patch_size):
        raise ArgumentError("patch_stride", f"must be at most the size of a patch, {min(embedding.patch_size)}", stride)
    before = embedding.grid_size
    net.patch_embed = OverlappingPatchEmbed.like(embedding, stride)
    net.feature_info = [entry | {"reduction": stride} for entry in net.feature_info]
    if net.pos_embed is not None:
        options = {"num_prefix_tokens": 0 if net.no_embed_class else net.num_prefix_tokens}
        with torch.no_grad():
            resampled = resample_abs_pos_embed(net.pos_embed, net.patch_embed.grid_size, before, **options)
        net.pos_embed = nn.Parameter(resampled)
