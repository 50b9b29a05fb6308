"""The mid-level branch against a module written by hand, and everything that a model with it must be able to do."""

import pytest
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.functional import cross_entropy

from eigengrain import create_model, from_pretrained, save_pretrained
from eigengrain.errors import ArgumentError, FileError
from eigengrain.heads import list_heads
from eigengrain.models.export import export_onnx, export_program
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.models.param_groups import parameter_groups
from eigengrain.models.weights import load_weights
from eigengrain.training import calibrate_vectors, evaluate
from eigengrain.training.loss import Loss

FILTERS = 6
LABELS = torch.tensor([0, 2])


def images(side=64, batch=2, dtype=torch.float32):
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=dtype)


def create(head="mpncov", backbone="resnet10t", **options):
    torch.manual_seed(0)
    return create_model(backbone, **{"head": head, "num_classes": 3, "reduce": 3, "mid_level": FILTERS, **options})


class Written(nn.Module):
    """The branch as it is defined, without any part of the package."""

    def __init__(self, model):
        super().__init__()
        branch, self.model, self.maps = model.mid_level, model, []
        self.filters = branch.reduce[0].weight
        self.norm, self.weight, self.bias = branch.reduce[1], branch.classifier.weight, branch.classifier.bias
        model.backbone.layer3.register_forward_hook(lambda _m, _i, out: self.maps.append(out))

    def forward(self, x, train=False):
        """Scores of the branch, for the map of the last pass of the backbone."""
        x = self.maps[-1]
        y = torch.einsum("oi,bihw->bohw", self.filters[:, :, 0, 0], x)
        mean, variance = self.norm.running_mean, self.norm.running_var
        if train:
            mean, variance = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
        y = (y - mean[:, None, None]) / (variance[:, None, None] + self.norm.eps).sqrt()
        y = (y * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]).clamp_min(0)
        return y.flatten(2).max(-1).values @ self.weight.T + self.bias


@pytest.mark.parametrize("head", ["gap", "mpncov+seb", "isqrt", "hcov+seb"])
@pytest.mark.parametrize(("last_stride", "side"), [(None, 64), (1, 64), (None, 72)])
def test_scores_are_those_of_the_head_and_of_a_branch_written_by_hand(head, last_stride, side):
    """At 72 pixels the maps have sides of 5 and 3, so that positions are repeated, which a maximum does not notice."""
    model = create(head, last_stride=last_stride).double().eval()
    for parameter in (*model.mid_level.reduce[1].parameters(), *model.mid_level.reduce[1].buffers()):
        if parameter.is_floating_point():
            parameter.data.uniform_(0.5, 1.5)
    plain = create(head, last_stride=last_stride, mid_level=None).double().eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "mid_level" not in name})
    written, x = Written(model), images(side, dtype=torch.float64)
    features = model.forward_features(x)
    assert features.shape[1] == model.num_features == sum(model.stage_channels) + model.beside_channels
    assert written.maps[-1].shape[-1] == {64: 4, 72: 5}[side]
    torch.testing.assert_close(model(x), plain(x) + written(x))
    torch.testing.assert_close(model.forward_features(x)[:, : -model.beside_channels], plain.forward_features(x))
    vector = model.forward_head(features, pre_logits=True)
    torch.testing.assert_close(vector, plain.forward_head(plain.forward_features(x), pre_logits=True))


