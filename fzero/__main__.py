"""Runs `fzero` as `python -m fzero`."""

import sys

from fzero.cli import main

if __name__ == "__main__":
    sys.exit(main())
