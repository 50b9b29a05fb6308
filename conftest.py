"""Files without doctests where an optional package is missing."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["src/eigengrain/functional/_cuda/products.py"]
