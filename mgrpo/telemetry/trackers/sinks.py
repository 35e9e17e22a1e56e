"""The protocol of a sink: a receiver of the run's reports in addition to its own files, such as a tracker."""

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
    """Receiver of rank 0's reports. No call may wait for a network, and only `write` and `table` may fail."""

    @property
    def where(self) -> str:
        """Line with the tracker's address; "": not known yet."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the numbers of a step, or of the evaluation after it."""

    def table(self, step: int, table: Table) -> None:
        """Record samples of a step."""

    def summary(self, values: Mapping[str, float]) -> None:
        """Record the results of the run: numbers without a step."""

    def finish(self) -> None:
        """Begin to send remaining data; no further records follow. A second call does nothing."""

    def close(self, *, wait_s: float) -> None:
        """End, after `finish`; remaining data may take up to `wait_s` seconds. A second call does nothing."""


def utf8(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
