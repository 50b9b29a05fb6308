"""Plumage, whose images are drawn by :mod:`eigengrain.data.plumage`."""

from eigengrain.data.datasets.registry import Entry, register_dataset

# the reader is a name, because it imports torch
READER = "eigengrain.data.plumage:open_plumage"
ENTRY = register_dataset(Entry("plumage", "Plumage: drawn birds, no files needed", (), READER, drawn=True))
