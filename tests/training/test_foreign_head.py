"""A spectral head that a user registers in a file of their own gets telemetry, subsets and everything else."""

import csv
import importlib.util

import numpy as np
import pytest
import torch

from eigengrain.cli.main import main
from eigengrain.data import make_loader
from eigengrain.explorer.session import Session
from eigengrain.heads import registry
from eigengrain.training import evaluate, open_run, train
from eigengrain.training.config import from_mapping
from eigengrain.training.telemetry import read_summary
from training.small_run import PLUMAGE

FILE = '''
import torch

from eigengrain.functional import covariance, eigh, matrix_power, triu_vector
from eigengrain.heads import SpectralHead, register_head


@register_head("fourth-root")
class FourthRoot(SpectralHead):
    """Fourth root of the covariance."""

    def __init__(self, in_channels, reduce=None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels * (self.channels + 1) // 2

    def pool(self, x):
        return triu_vector(matrix_power(covariance(x, dtype=torch.float64), 1 / 4, subset=self.subset)).to(x.dtype)

    def eigenvalues(self, x):
        return eigh(covariance(x.detach(), dtype=torch.float64)).values
'''


@pytest.fixture
def head(tmp_path):
    file = tmp_path / "my_head.py"
    file.write_text(FILE)
    spec = importlib.util.spec_from_file_location("my_head", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield "fourth-root"
    del registry._FACTORIES["fourth-root"]


def by_hand(run, images, keep):
    """Mean cross-entropy with some eigenvalues only, computed in NumPy."""
    losses = []
    for image, label in images:
        with torch.no_grad():
            features = run.model.head.reduce(run.model.forward_features(image[None]))
        x = features[0].double().flatten(1).numpy()
        x -= x.mean(1, keepdims=True)
        values, vectors = np.linalg.eigh(x @ x.T / x.shape[1])
        kept = np.clip(values[::-1], 0, None) ** 0.25 * keep
        matrix = (vectors[:, ::-1] * kept) @ vectors[:, ::-1].T
        weight, bias = (p.detach().double().numpy() for p in (run.model.classifier.weight, run.model.classifier.bias))
        scores = weight @ matrix[np.triu_indices(3)] + bias
        losses.append(np.log(np.exp(scores).sum()) - scores[label])
    return np.mean(losses)


@pytest.fixture
def run(head, tmp_path):
    """A run of two epochs with the head."""
    out = tmp_path / "run"
    model = {**PLUMAGE["model"], "backbone": "plumage_net", "head": head}
    train(from_mapping({**PLUMAGE, "model": model, "epochs": 2, "out": str(out)}))
    return open_run(out)


def test_a_head_of_a_user_works_everywhere(run, tmp_path):
    # telemetry
    rows = read_summary(run.folder / "summary.csv")
    assert len(rows) == 2
    for row in rows:
        assert row["lambda_1"] > 0
        assert row["log10_condition"] > 0
        assert 0 <= row["energy_last"] < 1
        assert row["q_norm"] > 0
        assert "s" not in row  # it has no scaling factor

    # evaluation, against NumPy
    images = run.dataset("test")
    subsets = {"all": [1, 1, 1], "top:1": [1, 0, 0], "top:1+last:1": [1, 0, 1]}
    scores = evaluate(run.model, make_loader(images, 4, train=False), subsets=list(subsets))
    expected = [by_hand(run, images, keep) for keep in subsets.values()]
    assert [score.loss for score in scores] == pytest.approx(expected, rel=1e-4)
    assert np.ptp(expected) > 1e-3
    words = [f"--subset={subset}" for subset in subsets]
    assert main(["evaluate", str(run.folder), *words, "--device", "cpu", "--workers", "0"]) == 0
    with (run.folder / "evaluation.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == pytest.approx(expected, rel=1e-4)

    # explanation
    words = ["--count", "1", "--measure_count", "2", "--split_at", "1", "--device", "cpu", "--out", str(tmp_path / "page")]
    assert main(["explain", str(run.folder), *words]) == 0
    assert list((tmp_path / "page").glob("*.html"))

    # explorer
    session = Session("mine", run.model, images)
    subsets_shown = {prediction.subset for prediction in session.predict(session.analyse(session.first), split=1)}
    assert subsets_shown == {"all", "top:1", "last:2"}
