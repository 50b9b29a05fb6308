"""Load the names of a package on first use (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package from a mapping of public names to the modules that define them.

    A name equal to the last part of its module is the module itself.

    Example:
        >>> find = loader("eigengrain", {"create_head": "eigengrain.heads", "heads": "eigengrain.heads"})
        >>> find("create_head").__name__, find("heads").__name__
        ('create_head', 'eigengrain.heads')
    """

    def __getattr__(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(exports[name])
        value = module if exports[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
