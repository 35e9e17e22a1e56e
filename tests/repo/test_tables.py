"""Tables of the pages: a row with a cell too many loses it when it is shown."""

from __future__ import annotations

import re

import pytest

from tests.repo.test_links import PAGES, ROOT


def uneven_rows(text: str) -> list[str]:
    """Rows of tables that have more or fewer cells than the head of their table."""
    found, cells, is_code = [], 0, False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if is_code or not line.startswith("|"):
            cells = 0
            continue
        count = len(re.findall(r"(?<!\\)\|", line.strip()))
        cells = cells or count
        if count != cells:
            found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_rows_have_as_many_cells_as_the_head(page):
    """A bar inside code also ends a cell, unless a backslash stands before it."""
    assert uneven_rows((ROOT / page).read_text(encoding="utf-8")) == []


def test_uneven_rows_are_found():
    """A check that sees no tables would always pass."""
    text = "| a | b |\n|---|---|\n| 1 | 2 | 3 |\n| `x\\|y` | 2 |\n\n```\n| one |\n| a | b |\n```\n"
    assert uneven_rows(text) == ["| 1 | 2 | 3 |"]
