"""Deletion and insertion curves against a loop over single pixels, and the randomisation of weights."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import nn

import eigengrain as eg
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain.sanity import cascade, deletion_curve, insertion_curve, randomisation_check, stages_of

TARGETS = torch.tensor([4, 0, 2])
SUBSETS, RULES = ("all", "last:2"), ("vanilla", "deconv")

# deletion and insertion


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
    net[-1].weight.data.mul_(10)
    return net.double()


@pytest.fixture
def images():
    return torch.randn(3, 3, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def maps():
    return torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(2))


def slow_curve(model, start, end, scores, target, steps):
    """One image: its pixels as a list sorted by the map, changed one by one."""
    pixels = sorted(((scores[y, x].item(), y, x) for y in range(6) for x in range(7)), reverse=True)
    image, changed, curve = start.clone(), 0, []
    for j in range(steps + 1):
        while changed < round(j * 42 / steps):
            _, y, x = pixels[changed]
            image[:, y, x] = end[:, y, x]
            changed += 1
        with torch.no_grad():
            logits = model(image[None])[0].tolist()
        powers = [2.718281828459045**v for v in logits]
        curve.append(powers[target] / sum(powers))
    area = sum((a + b) / 2 / steps for a, b in pairwise(curve))
    return curve, area


@pytest.mark.parametrize("steps", [1, 5, 42])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_curves_by_a_loop(model, images, maps, steps, batch_size):
    baseline = images.mean((2, 3), keepdim=True).expand_as(images)
    for function, ends in ((deletion_curve, (images, baseline)), (insertion_curve, (baseline, images))):
        curve = function(model, images, maps, TARGETS, steps=steps, baseline="mean", batch_size=batch_size)
        assert curve.scores.shape == (3, steps + 1)
        assert torch.allclose(curve.shares, torch.arange(steps + 1).double() / steps, rtol=1e-14, atol=0)
        for i in range(3):
            expected, area = slow_curve(model, ends[0][i], ends[1][i], maps[i], TARGETS[i].item(), steps)
            assert torch.allclose(curve.scores[i], torch.tensor(expected).double(), rtol=0, atol=1e-6)
            assert curve.area[i].item() == pytest.approx(area, abs=1e-12)


def test_insertion_is_deletion_in_reverse(model, images, maps):
    out = deletion_curve(model, images, maps, TARGETS, steps=4)
    back = insertion_curve(model, images, -maps, TARGETS, steps=4)
    # deleting from the top and inserting from the bottom are the same path in opposite directions
    assert torch.allclose(out.scores, back.scores.flip(1), rtol=0, atol=1e-12)


def test_a_right_map_has_a_better_area():
    """For a model of three pixels, the map of these pixels has a small deletion area and a large insertion area."""
    spots = torch.zeros(8, 8, dtype=torch.bool)
    spots[2, 3] = spots[5, 1] = spots[6, 6] = True

    def model(x):
        inside = x[:, 0][:, spots].sum(1)
        return torch.stack([inside, torch.zeros_like(inside)], 1)

    images = torch.ones(1, 1, 8, 8) * 4
    right, wrong = spots[None].float(), (~spots)[None].float()
    options = {"steps": 16, "baseline": torch.zeros(())}
    assert deletion_curve(model, images, right, 0, **options).area < 0.55
    assert deletion_curve(model, images, wrong, 0, **options).area > 0.95
    assert insertion_curve(model, images, right, 0, **options).area > 0.95
    assert insertion_curve(model, images, wrong, 0, **options).area < 0.55


def test_signed_gradients_are_ranked_by_their_largest_colour(model, images):
    gradients = torch.randn(3, 3, 6, 7, generator=torch.Generator().manual_seed(3))
    whole = deletion_curve(model, images, gradients, TARGETS, steps=6)
    assert torch.equal(whole.scores, deletion_curve(model, images, gradients.abs().amax(1), TARGETS, steps=6).scores)
    assert not torch.equal(whole.scores, deletion_curve(model, images, gradients.sum(1), TARGETS, steps=6).scores)


def test_equal_pixels_are_not_deleted_from_top_to_bottom():
    """Pixels of equal value are deleted in a random order that is the same for every image."""
    seen = []

    def model(x):
        seen.append((x[:, 0] == 0).float())
        return torch.zeros(len(x), 2)

    maps = torch.zeros(2, 10, 10)
    maps[:, 9, 9] = 1
    deletion_curve(model, torch.ones(2, 1, 10, 10), maps, 0, steps=4, baseline=torch.zeros(()))
    gone = torch.cat(seen).view(2, 5, 10, 10)
    assert torch.equal(gone[0], gone[1])
    assert gone[0].sum((1, 2)).tolist() == [0, 25, 50, 75, 100]
    assert gone[0, 1, 9, 9] == 1
    assert 0.2 < gone[0, 2, :5].mean() < 0.8


def test_a_constant_map_gives_no_order(model, images, maps):
    maps = maps.clone()
    maps[1] = 0
    maps[2, 0, 0] = float("nan")
    for function in (deletion_curve, insertion_curve):
        assert function(model, images, maps, TARGETS, steps=3).area.isnan().tolist() == [False, True, True]


def test_baselines(model, maps):
    images = torch.randn(3, 3, 6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images += torch.arange(3.0).view(3, 1, 1, 1)
    last = {}
    for name in ("blur", "mean"):
        seen = []
        deletion_curve(lambda x, seen=seen: seen.append(x) or model(x), images, maps, TARGETS, steps=1, baseline=name)
        last[name] = torch.cat(seen)[1::2]
    colour = images.mean((2, 3), keepdim=True)
    assert torch.allclose(last["mean"], colour.expand_as(images))
    # a blurred image varies less than the image and more than its mean colour
    spread = [(x - x.mean((2, 3), keepdim=True)).pow(2).mean().item() for x in (last["blur"], images)]
    assert 0 < spread[0] < spread[1]
    with pytest.raises(UnknownName) as unknown:
        deletion_curve(model, images, maps, TARGETS, baseline="blurr")
    assert unknown.value.suggestions == ["blur"]
    with pytest.raises(ArgumentError) as wrong:
        deletion_curve(model, images, maps, TARGETS, baseline=torch.zeros(5, 5))
    assert (wrong.value.argument, wrong.value.value) == ("baseline", (5, 5))


def test_curves_do_not_change_the_model(model, images, maps):
    model.train()
    images.requires_grad_()
    curve = deletion_curve(model, images, maps, TARGETS, steps=2)
    assert model.training
    assert images.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert not curve.scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_targets_of_any_integer_dtype(model, images, maps, dtype):
    expected = deletion_curve(model, images, maps, TARGETS, steps=2)
    assert torch.equal(deletion_curve(model, images, maps, TARGETS.to(dtype), steps=2).scores, expected.scores)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("targets", lambda given: torch.tensor([0, 1])),
        ("targets", lambda given: torch.tensor([0.0, 1, 2])),
        ("targets", lambda given: True),
        ("targets", lambda given: 5),
        ("targets", lambda given: torch.tensor([-1, 1, 2])),
        ("maps", lambda given: given["maps"][..., :5]),
        ("images", lambda given: given["images"][0]),
        ("steps", lambda given: 0),
        ("steps", lambda given: 43),
        ("batch_size", lambda given: 0),
    ],
)
def test_arguments_that_do_not_fit(model, images, maps, argument, change):
    arguments = {"model": model, "images": images, "maps": maps, "targets": TARGETS}
    with pytest.raises(ArgumentError) as caught:
        deletion_curve(**arguments | {argument: change(arguments)})
    assert caught.value.argument == argument


# randomised weights


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net = eg.create_model("test_resnet", head="mpncov", num_classes=5, reduce=6, last_stride=1)
    with torch.no_grad():
        for _ in range(20):  # running statistics of the data, so that no channel is dead
            net(torch.randn(8, 3, 64, 64))
    return net.eval()


@pytest.fixture(scope="module")
def noise():
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


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


def test_a_head_without_weights_is_skipped():
    net = eg.create_model("test_resnet", head="gap", num_classes=3)
    assert [stage.name for stage in stages_of(net)][:2] == ["classifier", "layer4"]


def test_the_cascade_shuffles_one_more_stage_each_time(network, noise):
    trained = snapshot(network)
    weights = [stage.weights for stage in stages_of(network)]
    before = trained
    for done, (name, net) in enumerate(cascade(network, noise), start=1):
        assert name == stages_of(network)[done - 1].name
        now = snapshot(net)
        for stage, names in enumerate(weights):
            for weight in names:
                same = torch.equal(now[weight], before[weight])
                constant = bool((trained[weight] == trained[weight].flatten()[0]).all())
                # changed exactly once, in its own stage; a constant weight has no other order
                assert same == (stage != done - 1 or constant), (name, weight)
                assert torch.equal(now[weight].flatten().sort().values, trained[weight].flatten().sort().values)
        before = now
    assert done == len(weights)


def test_statistics_are_refitted_where_weights_are_random_and_nowhere_else(network, noise):
    trained = snapshot(network)
    net = next(net for name, net in cascade(network, noise) if name == "layer3")
    now = snapshot(net)
    for key in trained:
        if key.endswith("running_mean"):
            randomised = key.startswith(("backbone.layer4", "backbone.layer3", "head"))
            assert torch.equal(now[key], trained[key]) != randomised, key
    # the running statistics are those of the layer's own input
    layer = net.backbone.layer3[0].bn1
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        net(noise)
    handle.remove()
    assert torch.allclose(layer.running_mean, seen[0].mean((0, 2, 3)), rtol=0, atol=1e-6)
    assert torch.allclose(layer.running_var, seen[0].var((0, 2, 3)), rtol=1e-5, atol=0)
    assert not any(module.training for module in net.modules())
    assert {m.momentum for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {0.1}


def test_the_model_is_unchanged(network, noise):
    before = snapshot(network)
    randomisation_check(network, noise, TARGETS)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module.training for module in network.modules())
    assert all(p.grad is None for p in network.parameters())


@pytest.fixture(scope="module")
def checked(network, noise):
    return randomisation_check(network, noise, TARGETS, SUBSETS, RULES, seed=3)


def test_the_similarity_is_that_of_the_maps(network, noise, checked):
    assert checked.stages == tuple(stage.name for stage in stages_of(network))
    assert checked.similarity.keys() == {(rule, subset) for rule in RULES for subset in SUBSETS}

    def maps(net, rule, subset):
        return eg.explain.EigenSaliency(net, rule).attribute(noise, TARGETS, subset).abs().amax(1)

    trained = {key: maps(network, *key) for key in checked.similarity}
    for row, (_, net) in enumerate(cascade(network, noise, seed=3)):
        for key, before in trained.items():
            for i, random_map in enumerate(maps(net, *key)):
                expected = stats.spearmanr(before[i].ravel(), random_map.ravel()).statistic
                assert checked.similarity[key][row, i].item() == pytest.approx(expected, abs=1e-12)


def test_maps_change_with_the_weights(checked):
    for values in checked.similarity.values():
        assert values.shape == (len(checked.stages), 3)
        assert values[-1].abs().max() < 0.5
    # plain gradients: the classifier alone already changes what is explained
    assert checked.similarity["vanilla", "all"][0].max() < 0.95


def test_a_map_that_ignores_the_network_stays_similar(network, noise):
    def edges(net, images, subsets, rules, target, cut):
        return {rule: SimpleNamespace(maps=dict.fromkeys(subsets, images)) for rule in rules}

    check = randomisation_check(network, noise, TARGETS, similarity="pearson", attribute=edges)
    assert torch.allclose(check.similarity["vanilla", "all"], torch.ones(len(check.stages), 3).double(), rtol=0, atol=1e-12)


def test_the_seed_determines_the_result(network, noise, checked):
    again = randomisation_check(network, noise, TARGETS, ["all"], ["vanilla"], seed=3)
    other = randomisation_check(network, noise, TARGETS, ["all"], ["vanilla"], seed=4)
    assert torch.allclose(again.similarity["vanilla", "all"], checked.similarity["vanilla", "all"], rtol=0, atol=1e-4)
    assert not torch.allclose(other.similarity["vanilla", "all"], checked.similarity["vanilla", "all"], atol=1e-2)


def test_unknown_names(network, noise):
    for options in ({"similarity": "spearmen"}, {"how": "max"}):
        with pytest.raises(UnknownName):
            randomisation_check(network, noise, TARGETS, **options)
