"""``python -m fastpar``: the same as the ``fastpar`` command."""

import sys

from fastpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
