"""Metrics of a run on disk: one JSON object per step in metrics.jsonl, and the same numbers for the run's trackers.

Rank 0 owns one writer. A run never appends to another run's files: those are renamed first. A run that continues from a
checkpoint appends to its own files, without the steps after the checkpoint, which it repeats.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mgrpo.telemetry.files import move_aside, write_whole
from mgrpo.telemetry.trackers.sinks import Sink, Table


class MetricsWriter:
    """Appends metrics to `<output_dir>/metrics.jsonl`, and hands them to the sinks that are added.

    Args:
        resumed_after: the step after which this run continues the run that wrote these files; None: a new run.
        num_lines: lines that this run had written at that step; later lines are removed.
        clock: the time in seconds, for the limit of `close`.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        resumed_after: int | None = None,
        num_lines: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = Path(output_dir)
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        self.num_lines = 0
        """Lines that metrics.jsonl has."""
        if resumed_after is None:
            move_earlier_run(folder)
        else:
            self.num_lines = truncate(folder / "metrics.jsonl", num_lines)
        self.path = folder / "metrics.jsonl"
        self._lines = self.path.open("a", encoding="utf-8")
        self.sinks: list[Sink] = []
        """Trackers and the like. Make them after the writer, which moves the files of an earlier run aside."""

    def write(self, step: int, metrics: Mapping[str, float | list[int]]) -> None:
        """Record one step; the line is complete on disk on return. NaN and infinities become null.

        Lists (histograms) go into the line only, not to the sinks.
        """
        values = {
            name: [_number(item) for item in value] if isinstance(value, list) else _number(value)
            for name, value in metrics.items()
            if name != "step"
        }
        self._lines.write(json.dumps({"step": int(step), **values}, allow_nan=False) + "\n")
        self._lines.flush()
        self.num_lines += 1
        scalars = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for sink in self.sinks:
            sink.write(step, scalars)

    def reopen_if_gone(self) -> bool:
        """Open a new file where metrics.jsonl, or its folder, was deleted or replaced; returns whether it was."""
        own = os.fstat(self._lines.fileno())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(own, self.path.stat()):
                return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.open("a", encoding="utf-8")
        self._lines.close()
        self._lines, self.num_lines = lines, 0
        return True

    def table(self, step: int, table: Table) -> None:
        """Show samples in every sink."""
        for sink in self.sinks if table.rows else ():
            sink.table(step, table)

    def summary(self, values: Mapping[str, float]) -> None:
        """Give every sink the results of the run, numbers that belong to no step."""
        finite = {name: number for name, value in values.items() if (number := _number(value)) is not None}
        for sink in self.sinks:
            sink.summary(finite)

    def close(self, *, wait_s: float = 0.0) -> None:
        """Close the file, and the sinks in up to `wait_s` seconds together; a second call does nothing."""
        deadline = self._clock() + wait_s
        try:
            self._lines.close()
        finally:
            # All of them send at the same time.
            for sink in self.sinks:
                sink.finish()
            for sink in self.sinks:
                sink.close(wait_s=max(0.0, deadline - self._clock()))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def move_earlier_run(folder: Path) -> None:
    """Rename metrics, events and configuration of an earlier run in `folder`."""
    lines, events = folder / "metrics.jsonl", folder / "tensorboard"
    if events.exists() or (lines.exists() and lines.stat().st_size):
        move_aside([lines, events, folder / "config.yaml"])


def truncate(path: Path, num_lines: int) -> int:
    """Keep only the first `num_lines` complete lines of the file; returns the number of lines kept.

    Lines, not steps: an evaluation carries the step that it follows, and may have been written after the checkpoint.
    """
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    kept = [f"{line}\n" for line in lines[:num_lines]]
    write_whole(path, "".join(kept))
    return len(kept)


def _number(value: float) -> float | int | None:
    """A Python, numpy or one-element tensor value as a number for JSON; None where it is not finite."""
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
