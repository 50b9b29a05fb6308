"""The Triton kernels beside torch's products, in Triton's interpreter, which needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# the interpreter must be chosen before Triton is imported, and the device of a launch is the CPU
SCRIPT = """
import contextlib, importlib, json, torch
from spectral_cases import features, log_spectrum, relative
torch.cuda.device = lambda device: contextlib.nullcontext()
products, *modules = (
    importlib.import_module(f"eigengrain.functional.{name}")
    for name in ("_cuda.products", "matrix_products", "newton_schulz", "polar")
)
products._precision = lambda device, transposed: "tf32x3"
roots = {torch.float64: modules[1].root_by_products, torch.float32: modules[2].root_by_polar}
errors = {}
for d, n in ((32, 64), (40, 50)):
    # one that converges early, one that does not, and a singular one
    spectra = log_spectrum(d, 1e2), log_spectrum(d, 1e9), log_spectrum(4, 10)
    x = torch.cat([features(d, n, spectrum, seed=d) for spectrum in spectra])
    g = torch.randn(3, d, d, generator=torch.Generator().manual_seed(1))
    for dtype, root in roots.items():
        results = []
        for kernels in (products, None):
            for module in modules:
                module.kernels_on = lambda tensor, kernels=kernels: kernels
            own = x.to(dtype).requires_grad_()
            q = root(own, True)
            results.append((q.detach(), torch.autograd.grad(q, own, g.to(dtype))[0]))
        pairs = zip(*results, strict=True)
        errors[f"{dtype} {d}"] = [[relative(a[i : i + 1], b[i : i + 1]) for i in range(3)] for a, b in pairs]
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors():
    path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("d", [32, 40])  # a whole number of tiles, and not
@pytest.mark.parametrize("dtype, of_roots, of_gradients", [
    # for a singular covariance both are accurate only to these bounds, see docs/solvers.md
    ("torch.float64", (1e-13, 1e-11, 1e-8), (1e-10, 1e-6, 5e-3)),
    ("torch.float32", (1e-5, 1e-5, 1e-5), (1e-4, 1e-3, 1e-3)),
])  # fmt: skip
def test_kernels_and_torch_agree(errors, d, dtype, of_roots, of_gradients):
    roots, gradients = errors[f"{dtype} {d}"]
    assert all(error < bound for error, bound in zip(roots, of_roots, strict=True)), roots
    assert all(error < bound for error, bound in zip(gradients, of_gradients, strict=True)), gradients
