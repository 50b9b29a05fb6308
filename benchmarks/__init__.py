"""Benchmark scripts, run from a checkout; results are CSV files beside them."""
