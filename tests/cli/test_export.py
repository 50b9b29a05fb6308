"""eigengrain export: the files it writes, and the mistakes of users."""

import onnxruntime
import pytest
import torch

from eigengrain.cli.export import Export, run
from eigengrain.cli.predict import open_model
from eigengrain.errors import ArgumentError, FileError
from eigengrain.models import create_model, save_pretrained
from eigengrain.models.export import load_program, read_metadata

BACKBONE = "test_resnet"  # a ResNet of half a million parameters
SIZE = 64


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model(BACKBONE, head="isqrt", num_classes=3, reduce=6, last_stride=1).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "birds"
    save_pretrained(model, folder, class_names=["sparrow", "wren", "robin"])
    return str(folder)


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "birds.pth"
    torch.save(model.state_dict(), path)
    return str(path)


def images(batch):
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def same_scores(model, got, x):
    with torch.no_grad():
        expected = model(x)
    return float((got - expected).norm() / expected.norm()) < 1e-5


def test_a_folder_becomes_onnx(model, folder, tmp_path, capsys):
    out = tmp_path / "new" / "model.onnx"
    run(Export(folder, out=str(out), img_size=SIZE, opset=18))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(str(out))
    assert float(second.split()[-1]) < 1e-5
    session = onnxruntime.InferenceSession(out)
    assert session.get_modelmeta().custom_metadata_map["class_names"] == '["sparrow", "wren", "robin"]'
    (got,) = session.run(["logits"], {"image": images(2).numpy()})
    assert same_scores(model, torch.from_numpy(got), images(2))


def test_a_weights_file_becomes_a_program(model, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {"backbone": BACKBONE, "head": "isqrt", "num_classes": 3, "reduce": 6, "last_stride": 1}
    run(Export(weights, format="pt2", img_size=[SIZE, SIZE], verify=False, dynamic_batch=False, **named))
    assert capsys.readouterr().out.startswith("birds.pt2")
    assert same_scores(model, load_program("birds.pt2").module()(images(1)), images(1))
    assert "class_names" not in read_metadata("birds.pt2")


def test_weights_of_a_network_that_is_built_for_one_size(tmp_path, capsys):
    named = {"backbone": "vit_tiny_patch16_224", "head": "gap", "num_classes": 2, "reduce": None}
    model = create_model(**named, img_size=(32, 48)).eval()
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    out = tmp_path / "vit.pt2"
    run(Export(str(tmp_path / "vit.pth"), format="pt2", out=str(out), img_size=[32, 48], verify=False, **named))
    x = torch.randn(2, 3, 32, 48)
    assert same_scores(model, load_program(out).module()(x), x)


def test_where_the_file_goes(folder, weights):
    assert str(Export(folder).file) == "birds.onnx"
    assert str(Export(folder + "/", format="pt2").file) == "birds.pt2"
    assert str(Export(weights).file) == "birds.onnx"
    assert str(Export(folder, out="there/x.onnx").file) == "there/x.onnx"


def test_the_weights_of_a_folder_are_the_folder(folder):
    assert open_model(Export(f"{folder}/model.safetensors")).classes == ["sparrow", "wren", "robin"]


@pytest.mark.parametrize(
    ("options", "kind", "facts"),
    [
        ({"checkpoint": "nowhere"}, FileError, {"problem": "there is no such folder"}),
        ({"checkpoint": "EMPTY"}, FileError, {}),
        ({"checkpoint": "WEIGHTS"}, ArgumentError, {"argument": "backbone"}),
        ({"checkpoint": "WEIGHTS", "backbone": BACKBONE}, ArgumentError, {"argument": "head"}),
        ({"head": "gap", "last_stride": 1}, ArgumentError, {"argument": "head", "value": "gap"}),
        ({"format": "pt2", "out": "model.onnx"}, ValueError, {}),
        ({"opset": 3}, ValueError, {}),
        ({"img_size": [64]}, ArgumentError, {"argument": "img_size", "value": [64]}),
        ({"checkpoint": ""}, ArgumentError, {"argument": "checkpoint"}),
    ],
)
def test_mistakes(options, kind, facts, folder, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty"), "WEIGHTS": weights}
    options = {"checkpoint": folder, "img_size": SIZE, **options}
    options["checkpoint"] = places.get(options["checkpoint"], options["checkpoint"])
    with pytest.raises(kind) as error:
        run(Export(**options))
    assert {name: getattr(error.value, name) for name in facts} == facts
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_weights_that_do_not_fill_the_model(weights):
    options = {"backbone": BACKBONE, "head": "isqrt", "num_classes": 4, "reduce": 6, "last_stride": 1}
    with pytest.raises(FileError) as error:
        open_model(Export(weights, **options))
    assert str(error.value.path) == weights


def test_a_head_that_cannot_be_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(create_model(BACKBONE, head="gp", num_classes=3, reduce=6), "model")
    with pytest.raises(ValueError, match="'gp'"):
        run(Export("model", img_size=SIZE))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
