"""``python -m eigengrain``, where the script ``eigengrain`` is not on the path."""

import sys

from eigengrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
