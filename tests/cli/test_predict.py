"""eigengrain predict: preprocessing, names and probabilities against a separate calculation, and the mistakes of users."""

import codecs
import copy
import csv
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain.cli import predict as module
from eigengrain.cli.export import Export
from eigengrain.cli.main import main
from eigengrain.cli.predict import Predict, Prediction, find_images, open_classifier, run, write_predictions
from eigengrain.data import decode
from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.models import create_model, save_pretrained
from eigengrain.models.calibration import encode_subspace, familiarity
from eigengrain.names import MAX_SIDE
from eigengrain.options import options_of
from eigengrain.training import TrainedModel, open_run

CLASSES = ["sparrow", "wren", "Zaunkönig", "=SUM(A1)"]
SIZE = 40
BACKBONE = "test_resnet"  # a ResNet of half a million parameters


def make_model(num_classes=4):
    """A small model whose statistics and classifier give different answers for different images."""
    torch.manual_seed(0)
    model = create_model(BACKBONE, head="mpncov", num_classes=num_classes, reduce=6, last_stride=1)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 64, 64))
        model.classifier.weight.mul_(30)
    model.pretrained_cfg |= {
        "input_size": (3, SIZE, SIZE),
        "crop_pct": 0.8,
        "interpolation": "bilinear",
        "mean": (0.1, 0.2, 0.3),
        "std": (0.5, 0.6, 0.7),
    }
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_pretrained(model, folder, class_names=CLASSES)
    return str(folder)


