import numpy as np
import pytest
import scipy.linalg
import torch
from spectral_cases import F64, central_difference, log_spectrum, matrix, refused, relative

from eigengrain.errors import ArgumentError, NonFiniteError, SecondOrderError
from eigengrain.functional import (
    EigenSubset,
    eigh,
    exp_inverse,
    matrix_log,
    matrix_power,
    matrix_sqrt,
    spectral_function,
)

FUNCTIONS = {
    "sqrt": matrix_sqrt,
    "power 0.3": lambda p: matrix_power(p, 0.3),
    "power 2": lambda p: matrix_power(p, 2),
    "inverse": lambda p: matrix_power(p, -1),
    "log": matrix_log,
    "exp": exp_inverse,
    "sin": lambda p: spectral_function(p, torch.sin),
}
CASES = {
    "generic": matrix(torch.tensor([3.0, 1.5, 0.7, 0.2], dtype=F64), batch=2),
    "repeated": 2 * torch.eye(4, dtype=F64)[None],
    "partly repeated": matrix(torch.tensor([2.0, 2.0, 0.5, 0.5], dtype=F64)),
    "nearly repeated": matrix(torch.tensor([2.0, 2.0 - 1e-9, 0.5, 0.5 - 1e-12], dtype=F64)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name, case):
    assert torch.autograd.gradcheck(FUNCTIONS[name], CASES[case].clone().requires_grad_())


@pytest.mark.parametrize("kappa", [1e1, 1e4, 1e8])
@pytest.mark.parametrize(
    "ours, theirs, bound",
    [
        (matrix_sqrt, scipy.linalg.sqrtm, 1e-10),
        (matrix_log, scipy.linalg.logm, 1e-9),
        (exp_inverse, lambda a: scipy.linalg.expm(-a), 1e-10),
        (lambda p: matrix_power(p, 0.3), lambda a: scipy.linalg.fractional_matrix_power(a, 0.3), 1e-10),
    ],
)
def test_against_scipy(ours, theirs, bound, kappa):
    p = matrix(log_spectrum(12, kappa**2), seed=3, batch=3) * 2.5
    expected = torch.stack([torch.from_numpy(np.real(theirs(a))) for a in p.numpy()])
    assert relative(ours(p), expected) <= bound


def test_gradient_against_the_frechet_derivative():
    """The derivative of the exponential by SciPy, through the adjoint identity <G, L(E)> = <∂l/∂P, E>."""
    g = torch.randn(6, 6, dtype=F64)
    e = torch.randn(6, 6, dtype=F64)
    e = e + e.mT
    p = matrix(torch.tensor([2.0, 2.0, 2.0, 1.0, 0.3, 0.0], dtype=F64))[0].requires_grad_()
    (grad,) = torch.autograd.grad(exp_inverse(p), p, g)
    frechet = scipy.linalg.expm_frechet(-p.detach().numpy(), -e.numpy(), compute_expm=False)
    assert float((grad * e).sum()) == pytest.approx(float((g.numpy() * frechet).sum()), rel=1e-12)


def test_square_root_of_singular_matrices():
    """Between range and null space the derivative exists and is kept; between null directions it is set to zero."""
    p = torch.diag(torch.tensor([4.0, 1.0, 0.0, 0.0], dtype=F64)).requires_grad_()
    (grad,) = torch.autograd.grad(matrix_sqrt(p), p, torch.ones(4, 4, dtype=F64))
    rows = [[1 / 4, 1 / 3, 1 / 2, 1 / 2], [1 / 3, 1 / 2, 1, 1], [1 / 2, 1, 0, 0], [1 / 2, 1, 0, 0]]
    assert torch.allclose(grad, torch.tensor(rows, dtype=F64), rtol=1e-14, atol=0)
    zero = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(matrix_sqrt(zero).sum(), zero)
    assert grad.abs().max() == 0
    assert matrix_power(zero.detach(), 0.3).abs().max() == 0


@pytest.mark.parametrize("kappa", [1e2, 1e8, 1e14])
def test_gradient_at_ill_conditioned_matrices(kappa):
    """Against the Lyapunov equation of the root, solved by SciPy: Q X + X Q = sym(G)."""
    p = matrix(log_spectrum(8, kappa), seed=5)[0]
    g = torch.randn(8, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    root = matrix_sqrt(p)
    expected = scipy.linalg.solve_continuous_lyapunov(root.numpy(), ((g + g.mT) / 2).numpy())
    p.requires_grad_()
    (grad,) = torch.autograd.grad(matrix_sqrt(p), p, g)
    assert relative(grad, torch.from_numpy(expected)) <= 1e-9


class TestSubsets:
    p = matrix(torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1], dtype=F64), seed=7)

    @pytest.mark.parametrize("cut", ["exact", "projector"])
    @pytest.mark.parametrize("name", ["sqrt", "log", "exp"])
    def test_values_are_the_kept_part(self, name, cut):
        function = {"sqrt": matrix_sqrt, "log": matrix_log, "exp": exp_inverse}[name]
        scalar = {"sqrt": torch.sqrt, "log": torch.log, "exp": lambda x: torch.exp(-x)}[name]
        values, u = eigh(self.p)
        kept = scalar(values) * torch.tensor([1.0, 0, 0, 1, 1], dtype=F64)
        assert torch.allclose(
            function(self.p, subset="top:1+last:2", cut=cut), (u * kept.unsqueeze(-2)) @ u.mT, rtol=0, atol=1e-13
        )

    @pytest.mark.parametrize("subset", ["top:2", "last:2", "top:1+last:1", "~(top:1+last:1)"])
    @pytest.mark.parametrize("function", [matrix_sqrt, matrix_log, exp_inverse])
    def test_exact_cut_gradcheck(self, function, subset):
        assert torch.autograd.gradcheck(lambda m: function(m, subset=subset), self.p.clone().requires_grad_())

    def test_projector_cut_is_the_gradient_with_the_subspace_held(self):
        p = self.p.clone().requires_grad_()
        u = eigh(self.p).vectors
        projector = (u * torch.tensor([1.0, 1, 0, 0, 0], dtype=F64)) @ u.mT
        g = torch.randn(1, 5, 5, dtype=F64)
        (held,) = torch.autograd.grad(projector @ matrix_sqrt(p) @ projector, p, g)
        (ours,) = torch.autograd.grad(matrix_sqrt(p, subset="top:2", cut="projector"), p, g)
        inside = projector @ held @ projector  # directions that leave the subspace do not count
        assert torch.allclose(ours, inside, rtol=0, atol=1e-13)

    def test_a_partition_adds_up_for_the_exact_cut_only(self):
        p = self.p.clone().requires_grad_()
        g = torch.randn(1, 5, 5, dtype=F64)
        top, rest = EigenSubset.largest(2), EigenSubset.largest(2).complement()

        def grad(**options):
            return torch.autograd.grad(matrix_sqrt(p, **options), p, g)[0]

        whole = grad()
        assert relative(grad(subset=top) + grad(subset=rest), whole) < 1e-13
        assert relative(grad(subset=top, cut="projector") + grad(subset=rest, cut="projector"), whole) > 0.05

    def test_a_cut_between_close_eigenvalues_has_a_large_derivative_and_says_so(self):
        close = matrix(torch.tensor([2.0, 1.0 + 1e-7, 1.0, 0.5], dtype=F64)).requires_grad_()
        gap = EigenSubset.parse("top:2").relative_gap(eigh(close.detach()).values)
        assert float(gap) == pytest.approx(1e-7, rel=1e-3)
        g = torch.randn(1, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
        (exact,) = torch.autograd.grad(matrix_sqrt(close, subset="top:2"), close, g)
        (held,) = torch.autograd.grad(matrix_sqrt(close, subset="top:2", cut="projector"), close, g)
        assert exact.abs().max() > 1e5
        assert held.abs().max() < 10


def test_against_finite_differences_in_a_direction():
    p = matrix(torch.tensor([2.0, 2.0, 1.0, 1e-3], dtype=F64))[0]
    e = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
    e = (e + e.mT) / 2
    g = torch.randn(4, 4, dtype=F64)
    numeric = (central_difference(lambda m: spectral_function(m, torch.tanh), p, e, 1e-4) * g).sum()
    p.requires_grad_()
    (grad,) = torch.autograd.grad(spectral_function(p, torch.tanh), p, g)
    assert float((grad * e).sum()) == pytest.approx(float(numeric), rel=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_order_raises_rather_than_being_wrong(name):
    p = CASES["generic"][:1].clone().requires_grad_()

    def loss(m):
        return FUNCTIONS[name](m).square().sum() + m.pow(3).sum()

    (grad,) = torch.autograd.grad(loss(p), p, create_graph=True)
    with pytest.raises(SecondOrderError):
        grad.sum().backward()
    with pytest.raises(NotImplementedError):
        torch.func.hessian(loss)(p.detach()[0])
    with pytest.raises(SecondOrderError):
        torch.func.jacrev(torch.func.jacrev(loss))(p.detach()[0])


def test_vmap_equals_the_batched_call():
    p = CASES["generic"]
    for name, function in FUNCTIONS.items():
        assert torch.allclose(torch.func.vmap(function)(p), function(p), rtol=0, atol=1e-14), name

    def loss(m):
        return matrix_sqrt(m).sin().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss))(p)
    assert torch.allclose(per_sample, torch.func.grad(loss)(p), rtol=0, atol=1e-14)


