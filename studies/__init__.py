"""The tables and figures of the paper, run from a checkout: ``python -m studies``."""