def photo(path, seed=0, size=(60, 50), mode="RGB", **options):
    """A blocky random picture, smooth enough for every format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).convert(mode)
    image.save(path, **options)
    return image


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a.png", "b.png", "deep/er/c.png")):
        photo(tmp_path / "photos" / name, seed)
    return tmp_path / "photos"


def rows(path="predictions.csv"):
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def reference(model, image, temperature=1):
    """Probabilities of one RGB image, prepared step by step: resize, crop the centre, scale, normalise."""
    short = int(SIZE / 0.8)
    width, height = image.size
    scale = short / min(width, height)
    image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
    pixels = np.asarray(image.crop((left, top, left + SIZE, top + SIZE)), dtype=np.float64) / 255
    pixels = (pixels - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    x = torch.tensor(pixels.transpose(2, 0, 1)[None], dtype=torch.float32)
    with torch.no_grad():
        return (model(x)[0].double() / temperature).softmax(0).tolist()


def test_the_size_of_images_has_the_limit_of_models():
    for config in (Predict, Export):
        [option] = [option for option in options_of(config) if option.name == "img_size"]
        assert option.facts["most"] == MAX_SIDE


def test_nothing_is_created_for_a_model_that_does_not_exist(photos, tmp_path):
    with pytest.raises(FileError) as error:
        run(Predict(["photos"], "missing", out="new/predictions.csv"))
    assert error.value.path == Path("missing")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_classes_and_probabilities_are_those_of_a_separate_calculation(model, checkpoint, photos):
    assert run(Predict(["photos"], checkpoint, topk=3)) == 0
    table = rows()
    assert [row["path"] for row in table] == ["photos/a.png", "photos/b.png", "photos/deep/er/c.png"]
    answers = set()
    for row in table:
        expected = reference(model, Image.open(row["path"]).convert("RGB"))
        order = sorted(range(4), key=lambda i: -expected[i])
        for rank in (1, 2, 3):
            assert row[f"class_{rank}"].removeprefix("'") == CLASSES[order[rank - 1]]
            assert float(row[f"probability_{rank}"]) == pytest.approx(expected[order[rank - 1]], abs=2e-5)
        assert row["problem"] == ""
        answers.add(row["probability_1"])
    assert list(table[0]) == [
        *("path", "answer", "class_1", "probability_1", "class_2", "probability_2", "class_3", "probability_3", "problem")
    ]
    assert len(answers) == 3  # the images are distinguished


def test_more_classes_than_the_model_has_and_worker_processes(checkpoint, photos, capsys):
    assert run(Predict(["photos"], checkpoint, topk=9, batch_size=1, workers=2, out="deep/other.csv")) == 0
    parallel = rows("deep/other.csv")
    assert "class_4" in parallel[0]
    assert "class_5" not in parallel[0]
    assert sum(float(parallel[0][f"probability_{k}"]) for k in (1, 2, 3, 4)) == pytest.approx(1, abs=1e-5)
    out = capsys.readouterr().out
    assert "deep/other.csv" in out
    assert "deep/er/c.png" in out
    run(Predict(["photos"], checkpoint, topk=9, workers=0))
    for one, other in zip(rows(), parallel, strict=True):
        assert one["path"] == other["path"]
        assert float(one["probability_1"]) == pytest.approx(float(other["probability_1"]), abs=2e-5)


def test_a_spreadsheet_runs_no_formula_from_a_name(checkpoint, photos):
    photo(photos.parent / "=1+1.png")
    run(Predict(["=1+1.png"], checkpoint, topk=4))
    (row,) = rows()
    assert os.path.samefile(row["path"], "=1+1.png")
    cells = list(row.values())
    assert "'=SUM(A1)" in cells
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
    assert Path("predictions.csv").read_bytes()[:3] == b"\xef\xbb\xbf"  # an umlaut: spreadsheets need the mark


def test_the_table_shows_the_first_images_and_names_with_brackets(checkpoint, photos, capsys, monkeypatch):
    monkeypatch.setattr(module, "SHOWN", 2)
    photo(photos / "[bold]a.png")
    run(Predict(["photos"], checkpoint))
    out = capsys.readouterr().out
    assert "[bold]a.png" in out
    assert "b.png" not in out


def test_the_table_of_relative_and_absolute_paths(checkpoint, photos, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    places = ["photos/a.png", str(photos / "b.png")]
    run(Predict(places, checkpoint))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if ".png" in line] == places


def test_img_size_is_the_size_that_the_model_sees(checkpoint, photos, monkeypatch):
    seen = []
    stack = module._stack
    monkeypatch.setattr(module, "_stack", lambda s: seen.append(tuple(s[0].shape)) or stack(s))
    run(Predict(["photos/a.png"], checkpoint, img_size=64))
    run(Predict(["photos/a.png"], checkpoint))
    assert seen == [(3, 64, 64), (3, SIZE, SIZE)]


# finding images


def test_files_folders_and_patterns_each_image_once(photos):
    (photos / "notes.txt").write_text("no image")
    photo(photos / ".hidden.png")
    photo(photos / "shouted.PNG")
    images, problems = find_images(["photos/b.png", "photos", "photos/**/*.png", "photos/b.png"])
    assert images == ["photos/b.png", "photos/a.png", "photos/shouted.PNG", "photos/deep/er/c.png"]
    assert problems == []
    assert find_images(["photos/*.txt"])[0] == ["photos/notes.txt"]  # a file that is named is tried


def test_a_file_whose_name_is_a_pattern_and_a_folder_that_is_linked_into_itself(photos):
    photo(photos / "[a].png")
    assert find_images(["photos/[a].png"])[0] == ["photos/[a].png"]
    (photos / "[a].png").unlink()
    (photos / "deep" / "round").symlink_to(photos)
    assert len(find_images(["photos"])[0]) == 3


@pytest.mark.parametrize(
    ("place", "near"), [("photos/aa.png", "'photos/a.png'"), ("photoss", "'photos'"), ("empty", ""), ("photos/*.jpg", "")]
)
def test_places_without_images(photos, checkpoint, place, near):
    (photos.parent / "empty").mkdir()
    images, [problem] = find_images([place])
    assert images == []
    assert problem.path == place
    assert near in problem.problem
    with pytest.raises(ArgumentError) as error:
        run(Predict([place], checkpoint))
    assert error.value.argument == "images"
    assert not os.path.exists("predictions.csv")


# images that cannot be read


def huge_png(path, width, height):
    """A PNG of a few bytes whose header claims many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + data)


class Explosive:
    """Unpickling this would create a file."""

    def __reduce__(self):
        return open, ("unpickled", "w")


