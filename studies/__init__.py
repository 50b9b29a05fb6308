"""Studies of covariance pooling as commands: each writes a CSV, a picture and a page. Importing this imports no torch."""
