"""The covariance head and its settings against NumPy, sample by sample."""

import numpy as np
import pytest
import scipy.linalg
import torch
from spectral_cases import F64, features, generator, log_spectrum, orthonormal, refused, relative

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.functional import GradientRule
from eigengrain.heads import CovarianceHead, create_head
from eigengrain.heads.covariance import SYSTEMS

D = 5
X = torch.randn(3, D, 4, 6, dtype=F64, generator=generator(0)) * 0.8


def naive_root(name, p):
    eye = np.eye(len(p))
    if name == "mpncov":
        return np.real(scipy.linalg.sqrtm(p))
    if name == "logcov":
        return scipy.linalg.logm(p + 1e-3 * np.trace(p) / len(p) * eye)
    if name == "logchol":
        return naive_log_cholesky(p + 1e-3 * np.trace(p) / len(p) * eye)
    if name == "isqrt":
        y, z = p / np.trace(p), eye
        for _ in range(5):
            t = (3 * eye - z @ y) / 2
            y, z = y @ t, t @ z
        return y * np.sqrt(np.trace(p))
    norm = np.linalg.norm(p)
    lam, u = np.linalg.eigh(p / norm)
    z = 1 - lam
    if name == "mtp":
        term, root = np.ones_like(z), np.ones_like(z)
        for k in range(1, 11):
            term = term * z * (k - 1.5) / k
            root = root + term
    else:  # the [5/5] approximant as a continued product of its partial fractions
        angles = np.arange(1, 6) * np.pi / 11
        root = 1 - sum(2 / 11 * np.sin(t) ** 2 * z / (1 - np.cos(t) ** 2 * z) for t in angles)
    return (u * root) @ u.T * np.sqrt(norm)


def naive_log_cholesky(a):
    """The columns of the factor, one after another, with a logarithm on the diagonal, mirrored into the upper triangle."""
    d, a = len(a), a.copy()
    out = np.zeros((d, d))
    for j in range(d):
        column = a[:, j] / np.sqrt(a[j, j])
        a -= np.outer(column, column)
        out[j, j] = np.log(column[j])
        out[j + 1 :, j] = out[j, j + 1 :] = column[j + 1 :]
    return out


def naive(name, x, seb, path="both", factor="qs"):
    rows = []
    for item in x.flatten(2).numpy():
        p = np.cov(item, bias=True)
        q = naive_root(name, p)
        if seb:
            root, decay = np.real(scipy.linalg.sqrtm(p)), scipy.linalg.expm(-p)
            s = {"qs": root @ decay.T, "q": root, "s": decay}[factor]
            q = (np.linalg.norm(s) + (path == "both")) * q
        rows.append(q[np.triu_indices(D)])
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("seb", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
def test_forward(name, seb):
    head = create_head(name + "+seb" * seb, D)
    assert head.out_features == D * (D + 1) // 2
    assert sum(p.numel() for p in head.parameters()) == 0
    assert torch.allclose(head(X), naive(name, X, seb), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 3.0])
def test_iteration_in_float32_at_any_scale(scale):
    head = create_head("isqrt+seb", D, dtype="float32")
    torch.testing.assert_close(
        head(scale * X.float()), naive("isqrt", scale * X, True).float(), rtol=1e-4, atol=1e-6 * scale
    )


@pytest.mark.parametrize("path", ["both", "scaled"])
@pytest.mark.parametrize("factor", ["qs", "q", "s"])
def test_paths_and_factors(factor, path):
    head = create_head("mpncov+seb", D, path=path, factor=factor)
    assert torch.allclose(head(X), naive("mpncov", X, True, path, factor), rtol=1e-10, atol=1e-12)


