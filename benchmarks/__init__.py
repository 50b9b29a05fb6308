"""Benchmarks, run from a checkout: ``python -m benchmarks``."""

import os

# the profiler, which counts the memory of the CPU, writes its own progress to stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