def test_scores_and_gradients_of_a_training_batch():
    """Both classifiers have a cross-entropy of their own, and the branch sends no gradient into the backbone."""
    model, x = create("mpncov+seb", last_stride=1).double().train(), images(dtype=torch.float64)
    written = Written(model)
    scores, added = MixedPrecision(model)(x, LABELS)
    torch.testing.assert_close(added.scores["mid_level"], written(x, train=True))
    own = list(model.mid_level.parameters())
    with torch.no_grad():
        written.maps[-1] = written.maps[-1].clone()
    expected = torch.autograd.grad(cross_entropy(written(x, train=True), LABELS), own)
    trained = [*model.backbone.parameters(), *model.head.parameters(), *model.classifier.parameters()]
    alone = torch.autograd.grad(cross_entropy(scores, LABELS), trained, retain_graph=True)
    Loss([1, 1, 1])(scores, LABELS, added).backward()
    for parameter, gradient in zip(trained, alone, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for parameter, gradient in zip(own, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        assert gradient.abs().max() > 0


def test_smoothing_weights_and_mixed_labels_apply_to_both_classifiers():
    model = create("gap").train()
    scores, added = MixedPrecision(model)(images(), LABELS)
    shares = torch.tensor([[0.2, 0.3, 0.1], [0.0, 0.5, 0.5]])
    weights = torch.tensor([0.5, 1.0, 1.5])
    loss = Loss([6, 3, 2], balance=True)
    loss.weights = weights
    expected = -sum((weights * shares * s.log_softmax(1)).sum(1).mean() for s in (scores, added.scores["mid_level"]))
    torch.testing.assert_close(loss(scores, shares, added), expected)


@pytest.mark.parametrize("head", list_heads(any_backbone=True))
def test_contract(head, tmp_path):
    model, x = create(head, "test_resnet").train(), images()
    scores, added = model.forward_training(model.forward_features(x), LABELS)
    Loss([1, 1, 1])(scores, LABELS, added).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model.eval()
    with torch.no_grad():
        expected = model(x)
        save_pretrained(model, tmp_path)
        again = from_pretrained(tmp_path)
        assert torch.equal(again(x), expected)
        assert (again.config, again.layout) == (model.config, model.layout)
        assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, model.head_hidden_size)
        model.reset_classifier(5)
        assert model(x).shape == (2, 5)
        assert model.forward_training(model.forward_features(x), LABELS)[1].scores["mid_level"].shape == (2, 5)
        model.reset_classifier(0)
        torch.testing.assert_close(model(x), model.forward_head(model.forward_features(x), pre_logits=True))
        model.reset_classifier(4, "gap")
        assert model(x).shape == (2, 4)
        model.reset_classifier(0, "")  # the map alone
        assert model(x).shape[:2] == (2, model.head.in_channels)


@pytest.mark.parametrize("backbone", ["test_convnext", "test_efficientnet", "plumage_net", "swin_tiny_patch4_window7_224"])
def test_other_families(backbone):
    swin = {"img_size": 128, "window_size": 4, "embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
    model = create("mpncov", backbone, **(swin if "swin" in backbone else {})).eval()
    x = images(128)
    _, maps = model.forward_intermediates(x, indices=2)
    expected = model.mid_level(maps[0])
    pooled, beside = model.split_features(model.forward_features(x))
    torch.testing.assert_close(beside, maps[0])
    torch.testing.assert_close(model(x), model.forward_vector(model.head(pooled)) + expected)
    assert torch.equal(model.forward_intermediates(x)[0], model.forward_features(x))


def test_export(tmp_path):
    model, x = create("mpncov+seb", "test_resnet", img_size=None).eval(), images(batch=3)
    with torch.no_grad():
        scores = export_program(model, img_size=64).module()(x)
        torch.testing.assert_close(scores, model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    assert export_onnx(model, tmp_path / "model.onnx", img_size=64).relative_error < 1e-4


@pytest.mark.parametrize("backbone", ["test_resnet", "test_convnext"])
def test_the_convolution_learns_as_the_head_and_the_classifier_as_the_classifier(backbone):
    model = create("mpncov", backbone)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {g["name"]: {names[p] for p in g["params"]} for g in parameter_groups(model, 0.1, 0, 2.0, 3.0)}
    branch = {name for name in names.values() if name.startswith("mid_level")}
    assert groups["classifier"] & branch == {"mid_level.classifier.weight", "mid_level.classifier.bias"}
    assert groups["head"] & branch == branch - groups["classifier"]
    assert set.union(*groups.values()) == set(names.values())
    scales = {}
    for group in param_groups_layer_decay(model, layer_decay=0.5):
        scales |= {names[parameter]: group["lr_scale"] for parameter in group["params"]}
    assert scales["mid_level.reduce.0.weight"] == scales["head.reduce.0.weight"]
    assert scales["mid_level.classifier.weight"] == scales["classifier.weight"] == 1


@pytest.mark.parametrize("head", ["gap", "mpncov+seb"])
def test_calibration_gives_the_vectors_of_the_branch_a_length_too(head):
    model, x = create(head, "test_resnet"), images(batch=16)
    with torch.no_grad():
        model.mid_level.reduce[1].weight.fill_(0.01)  # short vectors, whose classifier is scaled down
    model.train()
    before = model.forward_training(model.forward_features(x), torch.zeros(16).long())
    calibrate_vectors(model, [(x, torch.zeros(16))])
    vectors = model.mid_level.vector(model.split_features(model.forward_features(x))[1]) * model.mid_level.vector_scale
    assert model.mid_level.vector_scale > 1
    assert float(vectors.detach().square().sum(1).mean()) == pytest.approx(32**2, rel=1e-4)
    own = model.forward_head(model.forward_features(x), pre_logits=True)
    assert float(own.detach().square().sum(1).mean()) == pytest.approx(32**2, rel=1e-4)
    after = model.forward_training(model.forward_features(x), torch.zeros(16).long())
    bias = model.mid_level.classifier.bias
    torch.testing.assert_close(
        after[1].scores["mid_level"] - bias, before[1].scores["mid_level"] - bias, rtol=1e-3, atol=1e-4
    )


def test_weights_of_another_backbone_reset_the_lengths(tmp_path):
    model = create("gap", "test_resnet")
    model.mid_level.vector_scale.fill_(5.0)
    torch.save(dict(model.backbone.state_dict()), tmp_path / "net.pth")
    load_weights(model, tmp_path / "net.pth")
    assert model.mid_level.vector_scale == 1


def test_evaluation_of_subsets_counts_the_branch():
    model, x, labels = create("mpncov", last_stride=1, reduce=8).eval(), images(batch=6), torch.tensor([0, 1, 2, 0, 1, 2])
    own, top = evaluate(model, [(x, labels)], subsets=("own", "top:2"))
    with torch.no_grad():
        assert own.loss == pytest.approx(float(cross_entropy(model(x), labels)), rel=1e-5)
        with model.head.keeping("top:2"):
            assert top.loss == pytest.approx(float(cross_entropy(model(x), labels)), rel=1e-5)
    assert own.loss != top.loss


def test_bf16_is_limited_to_the_backbone():
    model = create("mpncov", "test_resnet").train()
    scores, added = MixedPrecision(model, amp="bf16")(images(), LABELS)
    assert scores.dtype == added.scores["mid_level"].dtype == torch.float32


@pytest.mark.parametrize(
    ("backbone", "options", "argument"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64}, "mid_level"),
        ("tv:alexnet", {}, "mid_level"),
        ("test_resnet", {"mid_level": 0}, "mid_level"),
        ("test_resnet", {"mid_level": True}, "mid_level"),
        ("test_resnet", {"head": "", "num_classes": 0}, "mid_level"),
        ("vit_tiny_patch16_224", {"img_size": 64, "head": "transfg", "reduce": None}, "mid_level"),
    ],
)
def test_networks_and_values_that_do_not_fit_are_refused(backbone, options, argument):
    with pytest.raises(ArgumentError) as caught:
        create(backbone=backbone, **options)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_a_folder_that_describes_more_channels_than_its_weights_is_refused(tmp_path):
    save_pretrained(create("gap", "test_resnet"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mid_level": 6', '"mid_level": 100000000'))
    with pytest.raises(FileError):
        from_pretrained(tmp_path)


def test_a_model_without_the_branch_is_as_before():
    assert create(mid_level=None).config.keys() == create().config.keys() - {"mid_level"}
