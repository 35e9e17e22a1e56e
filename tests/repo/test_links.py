"""Links between pages, whether they are read in the repository or on the site."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tools.docs.links import anchors, links, resolved, slug, with_targets

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "csrc", "requirements")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")))
)


@cache
def anchors_of(page: str) -> set[str]:
    return anchors((ROOT / page).read_text(encoding="utf-8"))


def broken(page: str, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in links(text):
        target = resolved(link, page)
        if not link.is_relative:
            continue
        if not (ROOT / target).exists():
            found.append(f"{link.target}: no such file")
        elif link.anchor and target.endswith(".md") and link.anchor not in anchors_of(target):
            found.append(f"{link.target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page, monkeypatch):
    """A reader who follows a link to a page that has moved gets an error page and no advice."""
    monkeypatch.chdir(ROOT)
    assert broken(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_broken_links_are_found(monkeypatch):
    """A check that reads no links would always pass."""
    monkeypatch.chdir(ROOT)
    text = (
        '[a](gone.md) ![b](gone.svg) [c](data.md#gone) [d](../README.md) [e](#gone)\n[f]: gone/f.md\n<img src="g.png">'
    )
    assert [line.split(":")[0] for line in broken("docs/rewards.md", text)] == [
        "gone.md", "gone.svg", "data.md#gone", "#gone", "gone/f.md", "g.png",
    ]  # fmt: skip


def test_code_holds_no_links():
    """`f[i](x)` in a code block would be reported as a missing file x."""
    assert list(links("`a[0](b)` ``[`](c)`` \n```python\nhandlers[name](value)\n```\n<!-- [d](e) -->")) == []


def test_targets_are_replaced_where_they_stand():
    """The site's links are made this way: a word of the text that equals a target must stay."""
    text = "data.md [data.md](data.md#rows) `[x](data.md)` [y](data.md)"
    assert with_targets(text, lambda link: f"../{link.target}") == (
        "data.md [data.md](../data.md#rows) `[x](data.md)` [y](../data.md)"
    )


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Programs: `code`, `code_stdio`", "programs-code-code_stdio"),
        ("C++ and CUDA - how", "c-and-cuda---how"),
        ("See [the page](data.md)", "see-the-page"),
    ],
)
def test_anchors_are_those_of_the_repository(heading, anchor):
    """Computed from GitHub's rule: lower case, no punctuation, a hyphen for each space."""
    assert slug(heading) == anchor
    assert anchors(f"# {heading}\n## {heading}\n```\n# comment\n```\n") == {anchor, f"{anchor}-1"}
