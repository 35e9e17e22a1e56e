"""Prints docs/figures.md: `python -m tests.unit.planner.figures`."""

from __future__ import annotations

import sys

from tests.unit.planner.figures.page import page

if __name__ == "__main__":
    sys.stdout.write(page())
