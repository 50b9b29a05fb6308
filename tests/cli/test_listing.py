"""eigengrain models and eigengrain heads: sizes against published ones, tables and JSON."""

import json

import pytest
import torch

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain import names, output
from eigengrain.cli import listing
from eigengrain.cli.listing import Heads, Models, backbone_sizes, head_sizes, run_heads, run_models
from eigengrain.errors import UnknownName
from eigengrain.heads import Head, create_head, list_heads, register_head
from eigengrain.heads.registry import _FACTORIES
from eigengrain.models import create_model, list_backbones
from eigengrain.models.create import create_backbone

# patches of 16 × 16 pixels, positions, class token, six blocks 64 wide (norms, attention, MLP three times as wide), norm
VIT_PARAMETERS = (
    (3 * 16 * 16 + 1) * 64 + (10 * 10 + 1) * 64 + 64 + 6 * (4 * 64 + 65 * 3 * 64 + 65 * 64 + 65 * 192 + 193 * 64) + 2 * 64
)


@pytest.fixture
def wide(monkeypatch):
    """A terminal that breaks no line."""
    monkeypatch.setenv("COLUMNS", "200")


def printed_json(capsys):
    out, _ = capsys.readouterr()
    return json.loads(out)


@pytest.mark.parametrize(
    ("name", "channels", "image", "size", "larger", "parameters"),
    [
        ("tv:alexnet", 256, 224, (6, 6), (13, 13), 2_469_696),
        ("resnet18", 512, 224, (7, 7), (14, 14), 11_689_512 - 513 * 1000),
        ("test_vit", 64, 160, (10, 10), None, VIT_PARAMETERS),  # built for one size, and without strides
        ("tf_efficientnet_lite0", 1280, 224, (7, 7), (14, 14), 4_652_008 - 1281 * 1000),
        ("halonet26t", 2048, 256, (8, 8), None, 12_480_288 - 2049 * 1000),  # its blocks of attention do not divide 224
    ],
)
def test_sizes_of_backbones(name, channels, image, size, larger, parameters):
    measured = backbone_sizes(name)
    assert (measured.channels, measured.image, measured.map, measured.map_last_stride_1) == (channels, image, size, larger)
    assert measured.parameters == parameters


def test_measured_sizes_are_those_of_a_real_pass():
    measured = backbone_sizes("test_resnet")
    for last_stride, size in ((None, measured.map), (1, measured.map_last_stride_1)):
        model = create_model("test_resnet", head="gap", num_classes=2, last_stride=last_stride).eval()
        features = model.forward_features(torch.zeros(1, 3, 224, 224))
        assert features.shape == (1, measured.channels, *size)
    assert measured.parameters == sum(p.numel() for p in model.backbone.parameters())


def test_a_network_that_reads_tensors_while_it_is_built(monkeypatch):
    expected = backbone_sizes("test_resnet")

    def reads_numbers(name):
        torch.linspace(0, 1, 3).tolist()  # as timm before 1.0.30 does for rates of stochastic depth
        return create_backbone(name)

    monkeypatch.setattr("eigengrain.models.create.create_backbone", reads_numbers)
    assert backbone_sizes("test_resnet") == expected


def test_without_a_pattern_the_backbones_of_the_paper_are_measured(monkeypatch, capsys, wide):
    assert len(set(names.BACKBONES)) == len(names.BACKBONES) == 17
    monkeypatch.setattr(names, "BACKBONES", ("tv:alexnet", "test_vit"))
    run_models(Models())
    alexnet, vit = [
        line.split() for line in capsys.readouterr().out.splitlines() if "tv:alexnet" in line or "test_vit" in line
    ]
    assert alexnet == ["tv:alexnet", "256", *"6 × 6".split(), *"13 × 13".split(), "2.5"]
    assert vit == ["test_vit", "64", *"10 × 10 at 160".split(), "–", "0.3"]


def test_models_as_json(capsys):
    with output.mode(json=True):
        run_models(Models("tv:alexnet"))
    assert printed_json(capsys) == [
        {
            "name": "tv:alexnet",
            "channels": 256,
            "image": 224,
            "map": [6, 6],
            "map_last_stride_1": [13, 13],
            "parameters": 2_469_696,
        }
    ]


