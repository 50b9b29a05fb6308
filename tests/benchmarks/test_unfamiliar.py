"""The benchmark of unfamiliar images: scores by their definition, and one row per score."""

import csv

import pytest
import torch
from benchmarks.unfamiliar import UnfamiliarBench, score, textures

import eigengrain as eg
from benchmarks import unfamiliar
from eigengrain.cli.main import main as eigengrain_main
from eigengrain.errors import ArgumentError


def test_textures_are_the_same_for_a_seed():
    first, again, other = (dict(textures(16, 2, seed)) for seed in (0, 0, 1))
    assert len(first) == 5
    for kind, images in first.items():
        assert [image.size for image in images] == [(16, 16)] * 2
        assert [image.tobytes() for image in images] == [image.tobytes() for image in again[kind]]
        assert [image.tobytes() for image in images] != [image.tobytes() for image in other[kind]]


def test_scores():
    torch.manual_seed(0)
    model = eg.create_model("test_resnet", head="gap", num_classes=3).eval()
    images = list(torch.randn(5, 3, 64, 64))
    scores = score(model, images, batch=2)
    with torch.inference_mode():
        features = model.forward_features(torch.stack(images))
        logits = model(torch.stack(images)).double()
        left = []
        for each in features.flatten(2):
            U, s, Vh = torch.linalg.svd(each, full_matrices=False)
            s[0] = 0
            left.append((U * s) @ Vh)
        energy = model.forward_head(torch.stack(left).view_as(features)).double().logsumexp(-1)
    assert scores["energy"] == pytest.approx(logits.logsumexp(-1), rel=1e-5)
    assert scores["max probability"] == pytest.approx(logits.softmax(-1).amax(-1), rel=1e-5)
    assert scores["means"] == pytest.approx(features.mean((2, 3)), rel=1e-4, abs=1e-6)
    assert scores["rankfeat"] == pytest.approx(energy, rel=1e-4)


def test_one_row_per_score(tmp_path):
    words = "train --recipe plumage-demo --model.backbone test_resnet --model.head gap --data.val_fraction 0.2 --epochs 1"
    words += " --workers 0 --device cpu --quiet"
    options = ["--data.options", "{per_class: 6}", "--out", str(tmp_path / "run")]
    assert eigengrain_main([*words.split(), *options]) == 0
    unfamiliar.run(UnfamiliarBench([str(tmp_path / "run")], count=3, device="cpu", out=str(tmp_path / "b.csv")))
    with (tmp_path / "b.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["score"] for row in rows] == ["energy", "rankfeat", "max probability", "familiarity"]
    for row in rows:
        rejected = [float(row[kind]) for kind, _ in textures(8, 1, 0)]
        assert float(row["mean_rejected"]) == pytest.approx(sum(rejected) / 5, abs=1e-4)
        assert all(0 <= share <= 1 for share in rejected)


def test_a_checkpoint_is_required():
    with pytest.raises(ArgumentError) as error:
        unfamiliar.run(UnfamiliarBench(device="cpu"))
    assert error.value.argument == "checkpoint"
