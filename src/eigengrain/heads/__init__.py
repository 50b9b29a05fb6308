"""Heads from a feature map to a vector: one file a family, one registry, torch only."""

# importing a family registers its heads
from eigengrain.heads import (  # noqa: F401
    bilinear,
    compact,
    covariance,
    first_order,
    kernel,
    low_rank,
    moment,
    rank_one,
    subspace,
)
from eigengrain.heads.base import Head
from eigengrain.heads.covariance import CovarianceHead
from eigengrain.heads.registry import create_head, list_heads, register_head

__all__ = ["CovarianceHead", "Head", "create_head", "list_heads", "register_head"]