def test_inside_a_compiled_model():
    p = CASES["generic"].clone().requires_grad_()

    def loss(m):
        return (matrix_sqrt(m).sin() + matrix_log(m + 1) + exp_inverse(m)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(p), p)
    (eager,) = torch.autograd.grad(loss(p), p)
    assert torch.allclose(ours, eager, rtol=0, atol=1e-13)


def test_compiled_for_any_size_and_number():
    """Fully, with numbers that the compiler treats as variables, such as the floor of a logarithm."""
    compiled = torch.compile(matrix_log, fullgraph=True, dynamic=True, backend="aot_eager")
    for p, eps in ((CASES["generic"], 0.1), (torch.eye(5, dtype=F64).repeat(3, 1, 1) * 3, 0.5)):
        assert torch.allclose(compiled(p, eps=eps), matrix_log(p), rtol=0, atol=1e-13)
    with pytest.raises(ArgumentError, match=r"above 0\.25 .* 0\.1\b"):  # the numbers of this call, not of the first
        compiled(torch.eye(4, dtype=F64).repeat(4, 1, 1) * 0.1, eps=0.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_in_and_out(dtype):
    p = (torch.eye(3) * 4).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = matrix_sqrt(p)
    assert q.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(q.double(), 2 * torch.eye(3, dtype=F64), rtol=0, atol=1e-6)
    q.sum().backward()
    assert p.grad.dtype == dtype


@pytest.mark.parametrize(
    "call, subject",
    [
        (lambda: matrix_sqrt(torch.randn(2, 3)), "P"),
        (lambda: matrix_sqrt(torch.eye(2), cut="projectr"), "cut"),
        (lambda: matrix_sqrt(torch.eye(2), subset="top:3"), "subset"),
        (lambda: matrix_sqrt(torch.eye(2), gradient="taylr"), "gradient rule"),
        (lambda: matrix_sqrt(torch.eye(2), backend="cup"), "backend"),
        (lambda: matrix_sqrt(torch.diag(torch.tensor([1.0, -0.5]))), "P"),
        (lambda: matrix_log(torch.diag(torch.tensor([1.0, 0.0]))), "P"),
        (lambda: matrix_log(torch.eye(2) * 1e-5, eps=1e-4), "P"),
        (lambda: matrix_power(torch.zeros(2, 2), -0.5), "P"),
    ],
)
def test_errors(call, subject):
    assert refused(call) == subject


def test_non_finite_matrices_are_named():
    with pytest.raises(NonFiniteError) as error:
        exp_inverse(torch.full((2, 2), torch.nan))
    assert error.value.samples == (0,)
