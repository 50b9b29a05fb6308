"""The backward rules at ReLUs: by hand, against PyTorch's own gradient, against captum, and the errors."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from captum.attr import Deconvolution, GuidedBackprop
from torch import nn

from eigengrain import explain
from eigengrain.errors import ReLURuleError, UnknownName
from eigengrain.explain import RULES, ReLURules, attribute_rules
from eigengrain.heads import list_heads
from eigengrain.models import create_model


def discards_its_result(x):
    y = x + 0
    F.relu(y, inplace=True)
    return y


def of_a_view(x):
    y = x + 0
    y.view(-1).relu_()
    return y


# every way to write max(x, 0); in-place ones get a copy, as PyTorch would not let them overwrite a leaf
SPELLINGS = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": lambda x: nn.ReLU(inplace=True)(x + 0),
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x + 0, inplace=True),
    "F.relu in place by position": lambda x: F.relu(x + 0, True),
    "F.relu_": lambda x: F.relu_(x + 0),
    "torch.relu": torch.relu,
    "torch.relu by keyword": lambda x: torch.relu(input=x),
    "torch.relu_": lambda x: torch.relu_(x + 0),
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: (x + 0).relu_(),
    "aten": torch.ops.aten.relu,
    "aten overload": torch.ops.aten.relu.default,
    "result discarded": discards_its_result,
    "of a view": of_a_view,
    "nn.Threshold": nn.Threshold(0, 0),
    "F.threshold in place": lambda x: F.threshold(x + 0, 0.0, 0.0, inplace=True),
}
# max(x, 0) of maps, with a derivative of 1 at 0
CLAMPS = {
    "Tensor.clamp": lambda x: x.clamp(min=0),
    "torch.clamp": lambda x: torch.clamp(x, 0),
    "Tensor.clamp_min": lambda x: x.clamp_min(0.0),
    "torch.clip": lambda x: torch.clip(x, min=0),
    "Tensor.clamp_": lambda x: (x + 0).clamp_(min=0),
    "Tensor.clamp_min_": lambda x: (x + 0).clamp_min_(0),
}
# min(max(x, 0), 6)
CLIPPED = {
    "nn.ReLU6": nn.ReLU6(),
    "nn.ReLU6 in place": lambda x: nn.ReLU6(inplace=True)(x + 0),
    "F.relu6": F.relu6,
    "F.hardtanh": lambda x: F.hardtanh(x, 0.0, 6.0),
    "F.hardtanh_": lambda x: F.hardtanh_(x + 0, 0.0, 6.0),
}


def gradient(function, x, upstream, rule):
    x = x.clone().requires_grad_()
    with ReLURules(rule) as rules:
        y = function(x)
    assert rules.relus == 1
    assert not rules.others
    return y, torch.autograd.grad(y, x, upstream)[0]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_two_layers_by_hand(spelling):
    relu = SPELLINGS[spelling]
    first = torch.tensor([[1.0, -1.0], [1.0, 1.0], [2.0, -0.5]])
    second = torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with ReLURules() as rules:
        hidden = relu(first @ x)  # of (−1, 3, 1)
        out = relu(second @ hidden)  # of (2, −2)
    assert torch.equal(hidden, torch.tensor([0.0, 3.0, 1.0]))
    assert torch.equal(out, torch.tensor([2.0, 0.0]))
    assert rules.relus == 2
    # The gradient at the output is (2, 1).
    # vanilla: (2, 0) → (2, 2, −2) → (0, 2, −2). deconv: (2, 1) → (1, 1, −1) → (1, 1, 0).
    # guided: (2, 0) → (2, 2, −2) → (0, 2, 0).
    for rule, expected in {"vanilla": (-2.0, 3.0), "deconv": (2.0, 0.0), "guided": (2.0, 2.0)}.items():
        rules.rule = rule
        (result,) = torch.autograd.grad(out, x, torch.tensor([2.0, 1.0]), retain_graph=True)
        assert tuple(result.tolist()) == expected


@pytest.mark.parametrize("spelling", [*SPELLINGS, *CLAMPS, *CLIPPED])
def test_vanilla_is_the_gradient_of_pytorch(spelling):
    function = (SPELLINGS | CLAMPS | CLIPPED)[spelling]
    x = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 3.0, 6.0, 7.0, float("inf")]).view(1, 2, 2, 2)
    upstream = torch.randn(1, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    y, result = gradient(function, x, upstream, "vanilla")
    x.requires_grad_()
    expected = function(x)
    assert torch.equal(y, expected)
    assert torch.equal(result, torch.autograd.grad(expected, x, upstream)[0])


@pytest.mark.parametrize("spelling", [*SPELLINGS, *CLAMPS, *CLIPPED])
def test_masks(spelling):
    function = (SPELLINGS | CLAMPS | CLIPPED)[spelling]
    x = torch.tensor([-1.0, -1.0, 2.0, 2.0, 8.0, 8.0, -3.0, 3.0]).view(1, 2, 2, 2)
    upstream = torch.tensor([5.0, -5.0, 5.0, -5.0, 5.0, -5.0, 0.5, 0.5]).view(1, 2, 2, 2)
    plain = (x > 0) & ((x < 6) if spelling in CLIPPED else True)
    assert torch.equal(gradient(function, x, upstream, "deconv")[1], upstream.where(upstream > 0, torch.tensor(0.0)))
    guided = gradient(function, x, upstream, "guided")[1]
    assert torch.equal(guided, upstream.where((upstream > 0) & plain, torch.tensor(0.0)))


def test_an_input_that_is_overwritten_later():
    x = torch.tensor([-1.0, 2.0, 9.0], requires_grad=True)
    with ReLURules("guided"):
        y = F.relu6(x).div_(6.0)  # as in a hard sigmoid: the output of the ReLU is overwritten
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.tensor([0.0, 1 / 6, 0.0]))


def test_clamps_that_guard_are_not_relus():
    x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    image = torch.tensor([-1.0, 2.0]).view(1, 2, 1, 1).requires_grad_()
    with ReLURules("deconv") as rules:
        y = x.clamp_min(0) - x.clamp(0, 1) + image.clamp(min=1e-6).flatten(1) + image.clamp(-1, 1).flatten(1)
    assert (rules.relus, len(rules.others)) == (0, 0)
    assert torch.equal(torch.autograd.grad(-y.sum(), x)[0], torch.tensor([[0.0, -1.0]]))


def test_calls_without_gradient_are_not_intercepted():
    with ReLURules("deconv") as rules:
        F.relu(torch.ones(2))
        with torch.no_grad():
            F.relu(torch.ones(2, requires_grad=True))
    assert rules.relus == 0


OTHERS = {
    "gelu": F.gelu,
    "silu": lambda x: nn.SiLU(inplace=True)(x + 0),
    "hardswish": F.hardswish,
    "hardsigmoid": nn.Hardsigmoid(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: (x + 0).tanh_(),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "elu": lambda x: F.elu_(x + 0),
    "selu": F.selu,
    "celu": F.celu,
    "leaky_relu": nn.LeakyReLU(0.1, inplace=False),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
    "rrelu": F.rrelu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "log_sigmoid": F.logsigmoid,
    "glu": lambda x: F.glu(x, 1),
    "hardtanh": nn.Hardtanh(),
    "threshold": nn.Threshold(0.1, 20),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "clamp": lambda x: (x + 3).clamp(0, 6) / 6,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_counted(name):
    with ReLURules() as rules:
        OTHERS[name](torch.randn(1, 2, 3, 3, requires_grad=True))
    assert dict(rules.others) == {(name, ""): 1}


@pytest.mark.parametrize(
    "name", "swish mish quick_gelu hard_mish swish_me mish_me hard_sigmoid_me hard_swish_me hard_mish_me".split()
)
def test_other_functions_of_timm_are_detected(name):
    from timm.layers import activations, activations_me

    function = getattr(activations_me if name.endswith("_me") else activations, name)
    with ReLURules() as rules:
        y = function(torch.randn(1, 2, 3, 3, requires_grad=True))
    with pytest.raises(ReLURuleError) as caught:
        rules.require_relus("deconv", y)
    assert caught.value.calls


def relu_calls(model, x):
    """Number of calls of ReLU modules."""
    calls = []
    handles = [
        module.register_forward_hook(lambda *_: calls.append(1))
        for module in model.modules()
        if isinstance(module, nn.ReLU | nn.ReLU6)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return len(calls)


# number of ReLUs of the backbone, and whether captum, which supports nn.ReLU only, is an oracle for it
NETWORKS = {
    "tv:vgg11": (8, True),
    "resnet18": (17, True),
    "densenet121": (121, True),
    "tf_efficientnet_lite0": (33, False),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_real_networks_agree_with_captum(name):
    torch.manual_seed(0)
    expected, captum_supports = NETWORKS[name]
    model = create_model(name, head="mpncov", num_classes=3, reduce=3).eval()
    x = torch.randn(1, 3, 64, 64)
    with ReLURules(model=model) as rules:
        y = model(x.requires_grad_())
    assert rules.relus == expected + 1 == relu_calls(model, x)  # one is the head's
    assert not rules.others
    rules.require_relus("guided", y)  # nothing hidden in the graph either

    maps = {}
    for rule in RULES:
        rules.rule = rule
        (maps[rule],) = torch.autograd.grad(y[0, 1], x, retain_graph=True)
    for rule, peer in {"deconv": Deconvolution, "guided": GuidedBackprop}.items():
        assert (maps[rule] - maps["vanilla"]).norm() > 0.1 * maps[rule].norm() > 0
        if captum_supports:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = peer(model).attribute(x, target=1)
            assert (maps[rule] - theirs).norm() <= 1e-5 * theirs.norm()


# every kind of autograd Function of a head; some store an attribute `name` of their own
@pytest.mark.parametrize(
    "head, options",
    [
        *((head, {}) for head in list_heads(any_backbone=True) if head != "dropcov"),
        ("mpncov", {"normalise": "power"}),
        ("mpncov", {"gradient": "taylor"}),
        ("mpncov+seb", {"factor": "q"}),
    ],
)
def test_every_head_agrees_with_captum(head, options):
    torch.manual_seed(0)
    model = create_model("test_resnet", head=head, num_classes=3, reduce=8, head_options=options).eval()
    x = torch.randn(1, 3, 128, 128)
    results = attribute_rules(model, x, ["all"], ["deconv", "guided"], target=1)
    for rule, peer in {"deconv": Deconvolution, "guided": GuidedBackprop}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = peer(model).attribute(x, target=1)
        assert (results[rule].maps["all"] - theirs).norm() <= 1e-4 * theirs.norm()
    assert results["deconv"].maps["all"].any()


def test_the_softmax_of_a_gate_is_refused():
    model = create_model("test_resnet", head="dropcov", num_classes=3, reduce=8).eval()
    with pytest.raises(ReLURuleError) as caught:
        attribute_rules(model, torch.randn(1, 3, 64, 64), ["all"], ["deconv"], target=1)
    assert caught.value.calls == {"softmax": 1}


def test_compiled_parts_run_eagerly():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    x = torch.randn(1, 3, 6, 6, requires_grad=True)
    gradients = []
    for forward in (net, torch.compile(net, backend="aot_eager")):
        with ReLURules("deconv") as rules:
            y = forward(x)
        rules.require_relus("deconv", y)
        assert rules.relus == 1
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_parts_are_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), torch.jit.script(nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU())))
    for _ in range(3):  # the executor changes its graph after the first runs
        with ReLURules() as rules:
            y = net(torch.randn(1, 3, 6, 6, requires_grad=True))
        with pytest.raises(ReLURuleError) as caught:
            rules.require_relus("deconv", y)
        assert list(caught.value.calls.values()) == [1]
        rules.require_relus("vanilla", y)


def test_a_network_without_relus():
    with ReLURules() as rules:
        y = nn.Conv2d(3, 4, 3)(torch.randn(1, 3, 6, 6))
    with pytest.raises(ReLURuleError) as caught:
        rules.require_relus("guided", y)
    assert (caught.value.value, caught.value.calls) == ("guided", {})


def test_the_error_lists_functions_and_modules():
    class Gate(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    net = nn.Sequential(
        nn.Conv2d(3, 3, 1), *(nn.GELU() for _ in range(5)), nn.ModuleDict({"gate": Gate()})["gate"], nn.ReLU()
    )
    with ReLURules(model=net) as rules:
        y = net(torch.randn(1, 3, 4, 4, requires_grad=True))
        y = F.silu(y)  # not called by a module of the network
    with pytest.raises(ReLURuleError) as caught:
        rules.require_relus("deconv", y)
    assert caught.value.calls == {"gelu": 5, "sigmoid": 1, "silu": 1}
    assert str(caught.value) == (
        "rule is defined for ReLUs only, and the network calls gelu × 5 (1, 2, 3, 2 more), sigmoid × 1 (6), silu × 1, got "
        "'deconv': use 'vanilla', or a backbone with ReLUs such as 'resnet50' or 'vgg16'"
    )


def test_unknown_rule():
    with pytest.raises(UnknownName) as caught:
        ReLURules("guide")
    assert caught.value.suggestions == ["guided"]
    rules = ReLURules()
    with pytest.raises(UnknownName):
        rules.rule = "plain"
    assert rules.rule == "vanilla" == RULES[0]


def test_the_old_name_is_deprecated():
    with pytest.warns(DeprecationWarning, match="ReLURules"):
        assert explain.RectifierRules is ReLURules


def test_nothing_is_intercepted_after_the_context_also_after_an_error():
    for failing in (False, True):
        try:
            with ReLURules("deconv"):
                if failing:
                    raise KeyError
        except KeyError:
            pass
        x = torch.tensor([-1.0], requires_grad=True)
        assert torch.autograd.grad(F.relu(x), x)[0] == 0
        assert torch._C._len_torch_function_stack() == 0


def test_a_threshold_with_another_value_is_not_a_relu():
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    for threshold, value, relus in ((0.0, 0.0, 1), (0.0, 0.5, 0), (0.5, 0.0, 0)):
        with ReLURules("guided") as rules:
            F.threshold(x, threshold, value)
        assert (rules.relus, sum(rules.others.values())) == (relus, 1 - relus)
