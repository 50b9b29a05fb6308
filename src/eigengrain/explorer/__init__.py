"""A local web page: choose a model, an image and a split of its eigenvalues, and see at once what follows."""
