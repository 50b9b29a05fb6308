"""Docstrings as they should be read: a star in a shape stands for itself, and a constant has no words but its own."""

import re

from sphinx.application import Sphinx


def mend(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    text = "\n".join(lines).strip()
    # a constant without a comment gets what Python says of its type, a field of a named tuple its number
    of_its_type = what in ("data", "attribute") and text == str(type(obj).__doc__ or "").strip()
    if of_its_type or text.startswith(("Built-in ", "Alias for field number")):
        lines[:] = []
    # (*, d, d) begins no emphasis
    lines[:] = [re.sub(r"(?<!`)\(\*(?=[,)])", r"(\\*", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
