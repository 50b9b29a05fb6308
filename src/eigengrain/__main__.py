"""``python -m eigengrain``: the same as the script ``eigengrain``."""

import sys

from eigengrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
