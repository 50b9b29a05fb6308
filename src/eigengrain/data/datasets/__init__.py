"""The data sets: one file each, with its reader and its entry in the registry."""
