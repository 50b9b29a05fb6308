"""The randomisation check: what it changes, what it leaves, and that it finds out maps of the image alone."""

from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import eigengrain as eg
from eigengrain.explain.randomise import cascade, randomisation_check, stages_of

SUBSETS, RULES = ("all", "last:2"), ("vanilla", "deconv")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = eg.create_model("test_resnet", head="mpncov", num_classes=5, reduce=6, last_stride=1)
    with torch.no_grad():
        for _ in range(20):  # statistics that fit, so that no channel is dead
            net(torch.randn(8, 3, 64, 64))
    return net.eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


TARGETS = torch.tensor([1, 4, 0])


def snapshot(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    "backbone, expected",
    [
        ("test_resnet", "classifier head layer4 layer3 layer2 layer1 conv1+bn1"),
        ("test_convnext", "classifier head stages.3 stages.2 stages.1 stages.0 stem"),
        ("test_vit", "classifier head blocks.5+norm blocks.4 blocks.3 blocks.2 blocks.1 blocks.0"),
        ("tv:alexnet", "classifier head features.10 features.8 features.6 features.3 features.0"),
    ],
)
def test_every_weight_is_in_one_stage(backbone, expected):
    net = eg.create_model(backbone, head="mpncov", num_classes=3, reduce=4)
    stages = stages_of(net)
    assert [stage.name for stage in stages][: len(expected.split())] == expected.split()
    assert sorted(name for stage in stages for name in stage.weights) == sorted(name for name, _ in net.named_parameters())


def test_a_head_without_weights_is_passed_over():
    net = eg.create_model("test_resnet", head="gap", num_classes=3)
    assert [stage.name for stage in stages_of(net)][:2] == ["classifier", "layer4"]


def test_the_cascade_shuffles_one_more_stage_each_time(model, images):
    trained = snapshot(model)
    weights = [stage.weights for stage in stages_of(model)]
    before = trained
    for done, (name, net) in enumerate(cascade(model, images), start=1):
        assert name == stages_of(model)[done - 1].name
        now = snapshot(net)
        for stage, names in enumerate(weights):
            for weight in names:
                same = torch.equal(now[weight], before[weight])
                constant = bool((trained[weight] == trained[weight].flatten()[0]).all())
                # changed in its own turn, neither before nor after; a constant has no other order
                assert same == (stage != done - 1 or constant), (name, weight)
                assert torch.equal(now[weight].flatten().sort().values, trained[weight].flatten().sort().values)
        before = now
    assert done == len(weights)


def test_statistics_are_refitted_where_weights_are_random_and_nowhere_else(model, images):
    trained = snapshot(model)
    net = next(net for name, net in cascade(model, images) if name == "layer3")
    now = snapshot(net)
    for key in trained:
        if key.endswith("running_mean"):
            randomised = key.startswith(("backbone.layer4", "backbone.layer3", "head"))
            assert torch.equal(now[key], trained[key]) != randomised, key
    # the running statistics are those of the layer's own input; this is the first random layer, so it is the very same one
    layer = net.backbone.layer3[0].bn1
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        net(images)
    handle.remove()
    assert torch.allclose(layer.running_mean, seen[0].mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(layer.running_var, seen[0].var((0, 2, 3)), rtol=1e-5)
    assert not any(module.training for module in net.modules())
    assert {m.momentum for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {0.1}


def test_the_model_is_unchanged(model, images):
    before = snapshot(model)
    randomisation_check(model, images, TARGETS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture(scope="module")
def checked(model, images):
    return randomisation_check(model, images, TARGETS, SUBSETS, RULES, seed=3)


def test_the_similarity_is_that_of_the_maps(model, images, checked):
    assert checked.stages == tuple(stage.name for stage in stages_of(model))
    assert checked.similarity.keys() == {(rule, subset) for rule in RULES for subset in SUBSETS}

    def maps(net, rule, subset):
        return eg.explain.EigenSaliency(net, rule).attribute(images, TARGETS, subset).abs().amax(1)

    for rule in RULES:
        for subset in SUBSETS:
            trained = maps(model, rule, subset)
            for row, (_, net) in enumerate(cascade(model, images, seed=3)):
                for i, found in enumerate(maps(net, rule, subset)):
                    expected = stats.spearmanr(trained[i].ravel(), found.ravel()).statistic
                    assert checked.similarity[rule, subset][row, i].item() == pytest.approx(expected, abs=1e-4)


def test_maps_of_the_network_are_lost_with_it(checked):
    for values in checked.similarity.values():
        assert values.shape == (len(checked.stages), 3)
        assert values[-1].abs().max() < 0.5
    # plain gradients: the classifier alone already changes what is explained
    assert checked.similarity["vanilla", "all"][0].max() < 0.95


def test_a_map_of_the_image_alone_is_found_out(model, images):
    def edges(net, images, subsets, rules, target, cut):
        return {rule: SimpleNamespace(maps=dict.fromkeys(subsets, images)) for rule in rules}

    found = randomisation_check(model, images, TARGETS, similarity="pearson", attribute=edges)
    assert torch.allclose(found.similarity["vanilla", "all"], torch.ones(len(found.stages), 3).double())


def test_the_seed_decides(model, images, checked):
    again = randomisation_check(model, images, TARGETS, ["all"], ["vanilla"], seed=3)
    other = randomisation_check(model, images, TARGETS, ["all"], ["vanilla"], seed=4)
    assert torch.allclose(again.similarity["vanilla", "all"], checked.similarity["vanilla", "all"], atol=1e-4)
    assert not torch.allclose(other.similarity["vanilla", "all"], checked.similarity["vanilla", "all"], atol=1e-2)


def test_refusals(model, images):
    with pytest.raises(ValueError, match="unknown similarity 'spearmen': did you mean 'spearman'"):
        randomisation_check(model, images, TARGETS, similarity="spearmen")
    with pytest.raises(ValueError, match="way to collapse"):
        randomisation_check(model, images, TARGETS, how="max")
