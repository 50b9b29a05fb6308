"""A report of a training: its accuracy, what the model gets wrong, and how far to trust it."""

from eigengrain.report.measured import ClassRow, Measured, class_rows, confused_pairs, measure
from eigengrain.report.page import render_page

__all__ = ["ClassRow", "Measured", "class_rows", "confused_pairs", "measure", "render_page"]
