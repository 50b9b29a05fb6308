"""The benchmark of ranks: ranks by another method, and maps that are identical where the rank makes them so."""

import csv

import numpy as np
import pytest
import torch
from benchmarks.rank import RankBench, ranks

import eigengrain as eg
from benchmarks import rank
from eigengrain.cli.main import main as eigengrain_main
from eigengrain.errors import ArgumentError


@pytest.mark.parametrize(("side", "channels"), [(3, 16), (4, 16), (8, 16)])
def test_ranks_are_those_of_the_centred_features(side, channels):
    torch.manual_seed(0)
    options = {"dtype": "float64"}
    model = eg.create_model("test_resnet", "mpncov", num_classes=3, reduce=channels, head_options=options).eval()
    features = torch.randn(3, model.num_features, side, side)
    outcome = ranks(model, features)
    with torch.no_grad():
        features = model.head.reduce(features).flatten(2).double()
    centred = features - features.mean(-1, keepdim=True)
    expected = [np.linalg.matrix_rank(each.numpy(), tol=1e-9 * np.linalg.norm(each, 2)) for each in centred]
    assert outcome.tolist() == expected
    assert max(expected) <= min(side**2 - 1, channels)


def test_a_head_without_eigenvalues_is_refused():
    with pytest.raises(ArgumentError):
        ranks(eg.create_model("test_resnet", "gap", num_classes=3).eval(), torch.randn(1, 8, 4, 4))


@pytest.mark.filterwarnings("ignore::eigengrain.errors.ShortRankWarning")
def test_maps_of_the_large_eigenvalues_are_those_of_all_where_the_rank_is_low(tmp_path):
    words = "train --recipe plumage-demo --model.head mpncov --model.reduce 20 --epochs 1"
    words += " --workers 0 --device cpu --quiet"
    options = ["--data.options", "{per_class: 6}", "--out", str(tmp_path / "run")]
    assert eigengrain_main([*words.split(), *options]) == 0
    evaluate = ["evaluate", "--checkpoint", str(tmp_path / "run"), "--img_size", "32", "--device", "cpu", "--quiet"]
    assert eigengrain_main(evaluate) == 0
    config = {"count": 1000, "batch_size": 3, "cuts": ["exact"], "device": "cpu", "out": str(tmp_path / "rank.csv")}
    rank.run(RankBench([str(tmp_path / "run")], [32, 96], **config))
    with (tmp_path / "rank.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["img_size"], row["rule"], row["subset"]) for row in rows] == [
        (size, rule, subset) for size in ("32", "96") for rule in ("vanilla", "deconv") for subset in ("top:16", "last:4")
    ]
    images = int(rows[0]["images"])
    low, high = ([row for row in rows if row["img_size"] == size] for size in ("32", "96"))
    assert int(low[0]["positions"]) <= 16 < int(high[0]["rank_lowest"])
    assert int(low[0]["rank_highest"]) < int(low[0]["positions"])
    with (tmp_path / "run" / "evaluation.csv").open() as file:
        [score] = csv.DictReader(file)
    assert float(low[0]["top1"]) == pytest.approx(float(score["top1"]), abs=1e-3)
    large = [row for row in low if row["subset"] == "top:16"]
    assert all(int(row["identical_maps"]) == int(row["images"]) == images for row in large)
    assert all(float(row["mae"]) == 0 for row in large)
    assert all(int(row["identical_maps"]) == 0 for row in high)


def test_a_checkpoint_is_required():
    with pytest.raises(ArgumentError) as error:
        rank.run(RankBench(device="cpu"))
    assert error.value.argument == "checkpoint"
