"""Names that users import: a test fails if one of them disappears."""

import inspect
import subprocess
import sys

import pytest

import eigengrain as eg
from eigengrain.models import create

FUNCTIONAL = """covariance triu_vector matrix_from_triu eigh Eigh solver_repairs debug spectral_function ScalarFunction
matrix_sqrt matrix_power matrix_log exp_inverse sqrt_covariance sqrt_covariance_of_subsets scaling_factor newton_schulz
isqrt_covariance quintic_sqrt
mtp_sqrt mpa_sqrt EigenSubset GradientRule choose_dtype choose_solver rounding_floor BACKENDS GRADIENTS SOLVERS""".split()


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional(name):
    assert hasattr(eg.functional, name)
    assert name in eg.functional.__all__


TOP = """explain functional heads models EigenSubset EigenSaliency EigenPerturbation Head CovarianceHead create_head
list_heads register_head CovarianceNet create_model list_backbones parameter_groups load_weights
from_pretrained save_pretrained open_run __version__""".split()


def test_top_level():
    assert set(eg.__all__) == set(TOP)
    for name in TOP:
        assert hasattr(eg, name)
        assert name in dir(eg)
    assert set(eg.functional.__all__) == set(FUNCTIONAL)
    with pytest.raises(AttributeError):
        eg.nothing  # noqa: B018


def test_names_that_need_captum_are_listed_only_with_it():
    script = """
import sys
sys.modules["captum"] = None  # as if it were not installed
from eigengrain import *
import eigengrain, pydoc
assert "create_model" in pydoc.render_doc(eigengrain)
assert "EigenSaliency" not in dir(eigengrain)
assert EigenPerturbation is eigengrain.EigenPerturbation
try:
    eigengrain.EigenSaliency
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "eigengrain[explain]" in done.stdout, done.stderr


def test_a_type_checker_refuses_names_that_do_not_exist(tmp_path):
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text("import eigengrain\neigengrain.create_model\neigengrain.create_modell\n")
    options = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *options, str(user), eg.__file__]
    out = subprocess.run(command, capture_output=True, text=True).stdout
    assert "user.py:3: error" in out
    assert "user.py:2" not in out


def test_the_signature_of_create_model_shows_its_defaults():
    written = inspect.getsource(eg.create_model)
    assert 'head: str | None = "mpncov+seb"' in written
    defaults = inspect.signature(eg.create_model).parameters
    assert defaults["head"].default == create.DEFAULT_HEAD
    assert defaults["num_classes"].default == create.DEFAULT_CLASSES
