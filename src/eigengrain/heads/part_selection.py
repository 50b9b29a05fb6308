"""Heads that select parts of an image by the attention of a vision transformer: TransFG and AFTrans."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional.inputs import check_number, full_precision, output_dtype
from eigengrain.heads.base import LossTerms, Parts, Transformer, TransformerHead
from eigengrain.heads.layers import unit
from eigengrain.heads.registry import register_head

#: relative rounding of a map, so that all patches of an even map are at its mean
ROUNDING = 1e-5
#: last block of TransFG: one with new random weights, or that of the network
LAST_BLOCKS = ("new", "own")


def contrastive_loss(vectors: Tensor, labels: Tensor, margin: float = 0.4) -> Tensor:
    r"""Contrastive loss of TransFG: vectors of one class are pulled together, others pushed apart above a margin.

    .. math:: \frac{1}{B^2} \sum_{i,j} \begin{cases} 1 - \cos(v_i, v_j) & y_i = y_j \\
       \max(\cos(v_i, v_j) - m,\ 0) & y_i \ne y_j \end{cases}

    Args:
        vectors: v (B, C).
        labels: classes y (B,).
        margin: m.

    Example:
        >>> contrastive_loss(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1]))
        tensor(0.)
        >>> contrastive_loss(torch.ones(2, 3), torch.tensor([0, 1]), margin=0.4)  # 2 of 4 pairs, 0.6 each
        tensor(0.3000)
    """
    if vectors.ndim != 2 or labels.shape != vectors.shape[:1]:
        problem = "must be one class for each vector"
        raise ArgumentError("labels", problem, tuple(labels.shape), f"there are vectors {tuple(vectors.shape)}")
    v = unit(vectors.to(output_dtype(vectors)))
    with full_precision(v):
        cosine = v @ v.T
    same = labels[:, None] == labels
    return torch.where(same, 1 - cosine, (cosine - margin).clamp_min(0)).mean()


@register_head("transfg")
class TransFG(TransformerHead):
    r"""TransFG: the class token after a last block that sees only the selected patches of a vision transformer; C numbers.

    The attention :math:`A_l` of all blocks but the last is multiplied, as it is. In each attention head the patch to which
    the class token attends most is selected:

    .. math:: p_h = \arg\max_n \big(A_{L-1}^h \cdots A_1^h\big)_{\text{class},\, n}

    The class token and these patches, one per attention head and possibly equal, pass through the last block and the final
    normalisation. The classifier gets the class token. Training adds :func:`contrastive_loss` of the class tokens of a
    batch; with several processes or ``accumulate`` it compares the images of one process and one batch.

    Only the row of the class token is multiplied, from the last matrix to the first, which gives the same numbers as the
    product of the whole matrices. The selection has no gradient, because it is an arg max. ``forward_features`` of the
    model returns the class token and the selected patches (B, C, 1, 1 + heads), and its ``selected_parts`` the patches. For
    overlapping patches create the model with ``patch_stride``, 12 in the paper.

    Args:
        in_channels, reduce: as in :class:`Head`; there is no reduction.
        last_block: ``new`` for a last block with random weights, as in the released code; the network's own one is then
            frozen and not used. ``own`` for the last block of the network.
        contrast: factor of the contrastive loss; 0 for none.
        margin: m of the contrastive loss.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_vit", "transfg", num_classes=5, img_size=64, patch_stride=12)
        >>> model(torch.zeros(2, 3, 64, 64)).shape, model.selected_parts(torch.zeros(2, 3, 64, 64)).indices.shape
        (torch.Size([2, 5]), torch.Size([2, 2]))

    References:
        He et al., TransFG: A Transformer Architecture for Fine-grained Recognition, AAAI 2022.
    """

    def __init__(
        self,
        in_channels: int,
        reduce: int | None = None,
        last_block: str = "new",
        contrast: float = 1.0,
        margin: float = 0.4,
    ):
        super().__init__(in_channels, reduce)
        if last_block not in LAST_BLOCKS:
            raise UnknownName("last_block", last_block, LAST_BLOCKS)
        check_number(contrast, "contrast", 0)
        check_number(margin, "margin", -1, 1)
        self.last_block, self.contrast, self.margin = last_block, contrast, margin
        self.mixes_labels = contrast == 0
        self.block: nn.Module | None = None
        self.out_features = self.channels

    def attach(self, network: Transformer) -> None:
        super().attach(network)
        if self.last_block == "new":
            self.block = network.new_block()
            network.train_last_block(False)

    def select(self, network: Transformer, images: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, T, C) before the last block, and the numbers (B, heads) of the selected patches."""
        inputs = [network.embed(images)]
        for block in range(network.depth - 1):
            inputs.append(network.run(block, inputs[-1]))
        tokens = inputs.pop()
        with torch.no_grad(), full_precision(tokens):
            row = network.attention(network.depth - 2, inputs.pop())[:, :, :1]
            for block in reversed(range(network.depth - 2)):
                row = row @ network.attention(block, inputs.pop())
            return tokens, row[:, :, 0, network.prefix_tokens :].argmax(-1)

    def features(self, network: Transformer, images: Tensor) -> Tensor:
        tokens, selected = self.select(network, images)
        places = (selected + network.prefix_tokens)[..., None].expand(-1, -1, tokens.shape[-1])
        short = torch.cat([tokens[:, :1], tokens.gather(1, places)], 1)
        short = network.run(network.depth - 1, short) if self.block is None else self.block(short)
        return network.normalise(short).mT[:, :, None]

    def parts(self, network: Transformer, images: Tensor) -> Parts:
        _, selected = self.select(network, images)
        columns = network.grid(images)[1]
        cells = torch.stack([selected // columns, selected % columns], -1)
        return Parts(network.boxes(images, cells, cells), selected)

    def pool(self, x: Tensor) -> Tensor:
        return x[:, :, 0, 0].to(output_dtype(x))

    def loss_terms(self, vector: Tensor, targets: Tensor, classifier: nn.Module) -> LossTerms | None:
        if self.contrast == 0:
            return None
        if targets.ndim != 1:
            problem = "is not defined for the mixed labels of mixup and cutmix"
            raise ArgumentError("contrast", problem, self.contrast, "set it to 0 in {head_options}")
        return LossTerms(terms={"contrast": self.contrast * contrastive_loss(vector, targets, self.margin)})


def largest_component(mask: Tensor) -> Tensor:
    """The largest set of connected cells of each mask (B, h, w); cells also touch at corners, of equal sets one is kept.

    Labels spread to their neighbours, and the root of a set takes the largest label next to the set. The number of rounds
    is twice the logarithm of the number of cells, which is twice of what spirals and mazes need.

    Example:
        >>> largest_component(torch.tensor([[[True, False, True], [False, False, True]]])).long().tolist()
        [[[0, 0, 1], [0, 0, 1]]]
    """
    batch, height, width = mask.shape
    cells = height * width
    inside = mask.flatten(1)
    number = torch.arange(1, cells + 1, device=mask.device).expand(batch, -1)
    label = torch.where(inside, number, 0)
    rest = label.new_zeros(batch, 1)  # entry 0 stands for all cells outside
    for _ in range(2 * math.ceil(math.log2(cells + 1)) + 2):
        grid = label.to(torch.float32).view(batch, 1, height, width)  # exact up to 2²⁴ cells
        near = torch.where(inside, F.max_pool2d(grid, 3, 1, 1).flatten(1).long(), 0)
        roots = torch.cat([rest, torch.maximum(label, near)], 1).scatter_reduce(1, label, near, "amax")
        label = torch.where(inside, roots.gather(1, roots[:, 1:]), 0)
    size = torch.zeros_like(torch.cat([rest, label], 1)).scatter_add(1, label, inside.long())
    return ((label == size.argmax(1, keepdim=True)) & inside).view_as(mask)


def bounding_cells(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First and last row and column (B, 2) of the cells in masks (B, h, w); those of the whole grid for an empty mask."""
    firsts, lasts = [], []
    for along in (mask.any(2), mask.any(1)):
        firsts.append(along.long().argmax(1))
        lasts.append(along.shape[1] - 1 - along.flip(1).long().argmax(1))
    return torch.stack(firsts, 1), torch.stack(lasts, 1)


def enlarge(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut boxes (B, 4), x0, y0, x1, y1 in pixels, out of images (B, C, H, W) and resize them bilinearly: (B, C, *size).

    Example:
        >>> enlarge(torch.arange(4.0).view(1, 1, 1, 4), torch.tensor([[1.0, 0.0, 3.0, 1.0]]), (1, 2))
        tensor([[[[1., 2.]]]])
    """

    def weights(start: Tensor, end: Tensor, count: int, pixels: int) -> Tensor:
        step = (end - start) / count
        places = start[:, None] + (torch.arange(count, device=boxes.device) + 0.5) * step[:, None] - 0.5
        places = places.clamp(0, pixels - 1)[..., None]
        return (1 - (places - torch.arange(pixels, device=boxes.device)).abs()).clamp_min(0)

    boxes = boxes.to(output_dtype(images))  # half precision does not have every pixel of a large image
    x0, y0, x1, y1 = boxes.unbind(1)
    down = weights(y0, y1, size[0], images.shape[2])[:, None]
    right = weights(x0, x1, size[1], images.shape[3])[:, None]
    with full_precision(images):
        return (down @ images.to(boxes.dtype) @ right.mT).to(images.dtype)


class SharedLinear(nn.Linear):
    """One linear classifier for several vectors of an image: (B, n · in_features) → the sum (B, classes) of n scores."""

    def each(self, vector: Tensor) -> Tensor:
        """The scores of each vector, (B, n, classes)."""
        return super().forward(vector.unflatten(1, (-1, self.in_features)))

    def forward(self, vector: Tensor) -> Tensor:
        return self.each(vector).sum(1)


@register_head("aftrans")
class AFTrans(TransformerHead):
    r"""AFTrans, a reconstruction: a region is cut out by the attention, enlarged, and passes the same network; 2 C numbers.

    The attention :math:`A_l` of all blocks, averaged over the attention heads, is weighted and multiplied,

    .. math:: M = \prod_{l=L}^{1} \big(w_l A_l + (1 - w_l) I\big), \qquad
       w = \sigma\big(W_2\,\mathrm{ReLU}(W_1 z)\big),

    where :math:`z_l` is the mean of :math:`A_l` over all tokens and the patches they attend to. The row of the class token
    in M is a map of the patches. The box of the largest connected region of patches above the mean of the map is cut out of
    the image, resized to the size of the image without keeping its proportions, and passed through the same network. The
    scores of a linear classifier for both class tokens are added. Training adds the cross-entropy of the scores of the
    whole image and of the part.

    No code of the authors is known, and no number of the paper was reproduced with this head. Three points are decisions of
    this reconstruction. Factors :math:`w_l A_l` alone would only scale the map, which a threshold at its mean does not
    notice, so that a weight here decides between the attention of a block and the identity. The mean of all entries of an
    attention matrix is the same for every image, because its rows sum to 1; therefore z leaves out the columns of the class
    token. A box has no gradient, so that nothing would train the weights: in training the part is multiplied by
    :math:`1 + g - \mathrm{stopgrad}(g)` with the map g on the part, divided by its mean over the image; this changes no
    value. The attention and the box are constants in the backward pass.

    ``forward_features`` of the model returns the class tokens of image and part (B, C, 1, 2), and its ``selected_parts``
    the box. The cost is twice that of the network.

    Args:
        in_channels, reduce: as in :class:`Head`; there is no reduction.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_vit", "aftrans", num_classes=5, img_size=64)
        >>> model(torch.zeros(2, 3, 64, 64)).shape, model.selected_parts(torch.zeros(2, 3, 64, 64)).boxes.shape
        (torch.Size([2, 5]), torch.Size([2, 1, 4]))

    References:
        Zhang et al., A Free Lunch from ViT: Adaptive Attention Multi-scale Fusion Transformer for Fine-grained Visual
        Recognition, ICASSP 2022.
    """

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.layer_weights: nn.Sequential | None = None
        self.out_features = 2 * self.channels

    def attach(self, network: Transformer) -> None:
        super().attach(network)
        hidden = max(network.depth // 2, 1)
        layers = nn.Linear(network.depth, hidden), nn.ReLU(), nn.Linear(hidden, network.depth), nn.Sigmoid()
        self.layer_weights = nn.Sequential(*layers)

    def class_row(self, attention: list[Tensor], prefix_tokens: int) -> Tensor:
        """Attention (B, T, T) of each block → what the class token attends to in their product, patches only (B, N)."""
        assert self.layer_weights is not None
        matrices = [matrix.detach() for matrix in attention]
        with full_precision(matrices[0]):
            z = torch.stack([matrix[:, :, prefix_tokens:].mean((1, 2)) for matrix in matrices], 1)
            # replicas of DataParallel list no parameters
            weights = self.layer_weights(z.to(self.layer_weights[0].weight.dtype)).to(z.dtype)  # type: ignore[arg-type]
            row = torch.zeros_like(matrices[0][:, :1])
            row = torch.cat([row[..., :1] + 1, row[..., 1:]], -1)  # the class token itself
            for matrix, weight in zip(reversed(matrices), weights.flip(1).unbind(1), strict=True):
                row = weight[:, None, None] * (row @ matrix) + (1 - weight[:, None, None]) * row
        return row[:, 0, prefix_tokens:]

    def select(self, network: Transformer, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class token (B, C) of the whole images, the map (B, 1, h, w) of the patches, and the boxes (B, 4)."""
        tokens, attention = network.embed(images), []
        for block in range(network.depth):
            with torch.no_grad():
                attention.append(network.attention(block, tokens).mean(1))
            tokens = network.run(block, tokens)
        row = self.class_row(attention, network.prefix_tokens)
        row = (row / row.mean(1, keepdim=True)).unflatten(1, network.grid(images))
        first, last = bounding_cells(largest_component(row.detach() >= 1 - ROUNDING))
        return network.normalise(tokens)[:, 0], row[:, None], network.boxes(images, first, last)

    def features(self, network: Transformer, images: Tensor) -> Tensor:
        whole, row, boxes = self.select(network, images)
        (height, width), (rows, columns) = images.shape[-2:], row.shape[-2:]
        part = enlarge(images, boxes, (height, width))
        if self.training:
            scale = torch.stack([boxes.new_full((), side) for side in (columns / width, rows / height)] * 2)
            gate = enlarge(row, boxes * scale, (height, width))
            part = part * (1 + (gate - gate.detach())).to(part.dtype)
        tokens = network.embed(part)
        for block in range(network.depth):
            tokens = network.run(block, tokens)
        return torch.stack([whole, network.normalise(tokens)[:, 0]], 2)[:, :, None]

    def parts(self, network: Transformer, images: Tensor) -> Parts:
        return Parts(self.select(network, images)[2][:, None], None)

    def pool(self, x: Tensor) -> Tensor:
        first, last = x[:, :, 0, 0], x[:, :, -1, -1]
        return torch.cat([first, last], 1).to(output_dtype(x))

    def classifier(self, num_classes: int) -> nn.Module:
        return SharedLinear(self.channels, num_classes)

    def loss_terms(self, vector: Tensor, targets: Tensor, classifier: nn.Module) -> LossTerms | None:
        if not isinstance(classifier, SharedLinear):
            problem = "must be that of the head, which scores the image and its part"
            raise ArgumentError("classifier", problem, type(classifier).__name__, "use model.reset_classifier")
        whole, part = classifier.each(vector).unbind(1)
        return LossTerms(scores={"whole": whole, "part": part})
