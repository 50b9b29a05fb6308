"""TransFG and AFTrans against naive implementations in float64, and as heads of a model."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eigengrain.errors import ArgumentError, FileError, ReLURuleError, UnknownName
from eigengrain.explain import attribute_rules
from eigengrain.heads import LossTerms, create_head, list_heads
from eigengrain.heads.part_selection import bounding_cells, contrastive_loss, enlarge, largest_component
from eigengrain.models import create_model, from_pretrained, load_weights, save_pretrained
from eigengrain.models.export import export_onnx, export_pt2
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.training.loss import Loss

SIZE, CLASSES = 64, 3
HEADS = {"transfg": {}, "transfg-own": {"last_block": "own"}, "aftrans": {}, "token": {}}
HARD = {"depth": 4, "init_values": 0.5, "qk_norm": True, "reg_tokens": 2}  # layer scale, normalised q and k, registers


def make(case="transfg", backbone="test_vit", **options):
    """A model whose attention is far from uniform, so that a wrong sum or product changes the selection."""
    torch.manual_seed(0)
    arguments = {"num_classes": CLASSES, "img_size": SIZE, "patch_stride": 12, "head_options": HEADS[case], **options}
    model = create_model(backbone, case.split("-")[0], **arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("qkv.weight", "cls_token", "pos_embed")):
                parameter.mul_(8)
    return model


def images(batch=3, size=SIZE, dtype=torch.float64):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def naive_attention(net, x):
    """Tokens before each block and its attention, one image, head and row at a time, from hooks in the network."""
    tokens = []
    hooks = [block.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0])) for block in net.blocks]
    with torch.no_grad():
        net.forward_features(x)
        matrices = []
        for block, before in zip(net.blocks, tokens, strict=True):
            layer, width = block.attn, block.attn.num_heads * block.attn.head_dim
            matrix = torch.zeros(len(x), layer.num_heads, before.shape[1], before.shape[1], dtype=x.dtype)
            for image in range(len(x)):
                projected = layer.qkv(block.norm1(before[image]))
                for h in range(layer.num_heads):
                    part = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
                    q = layer.q_norm(projected[:, :width][:, part])
                    k = layer.k_norm(projected[:, width : 2 * width][:, part])
                    for row in range(len(q)):
                        logits = torch.stack([q[row].dot(k[column]) for column in range(len(k))])
                        matrix[image, h, row] = (logits / math.sqrt(layer.head_dim)).softmax(0)
            matrices.append(matrix)
    for hook in hooks:
        hook.remove()
    return tokens, matrices


# ---------------------------------------------------------------- attention and patches


@pytest.mark.parametrize("options", [{}, HARD], ids=["plain", "registers"])
def test_attention_is_that_of_the_blocks(options):
    model, x = make(**options).double().eval(), images(2)
    tokens, matrices = naive_attention(model.backbone, x)
    network = model._transformer
    for number, (before, matrix) in enumerate(zip(tokens, matrices, strict=True)):
        read = network.attention(number, before)
        torch.testing.assert_close(read, matrix, rtol=1e-12, atol=1e-12)
        layer = model.backbone.blocks[number].attn
        value = layer.qkv(model.backbone.blocks[number].norm1(before)).unflatten(2, (3, layer.num_heads, -1))[:, :, 2]
        mixed = layer.proj((read @ value.transpose(1, 2)).transpose(1, 2).flatten(2))
        torch.testing.assert_close(mixed, layer(model.backbone.blocks[number].norm1(before)), rtol=1e-11, atol=1e-11)


def test_reading_a_network_does_not_change_its_results():
    model, x = make("transfg-own").double().eval(), images(2)
    network = model._transformer
    tokens = network.embed(x)
    for block in range(network.depth):
        network.attention(block, tokens)
        tokens = network.run(block, tokens)
    with torch.no_grad():
        assert torch.equal(network.normalise(tokens), model.backbone.forward_features(x))


def test_overlapping_patches():
    plain, model = make(patch_stride=None), make()
    assert plain._transformer.grid(images()) == (4, 4)
    assert model._transformer.grid(images()) == (5, 5)
    x = images(1, dtype=torch.float32)
    with torch.no_grad():
        embedded = model.backbone.patch_embed(x).view(1, 5, 5, -1)
        for row, column in ((0, 0), (2, 3), (4, 4)):
            patch = x[:, :, 12 * row : 12 * row + 16, 12 * column : 12 * column + 16]
            alone = F.conv2d(patch, model.backbone.patch_embed.proj.weight, model.backbone.patch_embed.proj.bias)
            torch.testing.assert_close(embedded[:, row, column], alone[:, :, 0, 0], rtol=1e-4, atol=1e-5)
    other = create_model("test_vit", "mpncov", num_classes=2, reduce=8, img_size=SIZE, patch_stride=12)
    assert other.forward_features(x).shape == (1, 64, 5, 5)
    assert other.forward_intermediates(x, indices=1)[1][0].shape == (1, 64, 5, 5)
    assert {entry["reduction"] for entry in other.feature_info} == {12}


def test_weights_of_another_grid_are_resampled(tmp_path):
    import timm

    net = timm.create_model("test_vit", img_size=96)
    torch.save(net.state_dict(), tmp_path / "vit.pt")
    model = make()
    report = load_weights(model, tmp_path / "vit.pt")
    assert not report.mismatched
    assert {name.split(".")[0] for name in report.new} == {"head", "classifier"}
    expected = timm.layers.resample_abs_pos_embed(net.pos_embed, (5, 5), (6, 6), num_prefix_tokens=1)
    assert torch.equal(model.backbone.pos_embed, expected)
    assert torch.equal(model.backbone.blocks[2].mlp.fc1.weight, net.blocks[2].mlp.fc1.weight)


# ---------------------------------------------------------------- the class token


@pytest.mark.parametrize("options", [{}, {key: HARD[key] for key in ("init_values", "qk_norm", "reg_tokens")}])
def test_the_class_token_is_that_of_timm(options):
    """Scores and gradients of timm's own network with the same weights."""
    import timm

    net = timm.create_model("test_vit", img_size=SIZE, num_classes=CLASSES, **options).double().train()
    model = make("token", patch_stride=None, **options).double().train()
    state = net.state_dict()
    model.backbone.load_state_dict({key: value for key, value in state.items() if not key.startswith("head.")})
    model.classifier.load_state_dict(net.head.state_dict())
    x, labels = images(), torch.tensor([0, 2, 1])
    assert torch.equal(model(x), net(x))
    F.cross_entropy(net(x), labels).backward()
    total_loss(model, x, labels).backward()
    for name, parameter in net.named_parameters():
        own = f"classifier.{name[5:]}" if name.startswith("head.") else f"backbone.{name}"
        torch.testing.assert_close(model.get_parameter(own).grad, parameter.grad, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- TransFG


@pytest.mark.parametrize("options", [{}, HARD], ids=["plain", "registers"])
@pytest.mark.parametrize("case", ["transfg", "transfg-own"])
def test_transfg_is_its_definition(case, options):
    model, x = make(case, **options).double().eval(), images()
    tokens, matrices = naive_attention(model.backbone, x)
    prefix = model.backbone.num_prefix_tokens
    features, parts = model.forward_features(x), model.selected_parts(x)
    heads = matrices[0].shape[1]
    assert features.shape == (3, 64, 1, 1 + heads)
    block = model.backbone.blocks[-1] if case == "transfg-own" else model.head.block
    chosen = set()
    for image in range(len(x)):
        sequence = [tokens[-1][image, 0]]
        for h in range(heads):
            product = matrices[0][image, h]
            for matrix in matrices[1:-1]:
                product = matrix[image, h] @ product
            patch = int(product[0, prefix:].argmax())
            assert int(parts.indices[image, h]) == patch
            row, column = divmod(patch, 5)
            box = [12 * column, 12 * row, 12 * column + 16, 12 * row + 16]
            assert parts.boxes[image, h].tolist() == box
            sequence.append(tokens[-1][image, prefix + patch])
            chosen.add(patch)
        expected = model.backbone.norm(block(torch.stack(sequence)[None]))[0]
        torch.testing.assert_close(features[image, :, 0].T, expected, rtol=1e-10, atol=1e-10)
    assert len(chosen) > 1
    vector = model.forward_head(features, pre_logits=True)
    assert torch.equal(vector, features[:, :, 0, 0])


def naive_contrast(vectors, labels, margin):
    total = 0.0
    for i in range(len(vectors)):
        for j in range(len(vectors)):
            cosine = vectors[i].dot(vectors[j]) / (vectors[i].norm() * vectors[j].norm())
            total = total + (1 - cosine if labels[i] == labels[j] else max(cosine - margin, torch.zeros(())))
    return total / len(vectors) ** 2


@pytest.mark.parametrize(
    "labels", [[0, 1, 0, 2, 1], [0, 1, 2, 3, 4], [7, 7, 7, 7, 7], [1]], ids=["mixed", "all-different", "one-class", "one"]
)
@pytest.mark.parametrize("margin", [0.4, 0.0])
def test_contrastive_loss(labels, margin):
    generator = torch.Generator().manual_seed(2)
    vectors = (torch.randn(len(labels), 6, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
    labels = torch.tensor(labels)
    loss, expected = contrastive_loss(vectors, labels, margin), naive_contrast(vectors, labels, margin)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(value, vectors)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_contrastive_loss_of_extreme_vectors():
    labels = torch.tensor([0, 0, 1])
    for vectors in (torch.zeros(3, 4), torch.full((3, 4), 1e25), torch.full((3, 4), 1e-30)):
        vectors.requires_grad_()
        loss = contrastive_loss(vectors, labels)
        loss.backward()
        assert loss.isfinite()
        assert vectors.grad.isfinite().all()
    with pytest.raises(ArgumentError) as error:
        contrastive_loss(torch.zeros(3, 4), torch.zeros(2))
    assert error.value.argument == "labels"


# ---------------------------------------------------------------- AFTrans


def flood(mask):
    """Sizes of the connected sets of a mask, and the cells of the first largest one."""
    height, width = mask.shape
    seen, largest = set(), []
    for start in ((r, c) for r in range(height) for c in range(width) if mask[r, c]):
        if start in seen:
            continue
        cells, stack = [], [start]
        seen.add(start)
        while stack:
            row, column = stack.pop()
            cells.append((row, column))
            for near in ((row + a, column + b) for a in (-1, 0, 1) for b in (-1, 0, 1)):
                if 0 <= near[0] < height and 0 <= near[1] < width and mask[near] and near not in seen:
                    seen.add(near)
                    stack.append(near)
        largest = max(largest, cells, key=len)
    return largest


def maze(size):
    """One path that fills a square, row by row in turn."""
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[::2] = True
    for row in range(1, size, 2):
        mask[row, size - 1 if row % 4 == 1 else 0] = True
    return mask


def spiral(size):
    mask = torch.zeros(size, size, dtype=torch.bool)
    for ring in range(0, size // 2, 2):
        mask[ring, ring : size - ring] = mask[size - 1 - ring, ring : size - ring] = True
        mask[ring : size - ring, size - 1 - ring] = mask[ring + 2 : size - ring, ring] = True
        mask[ring + 2, ring : ring + 3] = True
    return mask


def test_largest_component_of_random_masks():
    generator = torch.Generator().manual_seed(3)
    for height, width in ((1, 1), (1, 7), (4, 4), (5, 9), (14, 14)):
        masks = torch.stack([torch.rand(height, width, generator=generator) < p / 40 for p in range(40)])
        for mask, component in zip(masks, largest_component(masks), strict=True):
            expected = flood(mask)
            assert int(component.sum()) == len(expected)
            assert not (component & ~mask).any()
            assert len(flood(component)) == len(expected)  # it is one set


def test_largest_component_of_all_masks_of_nine_cells():
    masks = (torch.arange(512)[:, None] >> torch.arange(9) & 1).bool().view(-1, 3, 3)
    assert largest_component(masks).sum((1, 2)).tolist() == [len(flood(mask)) for mask in masks]


@pytest.mark.parametrize("draw", [maze, spiral])
@pytest.mark.parametrize("size", [8, 14, 37, 64])
def test_long_components_are_found_whole(draw, size):
    mask = draw(size)
    turned = torch.stack([m for k in range(4) for m in (mask.rot90(k), mask.rot90(k).flip(0))])
    assert largest_component(turned).sum((1, 2)).tolist() == [len(flood(m)) for m in turned]


def naive_crop(image, box, size):
    """Bilinear resampling of a box, one pixel at a time; the edge of the image is repeated."""
    channels, height, width = image.shape
    x0, y0, x1, y1 = box
    out = torch.zeros(channels, *size, dtype=image.dtype)
    for i in range(size[0]):
        for j in range(size[1]):
            y = min(max(y0 + (i + 0.5) * (y1 - y0) / size[0] - 0.5, 0.0), height - 1.0)
            x = min(max(x0 + (j + 0.5) * (x1 - x0) / size[1] - 0.5, 0.0), width - 1.0)
            r, c = min(int(y), height - 2), min(int(x), width - 2)
            top = (1 - (x - c)) * image[:, r, c] + (x - c) * image[:, r, c + 1]
            bottom = (1 - (x - c)) * image[:, r + 1, c] + (x - c) * image[:, r + 1, c + 1]
            out[:, i, j] = (1 - (y - r)) * top + (y - r) * bottom
    return out


def test_enlarge():
    x = images(2, 10)
    boxes = torch.tensor([[2.0, 1.0, 7.0, 9.0], [0.0, 0.0, 10.0, 10.0]])
    result = enlarge(x, boxes, (8, 12))
    for image, box, crop in zip(x, boxes.tolist(), result, strict=True):
        torch.testing.assert_close(crop, naive_crop(image, box, (8, 12)), rtol=1e-12, atol=1e-12)
    assert torch.equal(enlarge(x, boxes[1:].expand(2, 4), (10, 10)), x)
    theirs = F.interpolate(x[:1, :, 1:9, 2:7], (16, 15), mode="bilinear")  # inside, where the edges play no part
    torch.testing.assert_close(enlarge(x[:1], boxes[:1], (16, 15))[:, :, 2:-2, 3:-3], theirs[:, :, 2:-2, 3:-3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_enlarge_in_half_precision(dtype):
    x, boxes = images(1, 600).to(dtype), torch.tensor([[331.0, 257.0, 590.0, 579.0]])
    assert torch.equal(enlarge(x, boxes, (64, 64)), enlarge(x.float(), boxes, (64, 64)).to(dtype))


def replica_of(module):
    """A copy as ``DataParallel`` makes it: the parameters are plain attributes."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replica_of(child))
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter * 1)
    return replica


@pytest.mark.parametrize("case", ["transfg", "aftrans"])
def test_replica_of_data_parallel(case):
    head, x = make(case).head.eval(), images(2, dtype=torch.float32)
    network = make(case)._transformer
    with torch.no_grad():
        assert torch.equal(replica_of(head).features(network, x), head.features(network, x))


@pytest.mark.parametrize("options", [{}, HARD], ids=["plain", "registers"])
def test_aftrans_is_its_definition(options):
    model, x = make("aftrans", **options).double().eval(), images()
    _, matrices = naive_attention(model.backbone, x)
    prefix, depth = model.backbone.num_prefix_tokens, len(matrices)
    first, _, second, _ = model.head.layer_weights.requires_grad_(False)
    features, parts = model.forward_features(x), model.selected_parts(x)
    assert features.shape == (3, 64, 1, 2)
    assert parts.indices is None
    assert parts.boxes.unique(dim=0).shape[0] > 1
    for image in range(len(x)):
        means = [matrix[image].mean(0) for matrix in matrices]
        z = torch.stack([mean[:, prefix:].mean() for mean in means])
        hidden = [max(0.0, float(row.dot(z) + bias)) for row, bias in zip(first.weight, first.bias, strict=True)]
        weights = [
            1 / (1 + math.exp(-float(row.dot(torch.tensor(hidden, dtype=z.dtype)) + bias)))
            for row, bias in zip(second.weight, second.bias, strict=True)
        ]
        product = torch.eye(len(means[0]), dtype=z.dtype)
        for block in range(depth):
            one = torch.eye(len(product), dtype=z.dtype)
            product = (weights[block] * means[block] + (1 - weights[block]) * one) @ product
        seen = product[0, prefix:].view(5, 5)
        cells = flood(seen >= seen.mean())
        rows, columns = [r for r, _ in cells], [c for _, c in cells]
        box = [12 * min(columns), 12 * min(rows), 12 * max(columns) + 16, 12 * max(rows) + 16]
        assert parts.boxes[image, 0].tolist() == box
        part = naive_crop(x[image], box, (SIZE, SIZE))
        for position, picture in enumerate((x[image], part)):
            with torch.no_grad():
                class_token = model.backbone.forward_features(picture[None])[0, 0]
            torch.testing.assert_close(features[image, :, 0, position], class_token, rtol=1e-9, atol=1e-9)
    vector, classifier = model.forward_head(features, pre_logits=True), model.classifier
    whole, part = (vector[:, half] @ classifier.weight.T + classifier.bias for half in (slice(0, 64), slice(64, 128)))
    torch.testing.assert_close(model(x), whole + part, rtol=1e-12, atol=1e-12)


def test_aftrans_cuts_out_the_whole_image_if_no_patch_stands_out():
    model = make("aftrans").eval()
    with torch.no_grad():
        for block in model.backbone.blocks:
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    parts = model.selected_parts(images(dtype=torch.float32))
    assert parts.boxes[:, 0].tolist() == [[0, 0, SIZE, SIZE]] * 3


def test_bounding_cells():
    mask = torch.zeros(3, 4, 5, dtype=torch.bool)
    mask[0, 1, 2] = mask[0, 3, 4] = mask[1, 0, 0] = True
    assert [cell.tolist() for cell in bounding_cells(mask)] == [[[1, 2], [0, 0], [0, 0]], [[3, 4], [0, 0], [3, 4]]]


# ---------------------------------------------------------------- gradients and loss terms


def total_loss(model, x, labels, **options):
    scores, added = MixedPrecision(model, **options)(x, labels)
    return Loss([1] * CLASSES)(scores, labels, added)


@pytest.mark.parametrize("amp", ["none", "bf16"])
@pytest.mark.parametrize("case", HEADS)
def test_gradients_reach_every_parameter_in_use(case, amp):
    model, labels = make(case).train(), torch.tensor([0, 1, 0])
    total_loss(model, images(dtype=torch.float32), labels, amp=amp).backward()
    unused = {f"backbone.blocks.5.{name}" for name, _ in model.backbone.blocks[5].named_parameters()}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == (unused if case == "transfg" else set())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_the_gate_of_aftrans_changes_no_value():
    model, x = make("aftrans"), images(dtype=torch.float32)
    assert torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("case", HEADS)
def test_gradient_checkpointing(case):
    x, labels, gradients = images(dtype=torch.float32), torch.tensor([0, 1, 0]), []
    for enable in (False, True):
        model = make(case).train()
        model.set_grad_checkpointing(enable)
        total_loss(model, x, labels).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


@pytest.mark.parametrize("labels", [[0, 1, 2], [1, 1, 1], [2]], ids=["one-image-per-class", "one-class", "one-image"])
@pytest.mark.parametrize("case", HEADS)
def test_the_loss_of_a_batch(case, labels):
    """Cross-entropy and the terms of the definition, from the vectors of the model."""
    model, x, labels = make(case).double().train(), images(len(labels)), torch.tensor(labels)
    loss = total_loss(model, x, labels)
    vector = model.forward_head(model.forward_features(x), pre_logits=True)
    if case == "aftrans":
        each = [F.linear(half, model.classifier.weight, model.classifier.bias) for half in vector.chunk(2, 1)]
        expected = sum(F.cross_entropy(scores, labels) for scores in (*each, each[0] + each[1]))
    else:
        expected = F.cross_entropy(model.classifier(vector), labels)
        if case != "token":
            expected = expected + naive_contrast(vector, labels, 0.4)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_options_of_the_contrastive_loss():
    vector, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 2])
    head = create_head("transfg", 8, contrast=0.5, margin=0.1)
    added = head.loss_terms(vector, labels, nn.Identity())
    torch.testing.assert_close(added.terms["contrast"], 0.5 * contrastive_loss(vector, labels, 0.1))
    assert not head.mixes_labels
    with pytest.raises(ArgumentError) as error:
        head.loss_terms(vector, torch.full((4, 3), 1 / 3), nn.Identity())
    assert error.value.argument == "contrast"
    without = create_head("transfg", 8, contrast=0)
    assert without.mixes_labels
    assert without.loss_terms(vector, torch.full((4, 3), 1 / 3), nn.Identity()) is None


def test_mixed_labels_smoothing_and_weights_reach_the_scores_of_a_head():
    scores, more, term = torch.randn(4, 3), torch.randn(4, 3), torch.tensor(0.25)
    added = LossTerms({"part": more}, {"extra": term})
    shares = torch.rand(4, 3).softmax(1)
    for options, targets in (
        ({}, torch.tensor([0, 1, 2, 0])),
        ({"label_smoothing": 0.1, "balance": True}, torch.tensor([0, 1, 2, 0])),
        ({"mixup": 0.2, "label_smoothing": 0.1}, shares),
    ):
        loss = Loss([1, 2, 3], **options)
        assert torch.equal(loss(scores, targets, None), loss.cross_entropy(scores, targets))
        expected = loss.cross_entropy(scores, targets) + loss.cross_entropy(more, targets) + term
        assert torch.equal(loss(scores, targets, added), expected)


def test_heads_without_terms_are_trained_as_before():
    torch.manual_seed(0)
    model, x = (
        create_model("test_resnet", "mpncov+seb", num_classes=3, reduce=4, drop_rate=0.3).train(),
        torch.randn(4, 3, 64, 64),
    )
    results = []
    for forward in (lambda net: net(x), lambda net: net(x, torch.tensor([0, 1, 2, 0]))[0]):
        net = MixedPrecision(copy.deepcopy(model))
        torch.manual_seed(1)
        scores = forward(net)
        scores.sum().backward()
        results.append([scores, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert model.forward_training(model.forward_features(x), torch.tensor([0, 1, 2, 0]))[1] is None


# ---------------------------------------------------------------- as a model


@pytest.mark.parametrize("case", HEADS)
def test_a_sample_does_not_depend_on_its_batch(case):
    model, x = make(case).double().eval(), images(4)
    with torch.no_grad():
        together = model(x)
        for number in range(4):
            torch.testing.assert_close(model(x[number : number + 1])[0], together[number], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", HEADS)
def test_states_and_folders(case, tmp_path):
    model, x = make(case).eval(), images(2, dtype=torch.float32)
    with torch.no_grad():
        expected = model(x)
        again = make(case)
        for parameter in again.parameters():
            parameter.add_(1)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again.eval()(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        save_pretrained(model, tmp_path / "model", class_names=["a", "b", "c"])
        opened = from_pretrained(tmp_path / "model")
        assert opened.config["patch_stride"] == 12
        assert opened.head.summary == model.head.summary
        assert torch.equal(opened(x), expected)


def test_another_head_and_back():
    model, x = make("transfg"), images(2, dtype=torch.float32)
    model.reset_classifier(4, "gap")
    assert all(p.requires_grad for p in model.parameters())
    assert model(x).shape == (2, 4)
    assert model.forward_features(x).shape == (2, 64, 5, 5)
    model.reset_classifier(5, "aftrans")
    assert model(x).shape == (2, 5)
    model.reset_classifier(0)
    assert model(x).shape == (2, 128)
    model.reset_classifier(2, "transfg")
    assert model(x).shape == (2, 2)
    assert not any(p.requires_grad for p in model.backbone.blocks[-1].parameters())
    model.freeze_backbone()
    model.reset_classifier(3, "gap")
    assert not any(p.requires_grad for p in model.backbone.parameters())


@pytest.mark.parametrize("case", HEADS)
def test_compiled(case):
    model, x = make(case).eval(), images(2, dtype=torch.float32)
    with torch.no_grad():
        compiled = torch.compile(model.forward_features, backend="aot_eager")
        torch.testing.assert_close(compiled(x), model.forward_features(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["transfg", "aftrans", "token"])
def test_exported(case, tmp_path):
    model = make(case, depth=3)
    assert export_pt2(model, tmp_path / "model.pt2").relative_error < 1e-4
    pytest.importorskip("onnxruntime")
    assert export_onnx(model, tmp_path / "model.onnx").relative_error < 1e-4


def test_what_does_not_fit_is_refused():
    def refused(argument, *names, **options):
        with pytest.raises(ArgumentError) as error:
            create_model(*names, num_classes=2, **options)
        assert error.value.argument == argument
        assert error.value.remedy

    vit = ("test_vit", "transfg")
    refused("backbone", "test_resnet", "transfg")
    refused("backbone", "swin_tiny_patch4_window7_224", "aftrans", img_size=(96, 96), window_size=3)
    without_class_token = "vit_base_patch16_gap_224"
    refused("backbone", without_class_token, "transfg", img_size=64, embed_dim=48, depth=2, num_heads=3)
    refused("patch_drop_rate", *vit, img_size=64, patch_drop_rate=0.5)
    refused("reduce", *vit, img_size=64, reduce=8)
    refused("stages", *vit, img_size=64, stages=2)
    refused("class_token", *vit, img_size=64, class_token="beside")
    refused("patch_stride", "test_resnet", "gap", patch_stride=2)
    for stride in (0, 17, True):
        with pytest.raises(ArgumentError) as error:
            create_model(*vit, num_classes=2, img_size=64, patch_stride=stride)
        assert error.value.argument == "patch_stride"
    with pytest.raises(UnknownName):
        create_head("transfg", 8, last_block="old")
    for options in ({"contrast": -1.0}, {"margin": 2.0}, {"contrast": math.nan}):
        with pytest.raises(ArgumentError) as error:
            create_head("transfg", 8, **options)
        assert error.value.argument in options
    for model in (create_model("test_resnet", "gap", num_classes=2), make("token")):
        with pytest.raises(ArgumentError) as error:
            model.selected_parts(torch.zeros(1, 3, 64, 64))
        assert error.value.argument == "head"
    assert {"transfg", "aftrans", "token"} == set(list_heads()) - set(list_heads(any_backbone=True))


def test_a_damaged_description_is_refused(tmp_path):
    model = make()
    save_pretrained(model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace('"patch_stride": 12', '"patch_stride": 4'))
    with pytest.raises(FileError):
        from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("case", HEADS)
def test_rules_at_relus_are_refused(case):
    model, x = make(case).eval(), images(1, dtype=torch.float32)
    with pytest.raises(ReLURuleError):
        attribute_rules(model, x, ["all"], ["guided"], target=0)
    [result] = attribute_rules(model, x, ["all"], ["vanilla"], target=0).values()
    assert result.maps["all"].shape == x.shape
    assert result.maps["all"].any()
