"""Readers of the data sets: one file each."""
