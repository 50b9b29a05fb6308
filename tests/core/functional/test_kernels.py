"""The Triton kernels beside torch's products, in Triton's interpreter, which needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# the interpreter must be chosen before Triton is imported, and the device of a launch is the CPU
SCRIPT = """
import contextlib, importlib, json, math, torch
from spectral_cases import F64, features, generator, log_spectrum, matrix, relative
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.use_deterministic_algorithms(True)  # new memory is NaN until it is written
products, covariance, *modules = (
    importlib.import_module(f"eigengrain.functional.{name}")
    for name in ("_cuda.products", "covariance", "matrix_products", "newton_schulz", "polar")
)
products._precision = lambda device, transposed: "tf32x3"
matrix_products, newton_schulz, polar = modules
F32, results = torch.float32, {}

def both(function, *arguments):
    out = []
    for kernels in (products, None):
        for module in modules:
            module.kernels_on = lambda tensor, kernels=kernels: kernels
        # some kernels overwrite their arguments
        out.append(function(*(each.clone() if isinstance(each, torch.Tensor) else each for each in arguments)))
    return out

def add(name, dtype, case, pair, todo=None, kept=None):
    # the error of the samples in todo, which is infinite if another one is written, or not kept
    own, other = (each if each.ndim > 2 else each.reshape(-1, 1, 1) for each in pair)
    error = relative(own, other) if todo is None else relative(own[todo > 0], other[todo > 0])
    if todo is not None:
        rest = own[todo == 0]
        error = error if (rest.isnan().all() if kept is None else torch.equal(rest, kept[todo == 0])) else math.inf
    assert own.shape == other.shape and own.dtype == other.dtype
    results.setdefault(f"{name} {dtype}", {})[str(case)] = error

def value(name, case, value):
    results.setdefault(name, {})[str(case)] = value

def randn(*shape, dtype=F64, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=F64).to(dtype)

def symmetric(spectra, dtype=F64):
    return torch.cat([matrix(values.double(), seed) for seed, values in enumerate(spectra)]).to(dtype)

