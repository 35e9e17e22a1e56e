"""Where a run can be watched beside its own files: what every such place takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Cell = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows to be read by a person. What a model wrote is as it was, apart from what is no text in UTF-8."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Sink(Protocol):
    """Takes what rank 0 reports. No call may wait for a network, and none but `write` and `table` may fail."""

    @property
    def where(self) -> str:
        """A line that says where to look; empty while that is not known."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of a step, or of the evaluation after it."""

    def table(self, step: int, table: Table) -> None:
        """Samples of a step."""

    def summary(self, values: Mapping[str, float]) -> None:
        """What came of the run: numbers that are not a step's."""

    def finish(self) -> None:
        """Nothing more follows: begin to send what has not been sent. A second call does nothing."""

    def close(self, *, wait_s: float) -> None:
        """After `finish`: up to `wait_s` seconds are left to send what has not been sent. A second call does nothing."""


def utf8(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which no file can hold."""
    return text.encode("utf-8", "replace").decode()
