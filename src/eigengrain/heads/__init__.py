"""Heads from a feature map to a vector: one file a family, one registry, torch only."""

from eigengrain.heads import first_order  # noqa: F401  (importing a family registers it)
from eigengrain.heads.base import Head
from eigengrain.heads.registry import create_head, list_heads, register_head

__all__ = ["Head", "create_head", "list_heads", "register_head"]
