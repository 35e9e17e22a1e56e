"""The outcomes as a section of a page: `python -m tools.peers.trl_suite.table CHECKOUT OUT docs/moving/trl.md`."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.docs import markdown
from tools.peers.trl_suite.session import Outcome, kept

BEGIN, END = "<!-- outcomes of TRL's tests -->", "<!-- end of outcomes -->"
WHY = Path(__file__).with_name("why.csv")
"""Why tests fail: the name of a test, with or without its parameters, and a sentence."""


def explanations() -> dict[str, str]:
    with WHY.open(encoding="utf-8") as file:
        return {row["test"]: row["why"] for row in csv.DictReader(file)}


def section(version: str, results: Mapping[str, Outcome], why: Mapping[str, str]) -> Iterator[str]:
    """Lines of the section.

    Args:
        why: of tests that fail; of the others nothing is said, and what it lacks is replaced by the beginning of the error.
    """
    count = Counter(result["outcome"] for result in results.values())
    meaningful = count["passed"] + count["failed"]
    yield (
        f"TRL {version}, {len(results)} tests: {count['skipped']} skipped by TRL itself, {count['not meaningful']} not meaningful here, "
        f"{meaningful} meaningful. **Of these {count['passed']} pass.**"
    )
    yield ""
    failed = {short(name): result["note"] for name, result in results.items() if result["outcome"] == "failed"}
    yield from markdown.table(
        ("fails", "why"),
        ((f"`{name}`", why.get(name) or why.get(function(name)) or f"`{note}`") for name, note in failed.items()),
    )
    yield ""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        if result["outcome"] != "failed":
            groups.setdefault((result["outcome"], result["note"]), []).append(function(short(name)))
    yield from markdown.table(
        ("outcome", "reason", "number", "tests"),
        ((*group, str(len(names)), _listed(names)) for group, names in sorted(groups.items(), reverse=True)),
    )


def _listed(names: list[str]) -> str:
    """Tests by their names, each once, with the number of its sets of parameters."""
    return ", ".join(f"`{name}`" + (f" ({times})" if times > 1 else "") for name, times in Counter(names).items())


def short(name: str) -> str:
    """The name of a test without its class."""
    return name.partition("::")[2]


def function(name: str) -> str:
    """The name of a test without its parameters."""
    return name.partition("[")[0]


def replaced(page: str, lines: list[str]) -> str:
    """A page with `lines` between its two marks.

    Raises:
        ValueError: a mark is not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}, between which the outcomes go")
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="the clone of TRL, for its version")
    parser.add_argument("out", type=Path, help="the folder with results.json")
    parser.add_argument("page", type=Path)
    given = parser.parse_args()
    version = (given.checkout / "VERSION").read_text(encoding="utf-8").strip()
    lines = list(section(version, kept(given.out / "results.json"), explanations()))
    text = replaced(given.page.read_text(encoding="utf-8"), lines)
    given.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
