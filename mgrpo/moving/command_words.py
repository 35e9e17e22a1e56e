"""Names of trainers whose commands have another form: verl's and slime's.

The names are data, in verl.csv and slime.csv; `scripts.command_config` makes a config of them. The columns:

    status    alias: sets its targets; combined: sets them together with other names, in `verl` or `slime`; no effect; refused
    default   the value that the trainer takes where the name is not given
    convert   conversion of its text to the value of the targets, in `command_config.CONVERT`; empty: none
    neutral   values without effect, between bars

A name that ends in * stands for all that begin so and have no row.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TRAINERS = ("verl", "slime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One name of another trainer."""

    name: str
    status: str
    default: str
    convert: str
    targets: tuple[str, ...]
    neutral: tuple[str, ...]
    sentence: str


@cache
def words(trainer: str) -> dict[str, Word]:
    """Every name of the trainer's table, in its order."""
    with Path(__file__).with_name(f"{trainer}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {
        row["name"]: Word(
            name=row["name"],
            status=row["status"],
            default=row["default"],
            convert=row["convert"],
            targets=tuple(row["targets"].split()),
            neutral=tuple(filter(None, row["neutral"].split("|"))),
            sentence=row["sentence"],
        )
        for row in rows
    }
    assert len(found) == len(rows), f"{trainer}.csv has a name twice"
    return found


def find(trainer: str, name: str) -> Word | None:
    """The row of a name: its own, else the longest that ends in * and begins like it."""
    table = words(trainer)
    families = [word for word in table.values() if word.name.endswith("*") and name.startswith(word.name[:-1])]
    return table.get(name) or max(families, key=lambda word: len(word.name), default=None)
