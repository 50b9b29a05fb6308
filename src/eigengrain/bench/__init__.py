"""Speed and memory, measured and written to files with the environment in them. Importing this imports no torch."""
