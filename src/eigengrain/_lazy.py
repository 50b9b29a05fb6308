"""Names of a package that are loaded on first use (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its name.
        exports: public name to the module that defines it, or that it is the last name of.

    Example:
        >>> find = loader("eigengrain", {"create_head": "eigengrain.heads", "heads": "eigengrain.heads"})
        >>> find("create_head").__name__, find("heads").__name__
        ('create_head', 'eigengrain.heads')
        >>> find("create_haed")
        Traceback (most recent call last):
        AttributeError: module 'eigengrain' has no attribute 'create_haed'
    """

    def __getattr__(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(exports[name])
        value = module if exports[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
