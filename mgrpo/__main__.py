"""`python -m mgrpo`: the `mgrpo` command."""

from __future__ import annotations

import sys

from mgrpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