def test_many_matches_are_listed_without_sizes(capsys, wide):
    run_models(Models("resnet*"))
    expected = [name for name in list_backbones() if name.startswith("resnet")]
    out = capsys.readouterr().out
    assert len(expected) > listing.MEASURED_UP_TO
    assert set(out.split()) >= set(expected)
    assert "channels" not in out
    with output.mode(json=True):
        run_models(Models("resnet*"))
    assert printed_json(capsys) == [{"name": name} for name in expected]


def test_a_network_without_a_feature_map(monkeypatch, capsys, wide):
    chosen = ("crossvit_9_240", "tv:alexnet")
    monkeypatch.setattr(names, "BACKBONES", chosen)
    run_models(Models())
    out = capsys.readouterr().out
    assert "6 × 6" in out
    assert "'crossvit_9_240'" in out
    with output.mode(json=True):
        run_models(Models())
    rows = printed_json(capsys)
    assert [row["name"] for row in rows] == list(chosen)
    assert ["problem" in row for row in rows] == [True, False]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("resnet5O", "resnet50"), ("*desnet169*", "densenet169"), ("tv:alexnt", "tv:alexnet"), ("§§", None)],
)
def test_unknown_backbones_get_close_matches(pattern, near):
    with pytest.raises(UnknownName) as error:
        run_models(Models(pattern))
    assert near in error.value.suggestions if near else error.value.suggestions == []
    assert len(str(error.value)) < 400  # a thousand names are not printed


# heads


@pytest.mark.parametrize(
    ("name", "shorter", "longer", "parameters", "quadratic"),
    [
        ("gap", 256, 512, 0, False),
        ("bcnn", 256**2, 512**2, 0, True),
        ("mpncov+seb", 256 * 257 // 2, 512 * 513 // 2, 0, True),
        ("cbp", 8192, 8192, 0, False),
        ("lrbp", 100 * 101 // 2, 100 * 101 // 2, 256 * 100, False),
    ],
)
def test_sizes_of_heads(name, shorter, longer, parameters, quadratic):
    measured = head_sizes(name)
    assert (measured.vector_256, measured.vector_512, measured.parameters) == (shorter, longer, parameters)
    assert measured.reduces_wide_maps is quadratic


def test_every_head_has_its_own_description():
    descriptions = [head_sizes(name).description for name in list_heads()]
    assert len(set(descriptions)) == len(descriptions)
    for description in descriptions:
        assert 10 < len(description) < 120
        assert not set(description) & set("`\\\n")


def test_table_of_heads(capsys, wide):
    run_heads(Heads())
    lines = capsys.readouterr().out.splitlines()
    for name in list_heads():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.split()[-4:-2] == [str(head_sizes(name).vector_256), str(head_sizes(name).vector_512)]
        assert line.split()[-1] == ("yes" if create_head(name, 8).quadratic else "no")


def test_heads_by_pattern_as_json(capsys):
    for pattern, expected in (
        ("*+seb", [name for name in list_heads() if name.endswith("+seb")]),
        ("mpncov", ["mpncov"]),
        ("qrt", ["isqrt", "isqrt+seb"]),
    ):
        with output.mode(json=True):
            run_heads(Heads(pattern))
        rows = printed_json(capsys)
        assert [row["name"] for row in rows] == expected
    assert rows[0] == {
        "name": "isqrt",
        "description": create_head("isqrt", 8).summary,
        "vector_256": 32896,
        "vector_512": 131328,
        "parameters": 0,
        "reduces_wide_maps": True,
    }


def test_a_registered_head_is_listed(capsys, wide):
    @register_head("of-a-test[x]")
    class FirstPosition(Head):
        """The features at the first position. They are C numbers."""

        quadratic = False

        def __init__(self, in_channels, reduce=None):
            super().__init__(in_channels, reduce)
            self.out_features = self.channels

    try:
        run_heads(Heads("of-a-*"))
    finally:
        del _FACTORIES["of-a-test[x]"]
    out = capsys.readouterr().out
    assert "of-a-test[x]" in out
    assert FirstPosition(4).summary in out


def test_unknown_heads_get_close_matches():
    with pytest.raises(UnknownName) as error:
        run_heads(Heads("mpncv"))
    assert "mpncov" in error.value.suggestions
