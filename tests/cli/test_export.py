"""eigengrain export: the file it writes, the lines it prints, and every mistake a user can make."""

import subprocess
import sys

import onnxruntime
import pytest
import torch

from eigengrain.cli.export import Export, open_model, run
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
    assert first == f"{out}: ONNX, opset 18, {out.stat().st_size / 1e6:.1f} MB, input batch × 3 × 64 × 64"
    assert float(second.removeprefix("relative error against PyTorch: ")) < 1e-5

    session = onnxruntime.InferenceSession(out)
    assert session.get_modelmeta().custom_metadata_map["class_names"] == '["sparrow", "wren", "robin"]'
    (got,) = session.run(["logits"], {"image": images(2).numpy()})
    assert same_scores(model, torch.from_numpy(got), images(2))


def test_a_weights_file_becomes_a_program(model, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {"backbone": BACKBONE, "head": "isqrt", "num_classes": 3, "reduce": 6, "last_stride": 1}
    run(Export(weights, format="pt2", img_size=[SIZE, SIZE], verify=False, dynamic_batch=False, **named))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("birds.pt2: torch.export program, ")
    assert first.endswith(" MB, input 1 × 3 × 64 × 64")
    assert second == "relative error against PyTorch: not measured"
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
    assert open_model(Export(f"{folder}/model.safetensors")).class_names == ["sparrow", "wren", "robin"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"checkpoint": "nowhere"},
            r"no checkpoint 'nowhere': give a folder of .* or of save_pretrained, or a weights file$",
        ),
        ({"checkpoint": "EMPTY"}, r"is not a folder of save_pretrained: it has no config\.json$"),
        ({"checkpoint": "WEIGHTS"}, r"does not say its model: give --backbone, --head, --num_classes too"),
        ({"checkpoint": "WEIGHTS", "backbone": BACKBONE}, r"give --head, --num_classes too"),
        ({"head": "gap", "last_stride": 1}, r"^--head, --last_stride is for a weights file: the folder "),
        ({"format": "pt2", "out": "model.onnx"}, r"must be named \*\.pt2, got 'model\.onnx'"),
        ({"opset": 3}, r"opset must be from 18 to 25, got 3"),
        ({"img_size": [64]}, r"--img_size is one number or \[height,width\], got \[64\]"),
    ],
)
def test_mistakes(options, message, folder, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty"), "WEIGHTS": weights}
    options = {"checkpoint": folder, "img_size": SIZE, **options}
    options["checkpoint"] = places.get(options["checkpoint"], options["checkpoint"])
    with pytest.raises(ValueError, match=message) as caught:
        run(Export(**options))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_weights_that_do_not_fill_the_model(weights):
    options = {"backbone": BACKBONE, "head": "isqrt", "num_classes": 4, "reduce": 6, "last_stride": 1}
    with pytest.raises(ValueError, match=r"birds\.pth does not fill the model: classifier\..*; check --backbone, --head"):
        open_model(Export(weights, **options))


def test_a_head_that_cannot_leave(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(create_model(BACKBONE, head="gp", num_classes=3, reduce=6), "model")
    with pytest.raises(ValueError, match=r"^head 'gp' cannot be exported: .* Heads that can: bcnn, "):
        run(Export("model", img_size=SIZE))


def test_options_need_no_torch():
    code = "import sys; import eigengrain.cli.export; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