small, products._LARGE = products._LARGE, 0  # large tiles, of side 64
for d, batch in ((64, 1), (40, 3), (70, 2)):
    some = torch.tensor([1, 0, 1], dtype=torch.int32)[:batch]
    for dtype in (F32, F64):
        a, wide, square = (randn(batch, d, n, dtype=dtype, seed=n) for n in (50, 60, d))
        for todo in (None, some):
            for transposed in (False, True):
                b = randn(batch, 45, 50, dtype=dtype) if transposed else randn(batch, 50, 45, dtype=dtype)
                own = products.product(a, b, transposed=transposed, todo=todo)
                add("product", dtype, (d, transposed, 0, todo is None), (own, a @ (b.mT if transposed else b)), todo)
                own = products.product(a, a if transposed else a.mT, transposed=transposed, mirror=1, todo=todo)
                add("product", dtype, (d, transposed, 1, todo is None), (own, a @ a.mT), todo)
        own = products.product(square, wide, todo=some, keep=wide)
        add("product that keeps", dtype, d, (own, square @ wide), some, kept=wide)

        base, p = (matrix_products.symmetric(randn(batch, d, d, dtype=dtype, seed=seed)) for seed in (1, 2))
        p2 = p @ p
        for case, order in (("contiguous", (0, 1, 2)), ("batch last", (1, 2, 0))):
            inverse = tuple(order.index(k) for k in range(3))
            others = [each.permute(order).contiguous().permute(inverse) for each in (base, p2, p2 + 4 * p)]
            own = products.with_product(*others, 0.3)
            add("with_product", dtype, (d, case), (own, base + 0.3 * p2 @ (p2 + 4 * p)))

        e = symmetric([-torch.linspace(0, 0.8, d)] * batch, dtype)
        times = torch.tensor([3, 0, 2], dtype=torch.int32)[:batch]
        for most in (3, 4):
            other = e.clone()
            for i in range(batch):
                for _ in range(times[i]):
                    other[i] = 2 * other[i] + other[i] @ other[i]
            add("square_repeatedly", dtype, (d, most), (products.square_repeatedly(e.clone(), times, most), other))

        # tr M(I - M)^2 is 0.0024 d and 0.063 d, and 0.063 d for a sample that is not in todo
        around = 0.01 * torch.linspace(-1, 1, d)
        m = symmetric([0.95 + around, 0.7 + around, 0.7 + around][:batch], dtype)
        todo = torch.tensor([1, 1, 0], dtype=torch.int32)[:batch]
        for limit in (0.0022, 0.06, math.inf):
            own, other = both(polar.last_step, m, todo, limit * d)
            add("last_step", dtype, (d, limit), (own[0], other[0]), todo)
            value(f"further {dtype}", (d, limit), own[1].tolist())

        add("frobenius", dtype, d, both(matrix_products.frobenius, a))

        if dtype == F32 or d == 40:
            entry = torch.tensor([0, 3, 4], dtype=torch.int32)[:batch]
            intervals = [polar._ENTRIES[i] for i in entry]
            b = symmetric([torch.linspace(low, 0.99 * high, d) for low, high in intervals], dtype)
            s = randn(batch, d, d, dtype=dtype)
            add("corner_of_sign", dtype, d, both(polar.corner_of_sign, b, s - s.mT, entry))

            m = symmetric([torch.linspace(0, 1, d), torch.linspace(0.5, 1, d), torch.logspace(-3, 0, d)][:batch], dtype)
            steps = (polar._SAFE, *polar._LAST)
            for count, leave, todo in ((1, False, None), (2, True, some), (3, True, None), (4, False, some)):
                (t, left), (other, other_left) = both(polar.run_of_steps, m, steps[:count], todo, leave)
                add("run_of_steps", dtype, (d, count, "t"), (t, other), todo)
                assert (left is None) == (other_left is None) == (not leave)
                if leave:
                    add("run_of_steps", dtype, (d, count, "m"), (left, other_left), todo)

        if d == 40:
            x = 10 + randn(batch, d, 9, 15)
            x[:, :9] = x[:, :9, :1, :1]  # constant channels
            last = x.to(memory_format=torch.channels_last)
            for case, each in (
                ("double", x), ("float", x.float()), ("bfloat16", x.bfloat16()), ("half channels_last", last.half()),
                ("slice", x.flatten(2)[..., :40]),
            ):
                for factor, scale in ((None, True), (torch.tensor([0.125, 1.0, 3.0])[:batch], False)):
                    own = products.centre(each, dtype, scale=scale, factor=factor)
                    other = covariance.centre(each)
                    if not scale:
                        other = other * math.sqrt(each[0, 0].numel()) * factor[:, None, None]
                    assert own.dtype == dtype and own[:, :9].count_nonzero() == 0
                    assert (own.stride(1) == 1) == ("last" in case)
                    add("centre", dtype, (d, case, scale), (own.double(), other))

            p = symmetric([torch.linspace(0, most, d) for most in (1.0, 1e-3, 100.0)][:batch], dtype)
            batch_last = p.permute(1, 2, 0).contiguous().permute(2, 0, 1)
            add("exp_minus_twice", dtype, d, both(matrix_products.exp_minus_twice, batch_last))

    # sums of a large gradient over the positions, and features beside a large constant channel
    dx, factor = randn(batch, d, 50, dtype=F32), torch.tensor(2.0**125)
    own = products.centre(dx, F32, scale=True, factor=factor.expand(batch))
    add("centre", F32, (d, "large"), (own, covariance.centre(dx, F32) * factor))
    x = randn(batch, d, 50, dtype=F32)
    x[:, 1] = 1e25
    add("constant channel", F32, d, [polar.scaled(xc)[2] for xc, _ in both(polar._centred, x)])

