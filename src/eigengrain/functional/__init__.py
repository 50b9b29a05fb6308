"""Covariances, spectral functions and their gradients: tensors in, tensors out, torch only.

Eigenvalues are in descending order everywhere, as in the paper. Results are float64 for float64 input, else float32.
"""

from eigengrain.functional.covariance import covariance, matrix_from_triu, triu_vector
from eigengrain.functional.eigen import BACKENDS, Eigh, debug, eigh, rounding_floor, solver_repairs
from eigengrain.functional.gradient_rules import GRADIENTS, GradientRule
from eigengrain.functional.inputs import choose_dtype
from eigengrain.functional.newton_schulz import isqrt_covariance, mpa_sqrt, mtp_sqrt, newton_schulz, quintic_sqrt
from eigengrain.functional.scalar_functions import ScalarFunction
from eigengrain.functional.scaling_eigen_branch import scaling_factor
from eigengrain.functional.spectral import exp_inverse, matrix_log, matrix_power, matrix_sqrt, spectral_function
from eigengrain.functional.sqrt_covariance import choose_solver, sqrt_covariance, sqrt_covariance_of_subsets
from eigengrain.functional.subsets import EigenSubset
from eigengrain.names import SOLVERS

__all__ = [
    "BACKENDS",
    "GRADIENTS",
    "SOLVERS",
    "EigenSubset",
    "Eigh",
    "GradientRule",
    "ScalarFunction",
    "choose_dtype",
    "choose_solver",
    "covariance",
    "debug",
    "eigh",
    "exp_inverse",
    "isqrt_covariance",
    "matrix_from_triu",
    "matrix_log",
    "matrix_power",
    "matrix_sqrt",
    "mpa_sqrt",
    "mtp_sqrt",
    "newton_schulz",
    "quintic_sqrt",
    "rounding_floor",
    "scaling_factor",
    "solver_repairs",
    "spectral_function",
    "sqrt_covariance",
    "sqrt_covariance_of_subsets",
    "triu_vector",
]
