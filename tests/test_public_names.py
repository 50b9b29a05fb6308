"""Names that others rely on: this fails when one of them vanishes."""

import pytest

import eigengrain as eg

FUNCTIONAL = """covariance triu_vector matrix_from_triu eigh Eigh solver_repairs debug spectral_function ScalarFunction
matrix_sqrt matrix_power matrix_log exp_inverse sqrt_covariance sqrt_covariance_of_subsets scaling_factor newton_schulz
isqrt_covariance quintic_sqrt
mtp_sqrt mpa_sqrt EigenSubset GradientRule BACKENDS GRADIENTS SOLVERS""".split()


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional(name):
    assert hasattr(eg.functional, name)
    assert name in eg.functional.__all__


TOP = """explain functional heads models EigenSubset EigenSaliency EigenPerturbation Head CovarianceHead create_head
list_heads register_head CovarianceNet create_model list_backbones parameter_groups load_weights
from_pretrained save_pretrained __version__""".split()


def test_top_level():
    assert set(eg.__all__) == set(TOP)
    for name in TOP:
        assert hasattr(eg, name)
        assert name in dir(eg)
    assert set(eg.functional.__all__) == set(FUNCTIONAL)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        eg.nothing  # noqa: B018