products._LARGE = small
p = symmetric([log_spectrum(32, kappa) ** 2 for kappa in (1e2, 1e10)])
own, other = both(matrix_products.roots, p)
for name in ("y", "z", "scale"):
    add("roots", F64, name, (getattr(own, name), getattr(other, name)))
value("far", 32, own.far.tolist())
for name, pair in zip(("x", "<G, Y>"), zip(*both(matrix_products.lyapunov, own, randn(2, 32, 32, dtype=F32)))):
    add("lyapunov", F64, name, pair)

roots = {F64: newton_schulz.root_by_products, F32: polar.root_by_polar}
for d, n in ((32, 64), (40, 50)):
    products._LARGE = small if d == 32 else 0
    # one that converges early, one that does not, and a singular one
    spectra = log_spectrum(d, 1e2), log_spectrum(d, 1e9), log_spectrum(4, 10)
    x = torch.cat([features(d, n, spectrum, seed=d) for spectrum in spectra])
    g = randn(3, d, d, dtype=F32, seed=1)
    for dtype, root in roots.items():
        def root_and_gradient(x):
            q = root(x.requires_grad_(), True)
            return q.detach(), torch.autograd.grad(q, x, g.to(dtype))[0]
        pairs = zip(*both(root_and_gradient, x.to(dtype)), strict=True)
        errors = [[relative(a[i : i + 1], b[i : i + 1]) for i in range(3)] for a, b in pairs]
        value("root", f"{dtype} {d}", errors)
print(json.dumps(results))
"""


FUNCTIONS = {
    # bounds of the relative error in float32 and float64
    "product": (1e-6, 1e-14),
    "product that keeps": (1e-6, 1e-14),
    "with_product": (1e-6, 1e-14),
    "square_repeatedly": (1e-6, 1e-14),
    "last_step": (1e-6, 1e-14),
    "frobenius": (1e-6, 1e-14),
    "centre": (1e-6, 1e-14),
    "exp_minus_twice": (1e-4, 1e-11),
    "run_of_steps": (1e-4, 1e-12),
    "corner_of_sign": (2e-3, 1e-11),
    "constant channel": (1e-6, None),
    "roots": (None, 1e-6),  # of a condition number of 1e10
    "lyapunov": (None, 1e-10),
}


@pytest.fixture(scope="module")
def results():
    path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_with_kernels_and_without(results, function, dtype):
    bound = FUNCTIONS[function][dtype == "torch.float64"]
    errors = results.get(f"{function} {dtype}", {})
    assert bool(errors) == (bound is not None)
    assert all(error < bound for error in errors.values()), errors


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_samples_in_todo_above_the_limit_go_on(results, dtype):
    further = {0.0022: [1, 1, 0], 0.06: [0, 1, 0], float("inf"): [0, 0, 0]}
    sizes = ((64, 1), (40, 3), (70, 2))
    assert results[f"further {dtype}"] == {
        f"({d}, {limit})": further[limit][:batch] for d, batch in sizes for limit in further
    }


def test_a_matrix_that_has_not_converged_is_far(results):
    assert results["far"] == {"32": [0, 1]}


@pytest.mark.parametrize("d", [32, 40])  # a whole number of tiles, and not
@pytest.mark.parametrize("dtype, of_roots, of_gradients", [
    # for a singular covariance both are accurate only to these bounds, see docs/solvers.md
    ("torch.float64", (1e-13, 1e-11, 1e-8), (1e-10, 1e-6, 5e-3)),
    ("torch.float32", (1e-5, 1e-5, 1e-5), (1e-4, 1e-3, 1e-3)),
])  # fmt: skip
def test_kernels_and_torch_agree(results, d, dtype, of_roots, of_gradients):
    roots, gradients = results["root"][f"{dtype} {d}"]
    assert all(error < bound for error, bound in zip(roots, of_roots, strict=True)), roots
    assert all(error < bound for error, bound in zip(gradients, of_gradients, strict=True)), gradients
