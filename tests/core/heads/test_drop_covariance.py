"""Covariance with channel dropout against loops in NumPy, and the statistics of what is dropped."""

import math

import numpy as np
import pytest
import torch
from spectral_cases import F64, features, generator, log_spectrum

from eigengrain.heads import create_head
from eigengrain.heads.drop_covariance import DropCovariance, drop_probability


def layer(channels=6, seed=0):
    torch.manual_seed(seed)
    return DropCovariance(channels).double()


def maps(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=generator(seed))


def naive(head, x):
    """Gates (B, C), covariances (B, C, C) and the probability of the definition, entry by entry."""
    w = head.gate.weight.detach().numpy().reshape(3)
    gates, matrices, cosines = [], [], []
    for sample in x.detach().flatten(2).numpy():
        d, n = sample.shape
        means = [0.0, *(sum(row) / n for row in sample), 0.0]
        logits = [w[0] * means[i] + w[1] * means[i + 1] + w[2] * means[i + 2] for i in range(d)]
        y = np.array([math.exp(logit) for logit in logits]) / sum(math.exp(logit) for logit in logits)
        gated = np.array([[sample[i, k] * y[i] + sample[i, k] for k in range(n)] for i in range(d)])
        p = np.zeros((d, d))
        for k in range(n):
            difference = gated[:, k] - gated.mean(1)
            p += np.outer(difference, difference) / n
        c = p.sum(1)
        gates.append(y)
        matrices.append(p)
        cosines.append(y @ c / (np.linalg.norm(y) * np.linalg.norm(c)))
    probability = min(max(1 - 10 / math.log2(d) * float(np.mean(cosines)), 0.0), 1.0)
    return np.stack(gates), np.stack(matrices), probability


@pytest.mark.parametrize("shape", [(3, 6, 4, 5), (1, 6, 1, 2), (2, 9, 3, 3)])
def test_matches_loops(shape):
    head, x = layer(shape[1]), maps(*shape)
    gates, matrices, probability = naive(head, x)
    rows, columns = np.triu_indices(shape[1])
    torch.testing.assert_close(head.gates(x).detach(), torch.tensor(gates), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(head.eval()(x).detach(), torch.tensor(matrices[:, rows, columns]), rtol=1e-12, atol=1e-14)
    found = drop_probability(torch.tensor(gates), torch.tensor(matrices))
    assert float(found) == pytest.approx(probability, abs=1e-12)


def independent(seed=0):
    """Maps with 64 channels whose p is neither 0 nor 1."""
    return maps(4, 64, 3, 3, seed=seed)


def test_training_drops_rows_and_columns_and_scales_the_others():
    head, x = layer(64), independent()
    with torch.no_grad():
        _, matrices, probability = naive(head, x)
        assert 0.05 < probability < 0.95
        out = head.matrix(x).numpy()
    for sample, p in zip(out, matrices, strict=True):
        kept = np.diagonal(sample) != 0
        assert 0 < kept.sum() < 64
        expected = np.where(np.outer(kept, kept), p / (1 - probability) ** 2, 0)
        np.testing.assert_allclose(sample, expected, rtol=1e-10, atol=1e-13)


def test_frequency_of_dropped_channels_and_expected_matrix():
    head, x, draws = layer(64), independent(), 1000
    with torch.no_grad():
        _, matrices, probability = naive(head, x)
        torch.manual_seed(1)
        outs = torch.stack([head.matrix(x) for _ in range(draws)])
    dropped = (outs.diagonal(dim1=2, dim2=3) == 0).double()  # (draws, B, C)
    error = math.sqrt(probability * (1 - probability) / draws)
    assert float(dropped.mean()) == pytest.approx(probability, abs=5 * error / math.sqrt(4 * 64))
    assert ((dropped.mean(0) - probability).abs() < 5 * error).all()  # of every channel in every image
    pairs = torch.corrcoef(dropped.flatten(1).T).fill_diagonal_(0)
    assert pairs.abs().max() < 6 / math.sqrt(draws)  # independent of each other and between images

    expected = torch.tensor(matrices)
    expected.diagonal(dim1=1, dim2=2).div_(1 - probability)
    spread = outs.std(0) / math.sqrt(draws)
    assert ((outs.mean(0) - expected).abs() <= 6 * spread + 1e-12).all()


def test_no_and_every_channel_dropped():
    head = layer(4)
    x = maps(2, 1, 5, 5).expand(2, 4, 5, 5).clone()  # equal channels: all sums of rows are equal, the cosine is nearly 1
    assert naive(head, x)[2] == 0
    trained = head(x)
    assert torch.equal(trained, head.eval()(x))
    assert trained.abs().min() > 0

    head.gate.weight.data = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=F64)
    x = x - x.mean((2, 3), keepdim=True)
    x[:, 0] = 5 - x[:, 0]  # the channel with the largest gate has the opposite sign of the others
    x.requires_grad_()
    assert naive(head, x)[2] == 1
    trained = head.train()(x)
    trained.sum().backward()
    assert not trained.any()
    assert not x.grad.any()
    assert not head.gate.weight.grad.any()
    assert head.eval()(x).any()


