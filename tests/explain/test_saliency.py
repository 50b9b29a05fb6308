"""EigenSaliency against finite differences, its own algebra and captum, and that it changes nothing else."""

import gc
import importlib.util
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captum.attr import Deconvolution, GuidedBackprop, IntegratedGradients, NoiseTunnel, Saliency
from captum.attr import visualization as captum_pictures
from torch import nn

from eigengrain.errors import (
    ArgumentError,
    MissingPackageError,
    NonFiniteError,
    ReLURuleError,
    ShortRankWarning,
    UnknownName,
)
from eigengrain.explain import RULES, EigenSaliency, attribute_rules
from eigengrain.explain.sanity import deletion_curve, insertion_curve
from eigengrain.explain.smooth import smooth_maps
from eigengrain.functional import EigenSubset
from eigengrain.heads import CovarianceHead, SpectralHead
from eigengrain.models import CovarianceNet, create_model
from eigengrain.models.backbone import Backbone, FeatureLayout

F64 = torch.float64
D, CLASSES, SIZE = 5, 4, 7
SUBSETS = ("all", "top:2", "last:3", "top:1+last:2", "~(top:1+last:2)")


class Trunk(nn.Module):
    """Convolution, ReLU, convolution: (B, 3, 7, 7) → (B, 6, 7, 7); ``between`` sees the map between the two."""

    def __init__(self, between=None):
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3)
        self.between = between or (lambda x: x)

    def forward_features(self, x):
        return self.second(self.between(self.act(self.first(x))))


def make(head="mpncov", reduce=D, dtype=F64, between=None, num_classes=CLASSES, seed=0, **options):
    torch.manual_seed(seed)
    description = {"input_size": (3, SIZE, SIZE)}
    backbone = Backbone("trunk", {}, None, Trunk(between), FeatureLayout("NCHW"), (6,), description, "")
    model = CovarianceNet(backbone, head, num_classes, reduce=reduce, head_options=options).to(dtype).eval()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias, mean=0.3, std=0.1)  # so that no channel is dead
        nn.init.uniform_(norm.running_var, 0.02, 0.05)
    return model


