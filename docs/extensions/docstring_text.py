"""Clean up docstrings: escape stars in shapes, and drop the docstrings that constants inherit from their types."""

import re

from sphinx.application import Sphinx


def clean(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    text = "\n".join(lines).strip()
    # a constant without a comment inherits the docstring of its type, a field of a named tuple its number
    inherited = what in ("data", "attribute") and text == str(type(obj).__doc__ or "").strip()
    if inherited or text.startswith(("Built-in ", "Alias for field number")):
        lines[:] = []
    # (*, d, d) is not emphasis
    lines[:] = [re.sub(r"(?<!`)\(\*(?=[,)])", r"(\\*", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", clean)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
