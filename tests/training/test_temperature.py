"""Temperature, calibration error and acceptance against independent calculations."""

import gc
import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from eigengrain.errors import ArgumentError, FileError, NonFiniteError
from eigengrain.models import create_model, from_pretrained, save_pretrained
from eigengrain.models.calibration import Judged, decode_subspace, encode_subspace, familiarity
from eigengrain.training import train
from eigengrain.training.calibration import (
    acceptance_threshold,
    collect,
    energy_threshold,
    expected_calibration_error,
    fit_calibration,
    fit_subspace,
    fit_temperature,
    rejection_threshold,
    reliability,
)
from training.small_run import colours, small


def nll(logits, labels, temperature):
    return -log_softmax(np.asarray(logits, np.float64) / temperature, -1)[np.arange(len(labels)), np.asarray(labels)].mean()


def scores(n=400, classes=5, scale=2.0, seed=0):
    """Scores whose softmax gives the true probabilities of the labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("distortion", [0.2, 1.0, 6.0])
def test_the_temperature_minimises_the_likelihood(seed, distortion):
    logits, labels = scores(seed=seed)
    logits = logits * distortion
    found = fit_temperature(logits, labels)
    best = minimize_scalar(lambda t: nll(logits, labels, t), bounds=(0.02, 50), method="bounded", options={"xatol": 1e-9})
    assert found == pytest.approx(best.x, rel=1e-5)
    assert nll(logits, labels, found) <= nll(logits, labels, 1.0) + 1e-12
    # invariant to what does not change the probabilities, and to the dtype up to rounding
    assert fit_temperature(logits + 7, labels) == pytest.approx(found, rel=1e-9)
    assert fit_temperature(logits.float(), labels.int()) == pytest.approx(found, rel=1e-5)


def test_a_temperature_is_found_again():
    logits, labels = scores(n=100_000)
    for temperature in (0.5, 1.0, 3.0):
        assert fit_temperature(logits * temperature, labels) == pytest.approx(temperature, rel=0.02)


def test_scores_without_a_finite_optimum():
    labels = torch.arange(20) % 5
    right = torch.eye(5, dtype=torch.float64)[labels]
    temperature = fit_temperature(right, labels)  # all right: as sure as 20 images allow
    assert float((right / temperature).softmax(-1).max(-1).values.mean()) == pytest.approx(21 / 22)
    assert fit_temperature(50 * right, labels) == 1  # already surer than that: left as it is
    assert fit_temperature(right, (labels + 1) % 5) == pytest.approx(50)  # all wrong: the largest temperature
    assert fit_temperature(0 * right, labels) == 1


@pytest.mark.parametrize(
    ("logits", "labels", "error"),
    [
        (torch.zeros(0, 3), torch.zeros(0), ArgumentError),
        (torch.zeros(3), torch.zeros(3), ArgumentError),
        (torch.zeros(2, 3), torch.tensor([0, 3]), ArgumentError),
        (torch.zeros(2, 3), torch.zeros(3), ArgumentError),
        (torch.full((2, 3), math.nan), torch.zeros(2), NonFiniteError),
    ],
)
def test_wrong_arguments(logits, labels, error):
    with pytest.raises(error):
        fit_temperature(logits, labels)
    with pytest.raises(error):
        expected_calibration_error(logits, labels)


def test_the_calibration_error_is_that_of_a_loop_over_images():
    generator = torch.Generator().manual_seed(1)
    p = torch.rand(500, 4, generator=generator, dtype=torch.float64) ** 3
    p[:3] = torch.tensor([[0.4, 0.2, 0.2, 0.2], [1, 0, 0, 0], [0.6, 0.4, 0, 0]])  # on the borders of bins
    p /= p.sum(-1, keepdim=True)
    labels = torch.randint(0, 4, (500,), generator=generator)
    for bins in (1, 5, 15):
        members = [[] for _ in range(bins)]
        for row, label in zip(p.tolist(), labels.tolist(), strict=True):
            confidence = max(row)
            place = next(b for b in range(bins) if confidence * bins <= b + 1 or b == bins - 1)
            members[place].append((confidence, row.index(confidence) == label))
        expected = sum(abs(sum(c for c, _ in bin) - sum(r for _, r in bin)) for bin in members) / 500
        assert expected_calibration_error(p, labels, bins) == pytest.approx(expected, abs=1e-12)
        assert [count for *_, count in reliability(p, labels, bins)] == [len(bin) for bin in members if bin]
    with pytest.raises(ArgumentError):
        expected_calibration_error(p, labels, 0)


@pytest.mark.parametrize("n", [1, 7, 20, 100])
@pytest.mark.parametrize("accepted", [0.01, 0.5, 0.9, 0.95, 1.0])
def test_a_threshold_is_the_largest_that_accepts_the_share(n, accepted):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    threshold = acceptance_threshold(values, accepted)
    assert float((values >= threshold).double().mean()) >= accepted - 1e-12
    assert float((values > threshold).double().mean()) < accepted
    logits = torch.stack([values, values - 1], 1)
    assert energy_threshold(logits, accepted) == pytest.approx(threshold + math.log(1 + math.exp(-1)))
    with pytest.raises(ArgumentError):
        acceptance_threshold(values, 1.1)


def test_familiarity_is_that_of_an_eigendecomposition():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q
    means = 3 + torch.randn(60, 40, generator=generator, dtype=torch.float64) * torch.linspace(3, 0.1, 40) @ basis.T
    subspace = fit_subspace(means)
    centre = means.mean(0)
    vectors = np.linalg.eigh(np.cov(means.numpy().T))[1][:, -16:]
    features = torch.randn(5, 40, 3, 2, generator=generator, dtype=torch.float64) + 1
    x = features.mean((2, 3)).numpy()
    rest = (x - centre.numpy()) - (x - centre.numpy()) @ vectors @ vectors.T
    expected = 1 - np.linalg.norm(rest, axis=1) / np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(familiarity(features, subspace).numpy(), expected, rtol=1e-9)
    dead = familiarity(torch.zeros(1, 40, 2, 2), subspace.float())  # no features at all: unfamiliar, and finite
    assert -1e9 < float(dead) < float(expected.min())
    torch.testing.assert_close(decode_subspace(encode_subspace(subspace), 40), subspace.float(), rtol=0, atol=0)
    for text, channels in (
        ("!", 40),
        ("", 40),
        (encode_subspace(subspace), 39),
        (encode_subspace(subspace * math.nan), 40),
    ):
        with pytest.raises(ArgumentError):
            decode_subspace(text, channels)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Folder and sources of a finished training with validation images."""
    out, sources = tmp_path_factory.mktemp("run"), colours(train=22, val=12)
    train(small(out), sources)
    return out, sources