def test_constant_factor():
    assert torch.allclose(
        create_head("mpncov+seb", D, factor="constant")(X), 100 * create_head("mpncov", D)(X), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("factor", ["mlp-eigenvalues", "mlp-matrix"])
def test_learned_factors(factor):
    torch.manual_seed(0)
    head = create_head("mpncov+seb", D, factor=factor).double()
    plain = create_head("mpncov", D)(X)
    scale = head(X) / plain
    assert torch.allclose(scale, scale[:, :1].expand_as(scale), rtol=1e-9, atol=0)  # one number per sample …
    assert (scale >= 1 - 1e-12).all()  # … ReLU(MLP) + 1
    roots = {"mlp-eigenvalues": torch.linalg.eigvalsh(create_head("mpncov", D).matrix(X)).flip(-1), "mlp-matrix": plain}
    assert torch.allclose(head.learned_factor.mlp(roots[factor]).squeeze(-1) + 1, scale[:, 0], rtol=1e-9, atol=0)
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(head, x)


def replica(module):
    """As in a replica of DataParallel: parameters are plain tensors that the module does not list."""
    copy = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(copy, name, replica(child))
    for name, parameter in module._parameters.items():
        setattr(copy, name, None if parameter is None else parameter.clone())
    return copy


@pytest.mark.parametrize("factor", ["mlp-eigenvalues", "mlp-matrix"])
def test_learned_factors_in_a_replica(factor):
    head = create_head("mpncov+seb", D, factor=factor, reduce=3).eval()
    copy = replica(head)
    assert not list(copy.parameters())
    assert torch.equal(copy(X.float()), head(X.float()))


@pytest.mark.parametrize("name", [n + s for n in SYSTEMS for s in ("", "+seb")])
def test_gradcheck(name):
    x = (torch.randn(1, 3, 3, 4, dtype=F64, generator=generator(1))).requires_grad_()
    # MPA and MTP have the published gradient: that of the true root, which their value approximates
    loose = {"atol": 0.05, "rtol": 0.05} if name.startswith(("mpa", "mtp")) else {}
    assert torch.autograd.gradcheck(create_head(name, 3), x, **loose)


def test_subsets_may_change_between_passes():
    head = create_head("mpncov", D)
    whole = head(X)
    head.subset = "top:2"
    top = head(X)
    head.subset = "~(top:2)"
    assert torch.allclose(top + head(X), whole, rtol=0, atol=1e-13)
    head.subset = None
    assert torch.equal(head(X), whole)


def test_settings_compose():
    power = CovarianceHead(D, normalise="power", power=0.3)(X)
    lam, u = np.linalg.eigh(np.cov(X[0].flatten(1).numpy(), bias=True))
    assert np.allclose(power[0].numpy(), ((u * lam**0.3) @ u.T)[np.triu_indices(D)], rtol=0, atol=1e-12)
    raw = CovarianceHead(D, normalise="none", isometric=True)(X)
    assert torch.allclose(raw.norm(dim=1)[0], torch.tensor(np.linalg.norm(lam)), rtol=1e-12, atol=0)
    products = create_head("mpncov+seb", D, solver="products")(X)
    assert torch.allclose(products, create_head("mpncov+seb", D)(X), rtol=1e-9, atol=0)
    logarithm = create_head("logcov", D, solver="products")(X)
    assert torch.allclose(logarithm, create_head("logcov", D)(X), rtol=1e-9, atol=0)
    rule = create_head("mpncov+seb", D, gradient=GradientRule("taylor", degree=9))
    assert torch.allclose(rule(X), create_head("mpncov+seb", D)(X), rtol=1e-9, atol=0)


def test_reduction_adds_exactly_a_convolution_and_a_norm():
    head = create_head("mpncov+seb", 16, reduce=4)
    assert sum(p.numel() for p in head.parameters()) == 16 * 4 + 2 * 4
    assert head.out_features == 10
    assert head(torch.randn(2, 16, 5, 5)).shape == (2, 10)


def test_spectrum_is_recorded_on_request_only():
    head = create_head("mpncov+seb", D)
    head(X)
    assert head.last_spectrum is None
    head.record_spectrum = True
    for name in ("mpncov+seb", "isqrt+seb"):
        head = create_head(name, D)
        head.record_spectrum = True
        head(X)
        expected = torch.stack([torch.linalg.eigvalsh(torch.cov(x.flatten(1), correction=0)).flip(-1) for x in X])
        assert torch.allclose(head.last_spectrum.eigenvalues, expected, rtol=0, atol=1e-12)
        assert torch.allclose(
            head.last_spectrum.factor, (expected * torch.exp(-2 * expected)).sum(1).sqrt(), rtol=1e-12, atol=0
        )
        assert not [k for k in head.state_dict() if "spectrum" in k]


def test_constant_maps_are_finite_for_every_system():
    for name in SYSTEMS:
        for branch in ("", "+seb"):
            x = torch.full((2, D, 3, 3), 0.7, requires_grad=True)
            y = create_head(name + branch, D)(x)
            y.sum().backward()
            assert y.isfinite().all()
            assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: create_head("mpnocv", 4), "head"),
        (lambda: create_head("mpncov", 4, step=3), "option of head 'mpncov'"),
        (lambda: create_head("mpncov", 4, normalise="sqr"), "normalisation"),
        (lambda: create_head("mpncov+seb", 4, factor="mlp"), "scaling factor"),
        (lambda: create_head("mpncov", 4, subset="top:5"), "subset"),
        (lambda: create_head("isqrt", 4, subset="top:2"), "subset"),
        (lambda: create_head("logchol", 4, subset="top:2"), "subset"),
        (lambda: create_head("logchol", 4, epsilon=-1e-3), "epsilon"),
        (lambda: create_head("mpncov", 4, subset="top:2", solver="products"), "subset"),
        (lambda: create_head("mpncov", 4, subset="top:2", gradient="newton"), "subset"),
        (lambda: create_head("mpa", 4, degree=0), "degree"),
        (lambda: create_head("isqrt", 4, steps=0), "steps"),
        (lambda: create_head("mpncov", 4, solver="egih"), "solver"),
        (lambda: create_head("isqrt", 4, cut="projektor"), "cut"),
        (lambda: create_head("logcov", 4, epsilon=-1e-3), "epsilon"),
        (lambda: create_head("mpncov", 0), "in_channels"),
        (lambda: create_head("mpncov", 4, reduce=2.5), "reduce"),
        (lambda: create_head("mpncov", 4)(torch.randn(2, 3, 5, 5)), "x"),
        (lambda: create_head("mpncov", 4)(torch.randn(2, 4)), "x"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


def test_messages():
    with pytest.raises(UnknownName) as error:
        create_head("mpncov", 4, sovler="eigh")
    assert error.value.suggestions[0] == "solver"
    with pytest.raises(ArgumentError) as refusal:
        create_head("mpncov", 4)(torch.randn(2, 3, 5, 5))
    assert str(refusal.value) == (
        "x must be a feature map (B, 4, H, W) for this CovarianceHead, got (2, 3, 5, 5): create the head with in_channels "
        "set to the channels of x"
    )


@pytest.mark.parametrize(
    "options", [{}, {"seb": True}, {"seb": True, "path": "scaled"}, {"normalise": "power", "power": 0.3}]
)
@pytest.mark.parametrize("positions", [7, 2])  # 2 × 2 positions are too few for six channels
def test_pool_subsets_equals_pooling_each_subset(options, positions):
    torch.manual_seed(0)
    head = CovarianceHead(9, 6, **options).eval()
    x = torch.randn(3, 9, positions, positions)
    subsets = ["all", "top:2", "top:1+last:2", "last:3"]
    together, eigenvalues = head.pool_subsets(head.reduce(x), subsets)
    assert eigenvalues.shape == (3, 6)
    for subset, vector in zip(subsets, together, strict=True):
        head.subset = subset
        assert torch.allclose(vector, head(x), rtol=0, atol=1e-6)
    head.subset = "top:2"
    head.pool_subsets(head.reduce(x), ["all"])
    assert str(head.subset) == "top:2"


@pytest.mark.parametrize(
    "options", [{}, {"seb": True, "path": "scaled"}, {"normalise": "power", "power": 0.3}, {"normalise": "log"}]
)
def test_eigenvalues_beyond_the_rank_are_zero(options):
    """They must not be rounding noise, whose gaps would look like gaps between eigenvalues."""
    torch.manual_seed(0)
    _, eigenvalues = CovarianceHead(6, **options).pool_subsets(torch.randn(3, 6, 2, 2), ["all", "last:2"])
    assert eigenvalues[:, :3].min() > 1e-3
    assert not eigenvalues[:, 3:].any()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_factor_learned_from_eigenvalues_has_a_finite_gradient_at_zeros(scale):
    """The slope of the root is infinite at a zero eigenvalue."""
    torch.manual_seed(0)
    head = CovarianceHead(6, seb=True, factor="mlp-eigenvalues").double()
    x = (scale * torch.randn(2, 6, 2, 2, dtype=F64, generator=generator(1))).requires_grad_()
    head(x).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.norm() < 100
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize("normalise", ["sqrt", "newton-schulz", "log", "power", "none"])
def test_recorded_eigenvalues_beyond_the_rank_are_exactly_zero(normalise):
    x = torch.randn(3, 6, 2, 2, dtype=F64, generator=generator(2))
    head = CovarianceHead(6, normalise=normalise)
    with head.recording():
        head(x)
    recorded = head.last_spectrum.eigenvalues
    expected = [np.linalg.eigvalsh(np.cov(sample, bias=True))[::-1] for sample in x.flatten(2).numpy()]
    assert np.abs(recorded.numpy() - np.array(expected)).max() < 1e-13
    assert (recorded[:, :3] > 0).all()
    assert (recorded[:, 3:] == 0).all()
    assert (head.eigenvalues(x)[:, 3:] == 0).all()


def test_a_constant_factor_multiplies_the_root():
    plain = CovarianceHead(D)(X)
    for path in ("both", "scaled"):
        scaled = CovarianceHead(D, seb=True, factor="constant", constant=3.0, path=path)(X)
        torch.testing.assert_close(scaled, 3 * plain, rtol=1e-12, atol=0)


def test_subsets_are_pooled_with_the_requested_cut():
    g = torch.randn(3, D * (D + 1) // 2, dtype=F64, generator=generator(4))

    def gradient(own, requested):
        x = X.clone().requires_grad_()
        [vector], _ = CovarianceHead(D, cut=own).pool_subsets(x, ["top:2"], requested)
        return torch.autograd.grad(vector, x, g)[0]

    exact, projector = gradient("exact", None), gradient("projector", None)
    assert (exact - projector).norm() > 0.01 * exact.norm()
    torch.testing.assert_close(gradient("exact", "projector"), projector)
    torch.testing.assert_close(gradient("projector", "exact"), exact)


def test_rules_from_the_spectrum_select_eigenvalues_and_others_do_not():
    for rule, selectable in (("exact", True), ("taylor", True), ("topn", True), ("newton", False), ("lyapunov", False)):
        assert CovarianceHead(D, gradient=rule).selectable is selectable
    kept = CovarianceHead(D, gradient="taylor", subset="top:2")(X)
    torch.testing.assert_close(kept, CovarianceHead(D, subset="top:2")(X), rtol=1e-12, atol=1e-12)


# --- log-Cholesky ------------------------------------------------------------------------------------------------

LOG_CHOLESKY = {
    "generic": lambda: features(D, 24, log_spectrum(D, 30.0), batch=2),
    "repeated": lambda: features(D, 24, torch.tensor([2.0, 2, 1, 1, 1], dtype=F64), batch=2),
    "deficient": lambda: features(D, 3, log_spectrum(2, 4.0), batch=2),
    "dead": lambda: features(D, 24, log_spectrum(D, 30.0), batch=2) * torch.tensor([1.0, 0, 1, 0, 1])[:, None],
    "ill-conditioned": lambda: features(D, 24, log_spectrum(D, 1e10), batch=2),
}


@pytest.mark.parametrize("case", LOG_CHOLESKY)
@pytest.mark.parametrize("epsilon", [1e-3, 0.2])
def test_log_cholesky(case, epsilon):
    x = LOG_CHOLESKY[case]()
    head = create_head("logchol", D, epsilon=epsilon)
    expected = []
    for item in x.numpy():
        p = np.cov(item, bias=True)
        expected.append(naive_log_cholesky(p + epsilon * np.trace(p) / D * np.eye(D)))
    assert relative(head.matrix(x), torch.tensor(np.stack(expected))) < 1e-12
    assert not head.selectable
    assert torch.autograd.gradcheck(head, x[:1].unsqueeze(-1).requires_grad_(), atol=1e-6, rtol=1e-5)


def test_log_cholesky_of_a_known_factor():
    """P = L Lᵀ comes back as L: entries below the diagonal, and logarithms on it."""
    factor = torch.tensor([[2.0, 0, 0], [1, 3, 0], [-1, 0.5, 0.1]], dtype=F64)
    x = (factor @ orthonormal(10, 3, generator(0), centred=True).mT) * 10**0.5
    out = create_head("logchol", 3, epsilon=0.0).matrix(x)[0]
    expected = torch.tensor([[np.log(2), 1, -1], [1, np.log(3), 0.5], [-1, 0.5, np.log(0.1)]], dtype=F64)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_scale_moves_the_logarithms_and_scales_the_rest():
    head = create_head("logchol", D)
    for factor in (1e-4, 1e6):
        expected = factor * head.matrix(X)
        expected.diagonal(dim1=1, dim2=2).copy_(head.matrix(X).diagonal(dim1=1, dim2=2) + np.log(factor))
        torch.testing.assert_close(head.matrix(factor * X), expected, rtol=1e-9, atol=1e-9 * factor)


@pytest.mark.parametrize("positions", [3, 5, 40])
def test_bounds_of_the_gradient_of_log_cholesky(positions):
    """‖dL‖ ≤ 2√κ ‖dX_c‖ below the diagonal, and ‖d log diag L‖ ≤ 2√(d/(ε tr P)) ‖dX_c‖ on it."""
    below = torch.tril_indices(D, D, -1)
    largest = [0.0, 0.0]
    for seed, spread in enumerate(np.logspace(0, 12, 13)):
        x = features(D, positions, log_spectrum(min(D, positions - 1), spread), seed)[0]
        jacobian = torch.autograd.functional.jacobian(create_head("logchol", D).matrix, x[None])[0].squeeze(2)
        p = torch.cov(x, correction=0)
        ridge = 1e-3 * p.trace() / D
        values = torch.linalg.eigvalsh(p).clamp_min(0) + ridge
        norms = [
            torch.linalg.matrix_norm(part.flatten(1), 2) * positions**0.5
            for part in (jacobian[*below], jacobian[range(D), range(D)])
        ]
        bounds = [2 * (values[-1] / values[0]).sqrt(), 2 / ridge.sqrt()]
        largest = [max(old, float(n / b)) for old, n, b in zip(largest, norms, bounds, strict=True)]
    assert 0.05 < largest[0] <= 1
    assert 0.05 < largest[1] <= 1


def test_log_cholesky_of_diverged_features_is_nan():
    x = X.clone()
    x[1, 2, 0, 0] = float("nan")
    out = create_head("logchol", D)(x)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()
