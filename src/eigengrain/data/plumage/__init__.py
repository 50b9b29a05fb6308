"""Drawn birds for demonstrations and tests: a fine-grained data set without files, with masks of what tells the classes."""

from eigengrain.data.plumage.cache import cache_folder
from eigengrain.data.plumage.dataset import Plumage, open_plumage
from eigengrain.data.plumage.scene import Nuisance
from eigengrain.data.plumage.sheet import contact_sheet
from eigengrain.data.plumage.species import SPECIES, Marks

__all__ = ["SPECIES", "Marks", "Nuisance", "Plumage", "cache_folder", "contact_sheet", "open_plumage"]