def test_training_calibrates_on_validation_images(calibrated):
    out, sources = calibrated
    model = from_pretrained(out / "model")
    assert json.loads((out / "results.json").read_text())["temperature"] == model.temperature
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))

    def batches(dataset):
        pixels = [torch.from_numpy(np.array(dataset.image(i))).permute(2, 0, 1) / 255 for i in range(len(dataset))]
        return [(torch.stack([(image - mean) / std for image in pixels]), torch.tensor(dataset.labels))]

    (images, labels), (others, _) = batches(sources.val)[0], batches(sources.train)[0]
    with torch.inference_mode():
        logits, features = model(images), model.forward_features(images)
        subspace = fit_subspace(model.forward_features(others).mean((2, 3)).double())
        familiar = familiarity(features.double(), subspace)
        judged = Judged(model)(images)
    assert model.temperature == pytest.approx(fit_temperature(logits, labels), rel=1e-4)
    assert model.calibration["familiarity_threshold"] == pytest.approx(acceptance_threshold(familiar), abs=1e-5)
    np.testing.assert_allclose(judged[2].numpy(), familiar.numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(judged[1].numpy(), (logits / model.temperature).softmax(-1).numpy(), rtol=0, atol=1e-6)
    collected = collect(model, batches(sources.val))
    np.testing.assert_allclose(collected.logits.numpy(), logits.numpy(), rtol=0, atol=1e-5)
    # thresholds for other shares
    assert rejection_threshold(model) == rejection_threshold(model, 0.95) == model.calibration["familiarity_threshold"]
    assert rejection_threshold(model, 1) == -math.inf
    for accept in (0.99, 0.5, 0.01):
        expected = acceptance_threshold(collected_familiarity(collected, model), accept)
        assert rejection_threshold(model, accept) == pytest.approx(expected, abs=1e-5)


def collected_familiarity(collected, model):
    subspace = decode_subspace(model.calibration["subspace"], model.num_features)
    return familiarity(collected.means[..., None, None].float(), subspace)


def test_collecting_keeps_no_tensor_of_a_batch():
    """Small tensors that stay between freed images would split the memory, so that it grows with the number of images."""
    model = create_model("test_resnet", head="gap", num_classes=3)
    tensors = []

    def count():
        gc.collect()
        tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    batches = ((torch.full((2, 3, 32, 32), 0.1 * k), torch.tensor([k, 0])) for k in range(3))
    collected = collect(model, batches, each=count)
    assert collected.labels.tolist() == [0, 0, 1, 0, 2, 0]
    assert tensors[2] == tensors[1]


def test_without_validation_images_there_is_no_calibration(tmp_path):
    train(small(tmp_path, epochs=1), colours(train=8, test=4))
    model = from_pretrained(tmp_path / "model")
    assert (model.calibration, model.temperature) == (None, 1.0)
    assert json.loads((tmp_path / "results.json").read_text())["temperature"] == 1.0
    assert rejection_threshold(model) == -math.inf
    with pytest.raises(ArgumentError) as error:
        rejection_threshold(model, 0.9)
    assert error.value.argument == "accept"


def test_a_new_classifier_is_not_calibrated(calibrated, tmp_path):
    model = from_pretrained(calibrated[0] / "model")
    model.reset_classifier(3)
    assert model.calibration is None
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).temperature == 1


def test_a_damaged_subspace_is_refused(calibrated, tmp_path):
    model = from_pretrained(calibrated[0] / "model")
    save_pretrained(model, tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(model.calibration["subspace"], "QUJD"))
    with pytest.raises(FileError) as error:
        from_pretrained(tmp_path)
    assert error.value.path == tmp_path / "config.json"


def test_a_model_without_training_images_has_a_temperature_alone():
    model = create_model("test_resnet", head="gap", num_classes=3)
    images = [(torch.rand(6, 3, 32, 32), torch.arange(6) % 3)]
    values = fit_calibration(collect(model, images), None)
    assert values["familiarity_threshold"] is None
    assert values["temperature"] > 0