@pytest.fixture
def damaged(photos):
    """Names of files that are named like images and cannot be read."""
    whole = (photos / "a.png").read_bytes()
    (photos / "cut.png").write_bytes(whole[: len(whole) // 2])
    (photos / "text.png").write_text("this is text")
    (photos / "empty.jpg").write_bytes(b"")
    (photos / "pickle.jpg").write_bytes(pickle.dumps(Explosive()))
    (photos / "drawing.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    (photos / "gone.png").symlink_to("nowhere.png")
    huge_png(photos / "huge.png", 50_000, 50_000)
    huge_png(photos / "narrow.png", 20_000, 1)
    Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(photos / "float.tif")
    return (
        *("cut.png", "text.png", "empty.jpg", "pickle.jpg", "drawing.jpg"),
        *("gone.png", "huge.png", "narrow.png", "float.tif"),
    )


def test_unreadable_images_are_listed_at_the_end_and_stop_nothing(checkpoint, photos, damaged, capsys):
    assert run(Predict(["photos", "nowhere"], checkpoint, batch_size=2, workers=0)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(damaged) + 2
    assert any(line.startswith("  nowhere: ") for line in lines)
    table = {os.path.basename(row["path"]): row for row in rows()}
    assert sum(row["class_1"] != "" for row in table.values()) == 3
    for name in damaged:
        assert sum(line.startswith(f"  photos/{name}: ") for line in lines) == 1, name
        assert table[name]["problem"]
        assert table[name]["class_1"] == ""
    assert not os.path.exists("unpickled")


def test_a_problem_is_one_line_whatever_the_file_is_called(checkpoint, photos, capsys):
    (photos / "two\nlines\x1b[31m.png").write_text("no image")
    assert run(Predict(["photos"], checkpoint)) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2
    assert "two\\nlines\\x1b[31m.png" in err


def test_paths_of_the_document_are_those_of_the_files(checkpoint, photos, capfd):
    """A script can open them, whatever characters they contain."""
    names = ["two\nlines.png", "3.04\u202fPM.png", os.fsdecode(b"latin \xe9.png")]
    for name in names:
        shutil.copy(photos / "a.png", photos / name)
    assert main(["predict", "photos", "--checkpoint", checkpoint, "--json"]) == 0
    paths = {row["path"] for row in json.loads(capfd.readouterr().out)["predictions"]}
    assert {f"photos/{name}" for name in names} <= paths
    assert all(os.path.exists(path) for path in paths)


def test_no_image_at_all_is_a_failure_that_leaves_the_last_result_alone(checkpoint, photos, damaged, capsys):
    (photos.parent / "predictions.csv").write_text("earlier")
    assert run(Predict(["photos/text.png", "photos/huge.png"], checkpoint)) == 1
    out, err = capsys.readouterr()
    assert out.strip() == ""
    assert len(err.splitlines()) == 3
    assert (photos.parent / "predictions.csv").read_text() == "earlier"


def test_what_was_done_before_an_interruption_is_kept(checkpoint, photos, monkeypatch):
    read, calls = decode.open_image, []

    def interrupted(path):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(path)

    monkeypatch.setattr(decode, "open_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Predict(["photos"], checkpoint, batch_size=1, workers=0))
    assert [row["path"] for row in rows()] == ["photos/a.png", "photos/b.png"]


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="needs the sender of a signal")
def test_workers_survive_a_signal_that_reaches_all_processes(checkpoint, photos):
    """A worker that dies before the command itself would end it with a traceback."""
    places, _ = find_images(["photos"])
    config = Predict(places * 4, checkpoint, batch_size=1, workers=2)
    before = set(multiprocessing.active_children())
    batches = module.classify(open_classifier(config), places * 4, config, torch.device("cpu"))
    workers = set(multiprocessing.active_children()) - before  # which have only just started
    subprocess.run(["kill", "-TERM", *(str(worker.pid) for worker in workers)], check=True)
    assert [prediction.path for batch in batches for prediction in batch] == places * 4


# opening checkpoints


def test_a_weights_file_with_names_of_its_model(checkpoint, photos):
    options = {"backbone": BACKBONE, "head": "mpncov", "num_classes": 4, "reduce": 6, "last_stride": 1}
    (photos / "names.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    file = os.path.join(checkpoint, "model.safetensors")
    trained = open_classifier(Predict(["x"], file, class_names=str(photos / "names.txt"), **options))
    assert trained.classes == CLASSES
    assert not trained.model.training
    assert open_classifier(Predict(["x"], file, **options)).classes == ["0", "1", "2", "3"]
    # without a backbone, the folder of the file describes the model
    assert open_classifier(Predict(["x"], file)).classes == CLASSES
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(trained.model(x), open_classifier(Predict(["x"], checkpoint)).model(x))


def test_images_of_another_size_for_a_network_that_is_built_for_one(tmp_path):
    vit = {"head": "gap", "num_classes": 2, "backbone": "test_vit"}
    torch.save(create_model(**vit).state_dict(), tmp_path / "vit.pt")
    trained = open_classifier(Predict(["x"], str(tmp_path / "vit.pt"), img_size=64, **vit))
    assert trained.model.config["img_size"] == (64, 64)


WEIGHTS = {"backbone": BACKBONE, "head": "mpncov", "reduce": 6}


@pytest.mark.parametrize(
    ("place", "options", "kind", "facts"),
    [
        ("nowhere", {}, FileError, {}),
        ("runss", {}, FileError, {}),
        ("runs", {}, FileError, {}),
        ("stranger", {}, ValueError, {}),
        ("runs/best", {"backbone": BACKBONE, "reduce": 6}, ArgumentError, {"argument": "backbone"}),
        ("runs/best", {"num_classes": 7}, ArgumentError, {"argument": "num_classes", "value": 7}),
        ("runs/best", {"class_names": "names.txt"}, ArgumentError, {"argument": "class_names"}),
        ("runs/best", {"class_names": "missing.txt"}, FileError, {"path": Path("missing.txt")}),
        ("weights.safetensors", {}, ArgumentError, {"argument": "backbone"}),
        ("weights.safetensors", {**WEIGHTS, "num_classes": 7}, FileError, {"path": Path("weights.safetensors")}),
        ("weights.safetensors", {**WEIGHTS, "num_classes": 4, "head": "gap"}, FileError, {}),
        ("weights.safetensors", {**WEIGHTS, "backbone": "resnet19", "num_classes": 4}, UnknownName, {"name": "resnet19"}),
        ("weights.safetensors", {**WEIGHTS, "head": "mpnco", "num_classes": 4}, UnknownName, {"name": "mpnco"}),
        ("trunk.pt", {**WEIGHTS, "num_classes": 4}, FileError, {}),
        ("text.safetensors", {**WEIGHTS, "num_classes": 4}, ValueError, {}),
        ("code.pt", {**WEIGHTS, "num_classes": 4}, ValueError, {}),
        ("notes.txt", {**WEIGHTS, "num_classes": 4}, ValueError, {}),
    ],
)
def test_checkpoints_that_cannot_be_used(model, checkpoint, tmp_path, monkeypatch, place, options, kind, facts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "best").symlink_to(checkpoint)
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "names.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "weights.safetensors").symlink_to(os.path.join(checkpoint, "model.safetensors"))
    (tmp_path / "text.safetensors").write_text("this is text")
    (tmp_path / "notes.txt").write_text("this is text")
    torch.save(model.backbone.state_dict(), tmp_path / "trunk.pt")
    torch.save({"state": Explosive()}, tmp_path / "code.pt")
    with pytest.raises(kind) as error:
        open_classifier(Predict(["x"], place, **options))
    assert {name: getattr(error.value, name) for name in facts} == facts
    assert "\n" not in str(error.value)
    assert not os.path.exists("unpickled")


def test_models_that_cannot_classify_photographs(tmp_path):
    save_pretrained(create_model(BACKBONE, head="gap", num_classes=0), tmp_path / "vector")
    with pytest.raises(ArgumentError) as error:
        open_classifier(Predict(["x"], str(tmp_path / "vector")))
    assert error.value.argument == "checkpoint"
    save_pretrained(create_model("test_vit", head="gap", num_classes=2), tmp_path / "vit")
    with pytest.raises(ArgumentError) as error:
        open_classifier(Predict(["x"], str(tmp_path / "vit"), img_size=64))
    assert error.value.argument == "img_size"


def test_a_model_for_grey_images(photos, tmp_path):
    save_pretrained(create_model(BACKBONE, head="gap", num_classes=2, in_chans=1), tmp_path / "grey")
    with pytest.raises(ValueError, match="channels"):
        run(Predict(["photos"], str(tmp_path / "grey")))


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (None, {"label_names": ["only one"]}),
        (None, {"label_names": 4}),
        (None, {"model": {}}),
        ("model", {"backbone": 7}),
        ("model", {"num_classes": 5}),
        ("pretrained_cfg", {"input_size": 224}),
        ("pretrained_cfg", {"mean": "grey"}),
        ("pretrained_cfg", {"std": [1, 1]}),
    ],
)
def test_a_config_that_was_edited(checkpoint, photos, tmp_path, section, values):
    config = json.loads(Path(checkpoint, "config.json").read_text())
    (config if section is None else config[section]).update(values)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(os.path.join(checkpoint, "model.safetensors"))
    assert main(["predict", "photos", "--checkpoint", str(tmp_path)]) == 2
    assert not os.path.exists("predictions.csv")


def test_images_that_are_too_small_for_the_network(photos, tmp_path):
    save_pretrained(create_model("tv:squeezenet1_1", head="gap", num_classes=2), tmp_path / "squeezenet")
    with pytest.raises(ArgumentError) as error:
        run(Predict(["photos"], str(tmp_path / "squeezenet"), img_size=2))
    assert (error.value.argument, error.value.value) == ("img_size", 2)


def test_a_model_that_diverged(model, photos, tmp_path):
    broken = make_model()
    torch.nn.init.constant_(broken.classifier.bias, float("nan"))
    save_pretrained(broken, tmp_path / "broken", class_names=CLASSES)
    with pytest.raises(FileError) as error:
        run(Predict(["photos"], str(tmp_path / "broken")))
    assert error.value.path == tmp_path / "broken"
    assert not os.path.exists("predictions.csv")


@pytest.mark.parametrize(
    ("option", "value"),
    [("topk", 0), ("batch_size", 0), ("workers", -1), ("img_size", 0), ("images", []), ("checkpoint", "")],
)
def test_invalid_options(option, value):
    with pytest.raises(ArgumentError) as error:
        Predict(**{"images": ["x"], "checkpoint": "y", option: value})
    assert error.value.argument == option


def test_files_that_cannot_be_written_and_devices_that_do_not_exist(checkpoint, photos):
    with pytest.raises(FileError) as error:
        run(Predict(["photos"], checkpoint, out="photos"))
    assert error.value.path == Path("photos")
    with pytest.raises(ArgumentError) as error:
        run(Predict(["photos"], checkpoint, device="gpu"))
    assert error.value.argument == "device"


@pytest.mark.parametrize("name", ["a.jpg", "Zaunkönig.jpg"])
def test_the_table_always_has_a_byte_order_mark(tmp_path, name):
    """Spreadsheets need it; readers that expect it only sometimes would fail."""
    write_predictions(tmp_path / "predictions.csv", [Prediction(name, [("wren", 0.5)])], 1)
    content = (tmp_path / "predictions.csv").read_bytes()
    assert content.startswith(codecs.BOM_UTF8)
    assert name in content.decode("utf-8-sig")


# --- doubts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def calibrated(model, photos, tmp_path):
    """The folder of a model with a temperature of 2 for which all photos but 'b.png' are familiar."""
    own = copy.deepcopy(model)
    prepare = TrainedModel(own).images([]).transform
    images = torch.stack([prepare(Image.open(photos / name)) for name in ("a.png", "b.png", "deep/er/c.png")])
    with torch.inference_mode():
        means = own.forward_features(images).mean((2, 3))
    subspace = torch.cat([means[[0]], torch.nn.functional.normalize(means[[2]] - means[[0]])])
    values = familiarity(means[..., None, None], subspace)
    torch.testing.assert_close(values[[0, 2]], torch.ones(2))
    own.calibration = {"temperature": 2.0, "familiarity_threshold": float(1 + values[1]) / 2, "accepted": 0.95}
    own.calibration |= {"subspace": encode_subspace(subspace), "familiarities": [-9.0] * 50 + [2.0] * 50}
    save_pretrained(own, tmp_path / "calibrated", class_names=CLASSES)
    return str(tmp_path / "calibrated")


def test_unfamiliar_images_are_none_of_these(model, calibrated):
    assert run(Predict(["photos"], calibrated, topk=2)) == 0
    first, second, third = rows()
    assert (first["answer"], second["answer"], third["answer"]) == (first["class_1"], "none of these", third["class_1"])
    for row in (first, second, third):  # with the temperature
        expected = max(reference(model, Image.open(row["path"]).convert("RGB"), temperature=2))
        assert float(row["probability_1"]) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("accept", "rejected"), [(1.0, 0), (0.99, 0), (0.1, 3), (0.95, 1)])
def test_accept_chooses_the_share_of_familiar_images(calibrated, accept, rejected):
    assert run(Predict(["photos"], calibrated, accept=accept)) == 0
    assert sum(row["answer"] == "none of these" for row in rows()) == rejected


def test_a_model_without_calibration_has_no_threshold(checkpoint, photos):
    with pytest.raises(ArgumentError) as error:
        run(Predict(["photos"], checkpoint, accept=0.9))
    assert error.value.argument == "accept"


def test_improbable_answers_are_unsure(checkpoint, photos, capsys):
    run(Predict(["photos"], checkpoint))
    shares = sorted(float(row["probability_1"]) for row in rows())
    limit = (shares[0] + shares[-1]) / 2
    capsys.readouterr()
    assert main(["predict", "photos", "--checkpoint", checkpoint, "--min_probability", str(limit), "--quiet"]) == 0
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    for row in rows():
        unsure = float(row["probability_1"]) < limit
        assert (row["answer"] == "unsure") == unsure == (lines[row["path"]] == "unsure")
        assert row["class_1"] != "unsure"
    assert 0 < sum(answer == "unsure" for answer in lines.values()) < len(lines)


def test_flip_averages_the_image_and_its_mirror_image(model, checkpoint, photos):
    run(Predict(["photos/a.png"], checkpoint, flip=True))
    [row] = rows()
    image = Image.open("photos/a.png").convert("RGB")
    views = [reference(model, image), reference(model, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))]
    expected = [(a + b) / 2 for a, b in zip(*views, strict=True)]
    assert float(row["probability_1"]) == pytest.approx(max(expected), abs=2e-5)
    assert max(expected) != pytest.approx(max(views[0]), abs=1e-4)


def test_an_onnx_file_gives_the_answers_of_predict(calibrated, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", calibrated, "--out", str(tmp_path / "model.onnx")]) == 0
    assert run(Predict(["photos"], calibrated, topk=4)) == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    values, prepare = session.get_modelmeta().custom_metadata_map, open_run(calibrated).images([]).transform
    assert float(values["temperature"]) == 2
    for row in rows():
        image = prepare(Image.open(row["path"]).convert("RGB"))[None].numpy()
        logits, p, familiar = session.run(["logits", "probabilities", "familiarity"], {"image": image})
        order = p[0].argsort()[::-1]
        assert [row[f"class_{k + 1}"].removeprefix("'") for k in range(4)] == [CLASSES[i] for i in order]
        assert [float(row[f"probability_{k + 1}"]) for k in range(4)] == pytest.approx(p[0][order].tolist(), abs=2e-5)
        assert (row["answer"] == "none of these") == (familiar[0] < float(values["familiarity_threshold"]))
        torch.testing.assert_close(torch.tensor(logits / 2).softmax(-1), torch.tensor(p), atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{"accept": 0.0}, {"accept": 1.1}, {"min_probability": 1.0}, {"min_probability": -0.1}])
def test_shares_out_of_range(options):
    with pytest.raises(ArgumentError) as error:
        Predict(["x"], "y", **options)
    assert error.value.argument in options
