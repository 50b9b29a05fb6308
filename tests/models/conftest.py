import eigengrain._torchvision  # noqa: F401  (before any test module imports timm or torchvision)