def test_the_probability_is_the_mean_over_the_batch_and_a_constant():
    gate = torch.full((2, 1024), 1 / 1024, dtype=F64, requires_grad=True)
    matrix = torch.zeros(2, 1024, 1024, dtype=F64)
    matrix[0] = torch.eye(1024)  # cosines 1 and 0 …
    matrix.requires_grad_()
    p = drop_probability(gate, matrix)
    assert float(p) == pytest.approx(0.5)  # … and 10/log₂ d = 1
    assert not p.requires_grad
    assert float(drop_probability(gate[:1], matrix[:1])) == pytest.approx(0)
    assert float(drop_probability(gate[1:], matrix[1:])) == 1


@pytest.mark.parametrize("channels", [1, 2, 64])
@pytest.mark.parametrize("factor", [1e-15, 1.0, 1e8])
def test_the_probability_does_not_depend_on_the_scale(channels, factor):
    gate, x = torch.rand(3, channels), maps(3, channels, 20).float()
    matrix = x @ x.mT
    torch.testing.assert_close(
        drop_probability(gate, factor * matrix), drop_probability(gate, matrix), rtol=1e-4, atol=1e-4
    )


def test_scale_of_the_vector():
    """Without a normalisation the covariance has the square of the scale, as far as the gate does not change."""
    head, x = layer().eval(), maps(2, 6, 4, 4)
    x = x - x.mean((2, 3), keepdim=True)  # averages of 0 give equal gates
    torch.testing.assert_close(head(1e5 * x), 1e10 * head(x), rtol=1e-9, atol=0)
    expected = (7 / 6) ** 2 * torch.stack([torch.cov(item, correction=0) for item in x.flatten(2)])
    torch.testing.assert_close(head.matrix(x), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", ["generic", "repeated", "deficient", "dead", "ill-conditioned", "one position"])
def test_gradcheck(case, training, monkeypatch):
    d = 8
    sigma = {"repeated": torch.ones(d, dtype=F64), "ill-conditioned": log_spectrum(d, 1e10)}.get(
        case, log_spectrum(d, 50.0)
    )
    x = {
        "deficient": lambda: features(d, 6, log_spectrum(4, 9.0)),
        "one position": lambda: maps(1, d, 1, seed=3),
    }.get(case, lambda: features(d, 12, sigma))()
    x = x.reshape(1, d, 1, -1) * torch.linspace(0.5, 1.5, d, dtype=F64)[:, None, None]
    if case == "dead":
        x[:, 3:5] = 0
    head = layer(d, seed=2).train(training)

    monkeypatch.setattr("eigengrain.heads.drop_covariance.drop_probability", lambda *_: torch.tensor(0.4, dtype=F64))

    def function(x, weight):
        torch.manual_seed(5)  # the same mask
        return torch.func.functional_call(head, {"gate.weight": weight}, (x,))

    if training and case == "generic":
        assert 0 < (head.matrix(x).diagonal(dim1=1, dim2=2) == 0).sum() < d
    assert torch.autograd.gradcheck(function, (x.requires_grad_(), head.gate.weight))


def test_random_numbers_are_those_of_the_default_generator():
    head, x = layer(64), independent()
    state = torch.get_rng_state()
    first, second = head(x), head(x)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(head(x), first)
    head.eval()
    state = torch.get_rng_state()
    assert torch.equal(head(x), head(x))
    assert torch.equal(torch.get_rng_state(), state)  # evaluation draws nothing


def test_precision_and_layout():
    torch.manual_seed(0)
    head = create_head("dropcov", 8, reduce=6).eval()
    x = maps(2, 8, 5, 7).float()
    single = head(x)
    assert single.dtype == torch.float32
    torch.testing.assert_close(head(x.to(memory_format=torch.channels_last)), single)
    torch.testing.assert_close(head.double()(x.double()).float(), single, rtol=1e-4, atol=1e-6)
    pooling = DropCovariance(8).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pooling(x), pooling.matrix(x)[:, *torch.triu_indices(8, 8)])
        inside = pooling(x)
    assert torch.equal(inside, pooling(x))
    assert pooling.bfloat16()(x.bfloat16()).dtype == torch.float32


def test_diverged_features_give_nan():
    x = maps(2, 6, 3, 3).float()
    x[1, 2, 1, 1] = float("nan")
    for training in (False, True):
        out = DropCovariance(6).train(training)(x)
        assert not out[1].isfinite().all()


def test_only_the_gate_is_learned():
    assert {name: tuple(p.shape) for name, p in create_head("dropcov", 8).named_parameters()} == {"gate.weight": (1, 1, 3)}
    assert not create_head("dropcov", 8).rank_sensitive
    assert create_head("dropcov", 8).quadratic
