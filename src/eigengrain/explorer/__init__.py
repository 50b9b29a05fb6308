"""A local web page that shows what the large and the small eigenvalues of a trained model contribute."""
