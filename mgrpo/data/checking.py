"""Checks rows one by one, wherever they come from, and summarizes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mgrpo.data.rows import BadRow, Contract

MOST_SHOWN = 20
"""Mistakes that one error names."""
FEW = 3
"""Rows that it names for each, in addition to the first."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A row as it was read."""

    line: int
    """Line in a JSONL file, otherwise number of the row; from 1."""
    text: str
    """JSON; empty where the row cannot be JSON."""
    problem: BadRow | None = None
    """Reason why the row cannot be JSON."""
    lost_columns: Sequence[str] = ()
    """Columns that JSON cannot hold, null in `text`."""


@dataclass(slots=True)
class Mistake:
    """A mistake of some rows, with the message for the first."""

    problem: str
    lines: list[int] = field(default_factory=list)
    """Lines of the first row and a few more."""
    num_rows: int = 0

    def add(self, line: int) -> None:
        """Count one more row."""
        self.num_rows += 1
        if len(self.lines) <= FEW:
            self.lines.append(line)

    def __str__(self) -> str:
        more = self.num_rows - 1
        others = ", ".join(map(str, self.lines[1:])) + (", ..." if more > FEW else "")
        return self.problem if not more else f"{self.problem} ({more:,} more such row{'s' * (more > 1)}: {others})"


@dataclass(slots=True, kw_only=True)
class Summary:
    """Facts about the rows of a source, so that a run need not read them again."""

    num_rows: int = 0
    """Good rows."""
    verifiers: dict[str, int] = field(default_factory=dict)
    """Line of the first use, by name."""
    columns: dict[str, int] = field(default_factory=dict)
    """Line of the first row that has it, by name."""
    first_text: int | None = None
    """Line of the first row whose prompt is text."""
    first_conversation: int | None = None
    """Line of the first row with messages."""
    mistakes: dict[str, Mistake] = field(default_factory=dict)
    """The first `MOST_SHOWN`, by the text of the expectation."""
    num_problems: int = 0
    """Bad rows."""
    lost_columns: list[str] = field(default_factory=list)
    """Columns with values that JSON cannot hold."""

    def good(self, rows: Iterable[Row], contract: Contract) -> Iterator[Row]:
        """The rows that satisfy the contract; every row is counted in the summary."""
        for row in rows:
            try:
                self._add(row, contract)
            except (BadRow, RecursionError) as err:
                self.num_problems += 1
                expected = err.expected if isinstance(err, BadRow) else str(err)
                if expected in self.mistakes or len(self.mistakes) < MOST_SHOWN:
                    self.mistakes.setdefault(expected, Mistake(str(err))).add(row.line)
            else:
                yield row

    def to_json(self) -> dict[str, Any]:
        """Values for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Summary:
        """The inverse of `to_json`."""
        mistakes = {expected: Mistake(**mistake) for expected, mistake in values["mistakes"].items()}
        return cls(**{**values, "mistakes": mistakes})

    def _add(self, row: Row, contract: Contract) -> None:
        record = _parsed(row)
        is_conversation, verifiers = contract.check(record)
        for name in verifiers:
            self.verifiers.setdefault(name, row.line)
        for name in record:
            self.columns.setdefault(name, row.line)
        if is_conversation and self.first_conversation is None:
            self.first_conversation = row.line
        if not is_conversation and self.first_text is None:
            self.first_text = row.line
        self.lost_columns += [name for name in row.lost_columns if name not in self.lost_columns]
        self.num_rows += 1


def rows_of_lines(lines: Iterable[bytes]) -> Iterator[Row]:
    r"""Rows of a JSONL file opened for reading bytes, whose lines end with \n alone: JSON may hold other separators."""
    for number, raw in enumerate(lines, start=1):
        raw = raw.removeprefix(_BYTE_ORDER_MARK).strip()
        if not raw:
            continue
        try:
            yield Row(number, raw.decode())
        except UnicodeDecodeError as err:
            yield Row(number, "", _not_json(raw[:60].decode(errors="replace"), err))


def rows_of_records(
    records: Iterable[object], contract: Contract, *, lost_columns: Sequence[str] = ()
) -> Iterator[Row]:
    """Rows that are Python values; `lost_columns` were taken out of all of them."""
    for number, record in enumerate(records, start=1):
        try:
            text, lost = contract.to_json(record)
        except BadRow as err:
            yield Row(number, "", err)
        else:
            yield Row(number, text, lost_columns=(*lost, *lost_columns))


def _parsed(row: Row) -> Any:
    if row.problem:
        raise row.problem
    try:
        return json.loads(row.text)
    except (ValueError, RecursionError) as err:
        raise _not_json(row.text[:60], err) from err


def _not_json(found: str, err: Exception) -> BadRow:
    return BadRow(f"{found!r} ({err})", "one JSON object on the line")
