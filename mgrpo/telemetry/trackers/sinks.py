"""The protocol of a sink: a place beside the run's own files that shows what it reports, such as a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Cell = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows for a reader. Text of a model is unchanged, except for halves of surrogate pairs, which UTF-8 cannot encode."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Sink(Protocol):
    """Receives the reports of rank 0. No call may wait for a network, and only `write` and `table` may fail."""

    @property
    def where(self) -> str:
        """A line that says where to look; empty as long as that is not known."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the numbers of a step, or of the evaluation after it."""

    def table(self, step: int, table: Table) -> None:
        """Record samples of a step."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Record the results of the run: numbers that belong to no step."""

    def finish(self) -> None:
        """Begin to send what has not been sent: nothing more follows. A second call does nothing."""

    def close(self, *, wait_s: float) -> None:
        """End, after `finish`; what has not been sent may take up to `wait_s` seconds. A second call does nothing."""


def utf8(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which no file can hold."""
    return text.encode("utf-8", "replace").decode()
