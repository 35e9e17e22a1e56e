"""All metrics that a run can log: the rows of metrics.csv, from which docs/metrics.md and the charts of a report are made.

The columns:

    section   the section of docs/metrics.md, in which rows stand in the file's order
    name      as it stands in metrics.jsonl; {n} and {k} stand for a number, any other word in braces for text without a slash
    unit      the unit of a value
    of        the trainer that introduced the name, "own" for this one
    meaning   the meaning of a value
    chart     the title of the chart that draws it, a row of report/charts.csv; empty: a chart of its own
    line      its name in that chart; empty for a name with braces, whose line is named by the text that stands for them
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PLACEHOLDER = re.compile(r"(\{\w+\})")
_NUMBERS = ("{n}", "{k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A row; the fields are the columns above."""

    section: str
    name: str
    unit: str
    of: str
    meaning: str
    chart: str
    line: str

    @property
    def is_pattern(self) -> bool:
        """True if the row stands for many names."""
        return "{" in self.name

    @property
    def is_held_out(self) -> bool:
        """True for a metric of evaluations, not of training steps."""
        return self.name.startswith("eval/")

    def match(self, name: str) -> re.Match[str] | None:
        """The match of a logged name that this row describes, with a group for each of its braces."""
        return _pattern(self.name).fullmatch(name)


@cache
def metrics() -> tuple[Metric, ...]:
    """All rows in their order."""
    with Path(__file__).with_name("metrics.csv").open(encoding="utf-8", newline="") as file:
        return tuple(Metric(**row) for row in csv.DictReader(file))


def find(name: str) -> Metric | None:
    """The row that describes a logged name, or has this very name; an exact row before one with braces."""
    rows = [row for row in metrics() if row.name == name] or [row for row in metrics() if row.match(name)]
    return rows[0] if rows else None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    pieces = [
        (r"(\d+)" if piece in _NUMBERS else "([^/]+)") if piece.startswith("{") else re.escape(piece)
        for piece in PLACEHOLDER.split(name)
    ]
    return re.compile("".join(pieces))