def images(batch=2, dtype=F64, seed=1):
    return torch.randn(batch, 3, SIZE, SIZE, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def distance(actual, expected):
    return float((actual - expected).norm() / expected.norm())


# ---------------------------------------------------------------- maps


def naive_scores(model, x, subset, target, seb, project=None):
    """Class score or norm of each image by NumPy, one matrix at a time. ``project`` holds the subspaces of other images."""
    with torch.no_grad():
        reduced = model.head.reduce(model.forward_features(x)).flatten(2).numpy()
    mask = EigenSubset.parse(subset).mask(D).numpy()
    scores = []
    for number, item in enumerate(reduced):
        p = np.cov(item, bias=True)
        lam, u = (a[..., ::-1] for a in np.linalg.eigh(p))
        if project is None:
            q = (u * np.where(mask, np.sqrt(lam), 0)) @ u.T
        else:  # the root of Π P Π, with Π of the image that is explained
            pi = project[number]
            lam_in, u_in = np.linalg.eigh(pi @ p @ pi)
            q = (u_in * np.sqrt(np.where(lam_in > 1e-12, lam_in, 0))) @ u_in.T
        if seb:
            q = q * (1 + np.sqrt(np.sum(lam * np.exp(-2 * lam))))
        vector = q[np.triu_indices(D)]
        weight, bias = (t.detach().numpy() for t in model.classifier.parameters())
        scores.append(np.linalg.norm(vector) if target == "norm" else (weight @ vector + bias)[target])
    return np.array(scores)


def differences(scores, x, step=1e-5):
    """Central finite differences of a score of one image (1, 3, H, W), all pixels in one batch."""
    moves = step * torch.eye(x.numel(), dtype=F64).view(-1, *x.shape[1:])
    return torch.from_numpy(scores(x + moves) - scores(x - moves)).view_as(x) / (2 * step)


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("target", [2, "norm"])
@pytest.mark.parametrize("subset", SUBSETS)
def test_exact_maps_against_finite_differences(subset, target, seb):
    model, x = make("mpncov" + "+seb" * seb), images(1)
    actual = EigenSaliency(model).attribute(x, target=target, subset=subset)
    expected = differences(lambda moved: naive_scores(model, moved, subset, target, seb), x)
    assert actual.shape == x.shape
    assert expected.norm() > 1e-3
    assert distance(actual, expected) < 1e-6


@pytest.mark.parametrize("target", [1, "norm"])
@pytest.mark.parametrize("subset", SUBSETS[1:])
def test_projector_maps_keep_the_subspace_fixed(subset, target):
    model, x = make(), images(1)
    with torch.no_grad():
        reduced = model.head.reduce(model.forward_features(x)).flatten(2)[0].numpy()
    u = np.linalg.eigh(np.cov(reduced, bias=True))[1][:, ::-1]
    kept = u[:, EigenSubset.parse(subset).mask(D).numpy()]
    held = [kept @ kept.T] * (2 * x.numel())
    actual = EigenSaliency(model).attribute(x, target=target, subset=subset, cut="projector")
    expected = differences(lambda moved: naive_scores(model, moved, subset, target, False, held), x)
    assert distance(actual, expected) < 1e-5
    assert distance(EigenSaliency(model).attribute(x, target=target, subset=subset), expected) > 0.01


@pytest.mark.parametrize("head", ["mpncov", "mpncov+seb", "logcov", "logcov+seb"])
@pytest.mark.parametrize("part", ["top:1", "top:3", "top:1+last:2"])
def test_maps_of_a_partition_add_up(head, part):
    model, x = make(head), images(3)
    saliency = EigenSaliency(model)
    whole, kept, rest = (saliency.attribute(x, target=1, subset=s) for s in ("all", part, f"~({part})"))
    assert min(whole.norm(), kept.norm(), rest.norm()) > 1e-3
    assert distance(kept + rest, whole) < 1e-10
    fixed = [saliency.attribute(x, target=1, subset=s, cut="projector") for s in (part, f"~({part})")]
    assert distance(fixed[0] + fixed[1], whole) > 1e-3


def test_maps_of_a_partition_add_up_through_a_float32_backbone():
    torch.manual_seed(0)
    model = create_model("test_resnet", head="mpncov", num_classes=3, reduce=4).eval()
    x = torch.randn(2, 3, 96, 96)
    whole, top, last = (EigenSaliency(model).attribute(x, target=1, subset=s) for s in ("all", "top:2", "last:2"))
    assert distance(top + last, whole) < 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds_in_backbone_and_reduction(rule):
    """By hand: masks at the ReLUs of the trunk and of the head's reduction."""
    model, x = make("gap", reduce=D), images()

    def mask(gradient, at):
        passed = gradient if rule == "deconv" else gradient * (at > 0)
        return passed if rule == "vanilla" else passed.clamp(min=0)

    with torch.no_grad():
        trunk, convolution, norm = model.backbone, model.head.reduce[0], model.head.reduce[1]
        hidden = trunk.first(x)
        reduced = norm(convolution(trunk.second(hidden.relu())))
        positions = reduced.shape[-1] * reduced.shape[-2]
        gradient = (model.classifier.weight[3] / positions)[None, :, None, None].expand_as(reduced)
        gradient = mask(gradient, reduced) * (norm.weight / (norm.running_var + norm.eps).sqrt())[None, :, None, None]
        gradient = F.conv_transpose2d(gradient, convolution.weight)
        gradient = mask(F.conv_transpose2d(gradient, trunk.second.weight), hidden)
        expected = F.conv_transpose2d(gradient, trunk.first.weight, padding=1)
    assert distance(EigenSaliency(model, rule).attribute(x, target=3), expected) < 1e-12


@pytest.mark.parametrize(("rule", "peer"), [("vanilla", Saliency), ("deconv", Deconvolution), ("guided", GuidedBackprop)])
def test_all_eigenvalues_agree_with_captum(rule, peer):
    model, x = make("mpncov+seb"), images(3)
    target = torch.tensor([0, 3, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = peer(model).attribute(x, target=target, **({"abs": False} if peer is Saliency else {}))
    assert distance(EigenSaliency(model, rule).attribute(x, target=target), expected) < 1e-12


# ---------------------------------------------------------------- many maps at once


def counted(model):
    """The number of backward passes through the middle of the backbone, in a list."""
    passes = []

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            passes.append(1)
            return gradient

    model.backbone.between = Count.apply
    return passes


@pytest.mark.parametrize("target", [2, None, "norm"])
@pytest.mark.parametrize("cut", ["exact", "projector"])
def test_all_at_once_is_each_alone(cut, target):
    model, x = make("mpncov+seb"), images(3)
    actual = attribute_rules(model, x, SUBSETS, RULES, target=target, cut=cut)
    assert list(actual) == list(RULES)
    for rule in RULES:
        assert list(actual[rule].maps) == list(actual[rule].gaps) == list(SUBSETS)
        assert (actual[rule].rule, actual[rule].cut) == (rule, cut)
        for subset in SUBSETS:
            alone = EigenSaliency(model, rule).attribute(x, target=target, subset=subset, cut=cut)
            assert distance(actual[rule].maps[subset], alone) < 1e-10
            assert not actual[rule].maps[subset].requires_grad


def test_a_batch_is_its_images():
    model, x = make("mpncov+seb"), images(3)
    for rule in RULES:
        saliency = EigenSaliency(model, rule)
        together = saliency.attribute_subsets(x, SUBSETS)
        for number in range(3):
            alone = saliency.attribute_subsets(x[number : number + 1], SUBSETS)
            for subset in SUBSETS:
                assert distance(together.maps[subset][number], alone.maps[subset][0]) < 1e-9
                torch.testing.assert_close(together.gaps[subset][number], alone.gaps[subset][0], rtol=1e-9, atol=0)
            assert together.targets[number] == alone.targets[0]


def test_number_of_passes():
    model, x = make(), images()
    passes, forwards = counted(model), []
    inner = model.forward_features
    model.forward_features = lambda x: forwards.append(1) or inner(x)

    def count(subsets, rules, **options):
        passes.clear()
        forwards.clear()
        attribute_rules(model, x, subsets, rules, **options)
        assert len(forwards) == 1
        return len(passes)

    assert count(["all", "top:2", "last:3"], ["vanilla", "deconv"]) == 5
    assert count(["last:3", "~(last:3)", "all", "top:1"], ["vanilla"]) == 3
    assert count(["top:2", "last:3"], ["vanilla"]) == 2  # without the whole
    assert count(["all", "top:2", "last:2"], ["vanilla"]) == 3  # not a partition
    assert count(["all", "top:2", "last:3"], ["deconv"]) == 3
    assert count(["all", "top:2", "last:3"], ["vanilla"], cut="projector") == 3
    assert count(["all", "top:2", "last:3"], ["vanilla"], target="norm") == 3
    assert count(["all", "all"], ["vanilla", "vanilla"]) == 1


@pytest.mark.parametrize("largest", [0, 1, 2])
def test_the_largest_map_is_the_one_without_a_pass(largest):
    """Each of the three can be computed from the others, without loss of digits."""
    from eigengrain.explain.saliency import _Partition

    generator = torch.Generator().manual_seed(largest)
    pieces = [torch.randn(2, 3, 4, 4, dtype=F64, generator=generator) for _ in range(2)]
    whole, part, rest = {  # one of them a million times smaller
        0: (pieces[0], pieces[0] * 0.5, pieces[0] * 0.5),
        1: (pieces[1] * 1e-6, pieces[0], pieces[1] * 1e-6 - pieces[0]),
        2: (pieces[0] + pieces[1] * 1e-6, pieces[1] * 1e-6, pieces[0]),
    }[largest]
    gradients = {"all": whole, "top:1": part, "last:1": rest, "other": pieces[1]}
    partition = _Partition("all", "top:1", "last:1")
    sent = partition.reduce(gradients)
    assert len(sent) == 3
    maps = {name: (3 * gradient).float() for name, gradient in sent.items()}  # a linear backbone of float32
    restored = partition.restore(maps, gradients)
    assert set(restored) == set(gradients)
    for name, gradient in gradients.items():
        assert distance(restored[name].double(), 3 * gradient) < 3e-7


@pytest.mark.parametrize(
    "options", [{"factor": "mlp-matrix"}, {"gradient": "taylor"}], ids=["factor of what is kept", "published gradient"]
)
def test_all_passes_are_made_if_maps_do_not_add_up(options):
    model, x = make("mpncov+seb", **options), images()
    passes = counted(model)
    actual = EigenSaliency(model).attribute_subsets(x, ["all", "top:2", "last:3"], target=0)
    assert len(passes) == 3
    for subset, whole in actual.maps.items():
        assert distance(whole, EigenSaliency(model).attribute(x, target=0, subset=subset)) < 1e-12


def test_other_factors_add_up():
    for options in ({"factor": "q"}, {"factor": "constant"}, {"path": "scaled"}, {"factor": "mlp-eigenvalues"}):
        model, x = make("mpncov+seb", **options), images()
        passes = counted(model)
        actual = EigenSaliency(model).attribute_subsets(x, ["all", "top:2", "last:3"], target=0)
        assert len(passes) == 2
        for subset, whole in actual.maps.items():
            assert distance(whole, EigenSaliency(model).attribute(x, target=0, subset=subset)) < 1e-9


class UnitHead(CovarianceHead):
    def pool(self, x):
        return F.normalize(super().pool(x), dim=1)


class Cosine(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x, dim=1), self.weight)


@pytest.mark.parametrize(("part", "kind"), [("head", UnitHead), ("classifier", Cosine)])
def test_subclasses_of_head_and_classifier(part, kind):
    model, x = make(), images(1)
    getattr(model, part).__class__ = kind

    def scores(moved, subset):
        model.head.subset = subset
        with torch.no_grad():
            return model(moved)[:, 2].numpy()

    actual = EigenSaliency(model).attribute_subsets(x, ["all", "top:2", "last:3"], 2)  # a partition that does not add up
    for subset, signed in actual.maps.items():
        assert distance(signed, differences(lambda moved, subset=subset: scores(moved, subset), x)) < 1e-6


class EigenvalueHead(SpectralHead):
    """A head with the required members only: it pools to the eigenvalues that are kept."""

    def __init__(self, in_channels, reduce=None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels

    def pool(self, x):
        x = x.flatten(2) - x.flatten(2).mean(2, keepdim=True)
        return torch.linalg.eigvalsh(x @ x.mT / x.shape[2]).flip(1) * self.subset.mask(self.channels)

    def eigenvalues(self, reduced):
        with torch.no_grad(), self.keeping("all"):
            return self.pool(reduced)


def test_any_spectral_head_is_explained():
    model, x = make(), images()
    model.head = EigenvalueHead(6, reduce=D).double().eval()
    model.classifier = nn.Linear(D, CLASSES).double()
    actual = attribute_rules(model, x, ["all", "top:2", "last:3"], RULES, target=2)
    assert (
        distance(sum(actual["vanilla"].maps[subset] for subset in ("top:2", "last:3")), actual["vanilla"].maps["all"])
        < 1e-10
    )
    leaf = x.clone().requires_grad_()
    with model.head.keeping("top:2"):
        (expected,) = torch.autograd.grad(model(leaf)[:, 2].sum(), leaf)
    assert distance(actual["vanilla"].maps["top:2"], expected) < 1e-10
    lam = model.head.eigenvalues(model.head.reduce(model.forward_features(x)))
    torch.testing.assert_close(actual["guided"].gaps["top:2"], 1 - lam[:, 2] / lam[:, 1])
    assert str(model.head.subset) == "all"


def test_short_rank_is_an_identity():
    """Only four of seven eigenvalues are above zero: the others have a zero map, and the four have the map of all."""
    torch.manual_seed(0)
    model = create_model("test_resnet", head="mpncov", num_classes=3, reduce=7).eval()
    with pytest.warns(ShortRankWarning) as warned:
        actual = EigenSaliency(model).attribute_subsets(torch.randn(1, 3, 64, 64), ["all", "top:4", "last:3"], target=0)
    assert (warned[0].message.channels, warned[0].message.positions) == (7, 4)
    assert actual.maps["last:3"].abs().max() == 0
    assert torch.equal(actual.maps["top:4"], actual.maps["all"])
    assert actual.gaps["top:4"].isnan().all()


# ---------------------------------------------------------------- targets and gaps


def test_the_predicted_class_is_chosen_once_from_all_eigenvalues():
    model, x = make(), images(6)
    nn.init.zeros_(model.classifier.bias)
    nn.init.normal_(model.classifier.weight)
    predicted = model(x).argmax(1)
    model.head.subset = "last:2"
    assert (model(x).argmax(1) != predicted).any()  # choosing the class per subset would change the result
    for subsets in (["last:2", "all"], ["last:2"]):
        actual = EigenSaliency(model).attribute_subsets(x, subsets)
        assert torch.equal(actual.targets, predicted)
        assert torch.equal(actual.maps["last:2"], EigenSaliency(model).attribute(x, target=predicted, subset="last:2"))
    assert str(model.head.subset) == "last:2"


def test_targets():
    model, x = make(), images(2)
    saliency = EigenSaliency(model)
    each = saliency.attribute(x, target=torch.tensor([3, 0]))
    assert torch.equal(each, saliency.attribute(x, target=[3, 0]))
    assert torch.equal(each[:1], saliency.attribute(x, target=3)[:1])
    assert torch.equal(each[1:], saliency.attribute(x, target=torch.tensor(0))[1:])
    assert torch.equal(each[1:], saliency.attribute(x, target=torch.tensor([0], dtype=torch.int32))[1:])
    assert saliency.attribute_subsets(x, ["all"], target="norm").targets.tolist() == [-1, -1]
    headless = EigenSaliency(make(num_classes=0))
    assert headless.attribute(x, target="norm").shape == x.shape
    with pytest.raises(ArgumentError) as caught:
        headless.attribute(x)
    assert caught.value.argument == "target"


ONE_PER_IMAGE = {
    "list": [3, 0],
    "list of tuples": [(3,), (0,)],
    "tensor": torch.tensor([3, 0]),
    "column": torch.tensor([[3], [0]]),
    "short integers": torch.tensor([3, 0], dtype=torch.int16),
    "array": np.array([3, 0]),
}
ONE_FOR_ALL = {
    "integer": 3,
    "tuple": (3,),
    "list": [3],
    "list of a tuple": [(3,)],
    "scalar": torch.tensor(3),
    "tensor": torch.tensor([3]),
    "column": torch.tensor([[3]]),
}
NOT_CLASSES = {
    "too large": 4,
    "negative": [0, -1],
    "too many": torch.tensor([0, 1, 2]),
    "row": torch.tensor([[0, 1]]),
    "two indices": [(0, 1), (2, 3)],
    "ragged": [(0,), (1, 2)],
    "empty": [],
    "float": 0.5,
    "floats": torch.tensor([0.0, 1.0]),
    "bool": True,
    "bools": [True, False],
    "complex": 1j,
    "name": "class",
    "names": ["a", "b"],
    "none": [None, None],
    "slice": slice(1),
}


@pytest.mark.parametrize(
    ("target", "classes"),
    [*((target, [3, 0]) for target in ONE_PER_IMAGE.values()), *((target, [3, 3]) for target in ONE_FOR_ALL.values())],
    ids=[*(f"each: {name}" for name in ONE_PER_IMAGE), *(f"all: {name}" for name in ONE_FOR_ALL)],
)
def test_forms_of_targets(target, classes):
    model, x = make(dtype=torch.float32), images(2, torch.float32)
    saliency = EigenSaliency(model)
    result = saliency.attribute_subsets(x, ["last:3"], target=target)
    assert result.targets.tolist() == classes
    alone = [saliency.attribute(x[i : i + 1], target=c, subset="last:3") for i, c in enumerate(classes)]
    assert distance(result.maps["last:3"], torch.cat(alone)) < 1e-4
    maps = result.maps["last:3"]
    plain = deletion_curve(model, x, maps, torch.tensor(classes), steps=2)
    assert torch.equal(deletion_curve(model, x, maps, target, steps=2).scores, plain.scores)
    assert torch.equal(smooth_maps(model, x, target), smooth_maps(model, x, torch.tensor(classes)))
    inserted = insertion_curve(model, x, maps, torch.tensor(classes), steps=2)
    assert torch.equal(insertion_curve(model, x, maps, target, steps=2).scores, inserted.scores)


@pytest.mark.parametrize("target", NOT_CLASSES.values(), ids=NOT_CLASSES)
def test_targets_that_are_not_classes(target):
    model, x = make(), images(2)
    for call in (
        lambda: EigenSaliency(model).attribute(x, target=target),
        lambda: EigenSaliency(model).gradient_func(model, (x,), target),
        lambda: smooth_maps(model, x, target),
        lambda: deletion_curve(model, x, x, target, steps=2),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument in ("target", "targets")


@pytest.mark.parametrize("target", [[(3,), (0,)], torch.tensor([[3], [0]]), [3, 0], (3,)], ids=str)
def test_forms_of_targets_inside_captum(target):
    """captum repeats the targets for its samples and steps, and passes them on."""
    model, x = make(dtype=torch.float32), images(2, torch.float32)
    classes = torch.as_tensor(target).flatten().expand(2)
    for wrap, options in ((NoiseTunnel, {"nt_samples": 2, "stdevs": 0.0}), (None, {"n_steps": 3})):
        method = wrap(EigenSaliency(model)) if wrap else IntegratedGradients(model)
        if wrap is None:
            method.gradient_func = EigenSaliency(model).gradient_func
        expected = method.attribute(x, target=classes, **options)
        torch.testing.assert_close(method.attribute(x, target=target, **options), expected)


@pytest.mark.parametrize(("head", "options"), [("mpncov", {}), ("logcov", {}), ("mpncov+seb", {"factor": "mlp-matrix"})])
def test_gaps(head, options):
    model, x = make(head, **options), images()
    reduced = model.head.reduce(model.forward_features(x)).flatten(2).detach()
    spectra = [np.linalg.eigvalsh(np.cov(item.numpy(), bias=True))[::-1] for item in reduced]
    actual = EigenSaliency(model).attribute_subsets(x, ["top:2", "all", "top:1+last:2"])
    assert (actual.gaps["all"] == float("inf")).all()
    for number, lam in enumerate(spectra):
        gap = {k: (lam[k - 1] - lam[k]) / lam[k - 1] for k in (1, 2, 3)}
        assert float(actual.gaps["top:2"][number]) == pytest.approx(gap[2], rel=1e-9)
        assert float(actual.gaps["top:1+last:2"][number]) == pytest.approx(min(gap[1], gap[3]), rel=1e-9)
    assert actual.gaps["all"].shape == (2,)
    assert (EigenSaliency(make("gap")).attribute_subsets(x, ["all"]).gaps["all"] == float("inf")).all()


# ---------------------------------------------------------------- nothing else changes


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in the backward pass")


def broken_forward(x):
    raise KeyError("in the forward pass")


def state(model, x):
    """The state of a model, an image and torch that attribution could change."""
    hooks = [
        len(getattr(module, name))
        for module in model.modules()
        for name in vars(module)
        if name.endswith("_hooks") and getattr(module, name) is not None
    ]
    head = model.head
    return (
        hooks,
        [(p.requires_grad, p.grad is None, p._version, p._backward_hooks) for p in model.parameters()],
        [(name, value._version) for name, value in model.named_buffers()],
        [module.training for module in model.modules()],
        (str(head.subset), head.cut, head.record_spectrum, id(head.last_spectrum)),
        (x.requires_grad, x.grad if x.grad is None else x.grad.sum().item(), x._version, x._backward_hooks, x.is_leaf),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("failure", [None, broken_forward, Broken.apply, "head"])
def test_the_model_is_restored(failure, rule):
    between = None if failure == "head" else failure
    model, x = make("mpncov+seb", between=between, subset="top:4", cut="projector"), images()
    model.classifier.weight.requires_grad_(False)
    x.requires_grad_()
    x.grad = torch.ones_like(x)
    model.head.record_spectrum, model.head.last_spectrum = True, (spectrum := object())
    before, values = state(model, x), [t.clone() for t in model.state_dict().values()]
    if failure is None:
        EigenSaliency(model, rule).attribute_subsets(x, SUBSETS)
    else:
        image = x.detach() * float("nan") if failure == "head" else x
        with pytest.raises(NonFiniteError if failure == "head" else KeyError):
            EigenSaliency(model, rule).attribute_subsets(image, SUBSETS)
    assert state(model, x) == before
    assert model.head.last_spectrum is spectrum
    assert all(torch.equal(old, new) for old, new in zip(values, model.state_dict().values(), strict=True))


def test_the_grad_mode_of_the_caller_does_not_matter():
    model, x = make(), images()
    expected = EigenSaliency(model, "deconv").attribute(x, subset="top:2")
    with torch.no_grad():
        assert torch.equal(EigenSaliency(model, "deconv").attribute(x, subset="top:2"), expected)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert torch.equal(EigenSaliency(model, "deconv").attribute(x, subset="top:2"), expected)
        inside = x + 0
    with torch.inference_mode():
        frozen = make()
    for net, image, argument in ((model, inside, "inputs"), (frozen, x, "model")):
        with pytest.raises(ArgumentError) as caught:
            EigenSaliency(net).attribute(image)
        assert caught.value.argument == argument


def test_training_mode_is_kept_and_warned_about_once():
    model, x = make().train(), images()
    with pytest.warns(UserWarning, match="training mode"):
        EigenSaliency(model).attribute(x, subset="top:2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = EigenSaliency(model).attribute_subsets(x, ["all", "top:2", "last:3"], target=0)
    assert model.training
    # batch statistics couple the images: maps are still the gradient of the summed score
    moved = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(moved)[:, 0].sum(), moved)
    assert distance(actual.maps["all"], expected) < 1e-10


def test_memory_is_flat():
    model, x = make("mpncov+seb", dtype=torch.float32), images(dtype=torch.float32)

    def living():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    def call(times):
        for _ in range(times):
            attribute_rules(model, x, ["all", "top:2", "last:3"], ["vanilla", "guided"])

    call(3)
    gc.collect()
    gc.disable()  # so that reference cycles are counted too
    try:
        before = living()
        call(10)
        assert living() == before
    finally:
        gc.enable()


def test_checkpointed_backbones():
    torch.manual_seed(0)
    model = create_model("test_resnet", head="mpncov", num_classes=3, reduce=4).eval()
    x = torch.randn(1, 3, 96, 96)
    expected = attribute_rules(model, x, ["all", "top:1", "last:3"], RULES, target=0)
    model.set_grad_checkpointing()
    actual = attribute_rules(model, x, ["all", "top:1", "last:3"], RULES, target=0)
    for rule in RULES:
        for subset in actual[rule].maps:
            assert distance(actual[rule].maps[subset], expected[rule].maps[subset]) < 1e-5


def test_memory_formats_and_half_precision():
    model, x = make(dtype=torch.float32), images(dtype=torch.float32)
    expected = EigenSaliency(model, "guided").attribute(x, target=1, subset="top:2")
    last = x.to(memory_format=torch.channels_last)
    assert distance(EigenSaliency(model, "guided").attribute(last, target=1, subset="top:2"), expected) < 1e-4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = EigenSaliency(model, "guided").attribute(x, target=1, subset="top:2")
    assert half.dtype == torch.float32
    assert distance(half, expected) < 0.3


# ---------------------------------------------------------------- captum around it


def test_inputs_as_tuples():
    model, x = make(), images()
    saliency = EigenSaliency(model, "deconv")
    expected = saliency.attribute(x, target=1)
    (actual,) = saliency.attribute((x,), target=1, additional_forward_args=())
    assert torch.equal(actual, expected)
    for argument, inputs, extra in (("inputs", (x, x), None), ("additional_forward_args", x, x)):
        with pytest.raises(ArgumentError) as caught:
            saliency.attribute(inputs, additional_forward_args=extra)
        assert caught.value.argument == argument


def test_noise_tunnel():
    model, x, samples, deviation = make(dtype=torch.float32), images(2, torch.float32), 3, 0.1
    target = torch.tensor([3, 0])
    saliency = EigenSaliency(model, "guided")
    torch.manual_seed(5)
    options = {"nt_samples": samples, "stdevs": deviation, "target": target, "subset": "last:3"}
    actual = NoiseTunnel(saliency).attribute(x, nt_type="smoothgrad", **options)
    torch.manual_seed(5)
    noisy = x.repeat_interleave(samples, 0) + torch.normal(0, torch.full((2 * samples, *x.shape[1:]), deviation))
    for number in range(2):
        maps = [
            saliency.attribute(image[None], target=int(target[number]), subset="last:3")
            for image in noisy[number * samples : (number + 1) * samples]
        ]
        assert distance(actual[number], torch.cat(maps).mean(0)) < 1e-4
    assert NoiseTunnel(saliency).attribute((x,), nt_type="vargrad", **options)[0].shape == x.shape
    assert NoiseTunnel(saliency).attribute(x, nt_samples=2, target="norm").shape == x.shape


def test_integrated_gradients_are_the_average_along_the_path():
    model, x, start, steps = make("mpncov+seb"), images(2), images(2, seed=8), 8
    target = torch.tensor([3, 0])
    method = IntegratedGradients(model)
    options = {"baselines": start, "target": target, "n_steps": steps, "method": "riemann_middle"}
    expected = method.attribute(x, **options)
    saliency = EigenSaliency(model)

    def average(subset):
        along = [start + (i + 0.5) / steps * (x - start) for i in range(steps)]
        return torch.stack([saliency.attribute(image, target=target, subset=subset) for image in along]).mean(0)

    assert distance((x - start) * average("all"), expected) < 1e-12
    method.gradient_func = saliency.gradient_func
    assert distance(method.attribute(x, **options), expected) < 1e-12
    method.gradient_func = saliency.gradient_function(subset="last:3")
    assert distance(method.attribute(x, **options), (x - start) * average("last:3")) < 1e-12
    # completeness: the attributions add up to the change of the score
    method.gradient_func = saliency.gradient_func
    total = method.attribute(x, baselines=start, target=target, n_steps=400, internal_batch_size=100).sum((1, 2, 3))
    rise = (model(x) - model(start)).detach().gather(1, target[:, None])[:, 0]
    assert torch.allclose(total, rise, rtol=0, atol=1e-2 * float(rise.abs().max()))


def test_captum_draws_the_maps():
    model, x = make(), images(1)
    actual = EigenSaliency(model).attribute(x, subset="last:3")[0].permute(1, 2, 0).numpy()
    image = x[0].sigmoid().permute(1, 2, 0).numpy()
    figure, _ = captum_pictures.visualize_image_attr(actual, image, "blended_heat_map", "all", use_pyplot=False)
    assert figure.axes


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"rules": ["vanilla", "plain"]}, UnknownName, None),
        ({"cut": "exakt"}, UnknownName, None),
        ({"subsets": "top:2"}, ArgumentError, "subsets"),
        ({"rules": []}, ArgumentError, "rules"),
        ({"subsets": ["large"]}, ValueError, None),
        ({"subsets": ["top:9"]}, ValueError, None),
        ({"inputs": images().byte()}, ArgumentError, "inputs"),
        ({"inputs": images()[0], "target": 0}, ValueError, None),
        ({"model": nn.Sequential(make())}, ArgumentError, "model"),
        ({"model": make(between=lambda x: x.detach()).requires_grad_(False)}, ArgumentError, "model"),
    ],
)
def test_arguments_that_do_not_fit(change, error, argument):
    arguments = {"model": make(), "inputs": images(), "subsets": ["all"], "rules": ["vanilla"]} | change
    with pytest.raises(error) as caught:
        attribute_rules(**arguments)
    if argument:
        assert caught.value.argument == argument


def test_the_constructor_checks_its_arguments():
    with pytest.raises(ArgumentError):
        EigenSaliency(nn.Sequential(make()))
    with pytest.raises(UnknownName) as caught:
        EigenSaliency(make(), "gided")
    assert caught.value.suggestions == ["guided"]


def test_heads_without_eigenvalues():
    x = images()
    for name in ("gap", "bcnn", "isqrt"):
        model = make(name)
        assert EigenSaliency(model, "deconv").attribute(x, target=0).shape == x.shape
        with pytest.raises(ArgumentError) as caught:
            EigenSaliency(model).attribute(x, subset="top:2")
        assert (caught.value.argument, caught.value.value) == ("subset", "top:2")


def test_networks_without_relus_have_the_plain_gradient_only():
    torch.manual_seed(0)
    x = torch.randn(1, 3, 64, 64)
    model = create_model("test_efficientnet", head="gap", num_classes=3).eval()
    assert EigenSaliency(model).attribute(x, target=0).abs().max() > 0
    for rules in (["deconv"], ["vanilla", "guided"]):
        with pytest.raises(ReLURuleError) as caught:
            attribute_rules(model, x, ["all"], rules)
        assert caught.value.value == rules[-1]
        assert "silu" in caught.value.calls
    linear = make("gap", reduce=None)
    linear.backbone.act = nn.Identity()
    with pytest.raises(ReLURuleError) as caught:
        EigenSaliency(linear, "deconv").attribute(images(), target=0)
    assert caught.value.calls == {}


def test_without_captum(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    monkeypatch.delitem(sys.modules, "eigengrain.explain.saliency")
    spec = importlib.util.find_spec("eigengrain.explain")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.RULES == RULES
    assert "EigenSaliency" in dir(fresh)
    with pytest.raises(MissingPackageError):
        fresh.EigenSaliency  # noqa: B018


def test_public_names():
    import eigengrain.explain as explain

    for name in explain.__all__:
        assert hasattr(explain, name)
    with pytest.raises(AttributeError):
        explain.nothing  # noqa: B018


def test_each_image_of_a_batch_leaves_out_its_own_largest_map():
    from eigengrain.explain.saliency import _Partition

    a = torch.randn(3, 2, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    factors = torch.tensor([[2.0, 1.0, 1.0], [1.0, 2.0, -1.0], [1.0, -1.0, 2.0]], dtype=F64)  # image × (whole, part, rest)
    names = ("all", "top:1", "last:1")
    gradients = {name: factors[:, k, None, None, None] * a for k, name in enumerate(names)}
    partition = _Partition(*names)
    sent = partition.reduce(gradients)
    for image, largest in enumerate(names):
        for gradient in sent.values():
            assert not torch.equal(gradient[image], gradients[largest][image])
    restored = partition.restore({name: 3 * gradient for name, gradient in sent.items()}, gradients)
    for name in names:
        torch.testing.assert_close(restored[name], 3 * gradients[name], rtol=1e-15, atol=0)


def test_batch_statistics_keep_the_maps_of_subsets_apart():
    """In training mode a pass with gradients of different subsets would mix them through the batch normalisation."""
    model, x = make(between=nn.BatchNorm2d(6).double()), 3 * images(6)
    model.train()
    subsets = ["all", "top:1", "last:4"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = EigenSaliency(model).attribute_subsets(x, subsets, target=1)
        for subset in subsets:
            alone = EigenSaliency(model).attribute(x, target=1, subset=subset)
            assert distance(together.maps[subset], alone) < 1e-10
