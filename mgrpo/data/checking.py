"""Rows are read and checked a chunk at a time: from bytes or records to JSON texts, and to a summary of what was found.

A task is a dict of JSON values that names a part of a file; it is done here or in a worker process (`worker`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgrpo.data.pieces import parquet_batches
from mgrpo.data.rows import Contract

MOST_SHOWN = 20
"""Bad rows that one error names."""
RECORDS_A_BATCH = 2048


@dataclass(slots=True, kw_only=True)
class Summary:
    """What there is to know of checked rows without looking at them again."""

    num_rows: int = 0
    verifiers: dict[str, int] = field(default_factory=dict)
    """Line of the first use, by name."""
    columns: dict[str, int] = field(default_factory=dict)
    """Line of the first row that has it, by name."""
    first_text: int | None = None
    """Line of the first row whose prompt is text."""
    first_conversation: int | None = None
    """Line of the first row with messages."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Line and error of the first bad rows."""
    num_problems: int = 0
    lost_columns: list[str] = field(default_factory=list)
    """Columns with values that JSON cannot hold."""

    def add_problem(self, line: int, problem: str) -> None:
        """Count a bad row, and remember it if it is among the first."""
        self.num_problems += 1
        if len(self.problems) < MOST_SHOWN:
            self.problems.append((line, problem))

    def extend(self, later: Summary) -> None:
        """Add what was found in the lines that follow."""
        self.num_rows += later.num_rows
        for mine, others in ((self.verifiers, later.verifiers), (self.columns, later.columns)):
            for name, line in others.items():
                mine.setdefault(name, line)
        self.first_text = later.first_text if self.first_text is None else self.first_text
        self.first_conversation = (
            later.first_conversation if self.first_conversation is None else self.first_conversation
        )
        self.problems += later.problems[: MOST_SHOWN - len(self.problems)]
        self.num_problems += later.num_problems
        self.lost_columns += [name for name in later.lost_columns if name not in self.lost_columns]

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """The inverse of `to_json`."""
        return cls(**{**values, "problems": [(line, problem) for line, problem in values["problems"]]})


@dataclass(slots=True)
class Checked:
    """Good rows as JSON texts, and the summary of all."""

    lines: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)

    def add(self, line: int, record: object, text: str, contract: Contract) -> None:
        """Check a row; a bad one is a problem of the summary."""
        summary = self.summary
        try:
            is_conversation, verifiers = contract.check(record)
        except (ValueError, RecursionError) as err:
            summary.add_problem(line, str(err))
            return
        for name in verifiers:
            if name not in summary.verifiers:
                summary.verifiers[name] = line
        for name in record:
            if name not in summary.columns:
                summary.columns[name] = line
        if is_conversation:
            if summary.first_conversation is None:
                summary.first_conversation = line
        elif summary.first_text is None:
            summary.first_text = line
        summary.num_rows += 1
        self.lines.append(line)
        self.texts.append(text)


def check_lines(data: bytes, *, first_line: int, contract: Contract) -> Checked:
    r"""Check the lines of a JSONL file; lines end with \n alone, as JSON text may hold every other separator."""
    checked = Checked()
    for line, raw in enumerate(data.split(b"\n"), start=first_line):
        raw = raw.removeprefix(b"\xef\xbb\xbf").strip()
        if not raw:
            continue
        try:
            text = raw.decode()
            record = json.loads(text)
        except (ValueError, RecursionError) as err:
            found = raw[:60].decode(errors="replace")
            checked.summary.add_problem(line, f"found {found!r}, expected one JSON object on the line ({err})")
            continue
        checked.add(line, record, text, contract)
    return checked


def check_records(records: Iterable[object], *, first: int, contract: Contract) -> Checked:
    """Check rows that are Python values; their numbers begin with `first`."""
    checked = Checked()
    for number, record in enumerate(records, start=first):
        try:
            text, lost = contract.to_json(record)
        except ValueError as err:
            checked.summary.add_problem(number, str(err))
            continue
        checked.summary.lost_columns += [name for name in lost if name not in checked.summary.lost_columns]
        # What is stored is what is checked: tuples have become lists, numpy values numbers.
        checked.add(number, json.loads(text), text, contract)
    return checked


def check_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Do a task: check a part of a file and write its good rows to the table `out`. Returns the summary as JSON."""
    from mgrpo.data.tables import Writer, row_batches

    contract = Contract(**task["contract"])
    summary = Summary()
    with Writer(task["out"]) as writer:
        for checked in _parts(task, contract):
            for batch in row_batches(checked):
                writer.add(batch)
            summary.extend(checked.summary)
    return summary.to_json()


def _parts(task: Mapping[str, Any], contract: Contract) -> Iterator[Checked]:
    if task["kind"] == "jsonl":
        with open(task["path"], "rb") as file:
            file.seek(task["start"])
            data = file.read(task["end"] - task["start"])
        yield check_lines(data, first_line=task["first"], contract=contract)
        return
    number = task["first"]
    for records in parquet_batches(Path(task["path"]), task["row_groups"]):
        yield check_records(records, first=number, contract=contract)
        number += len(records)
