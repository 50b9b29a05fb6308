"""The command line: one file per command with its options and its run."""
