"""Metrics of a run on disk: one JSON object per step in metrics.jsonl, the same numbers as TensorBoard scalars.

Rank 0 owns one writer. A run never appends to another run's files: those are renamed first. A run that continues from a
checkpoint appends to its own files, without the steps after the checkpoint, which it repeats.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mgrpo.telemetry.files import move_aside, write_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends metrics to `<output_dir>/metrics.jsonl` and `<output_dir>/tensorboard/`.

    Args:
        resumed_after: the step after which this run continues the run that wrote these files; None: a new run.
        num_lines: lines that this run had written at that step; later lines are removed.
    """

    def __init__(self, output_dir: str | Path, *, resumed_after: int | None = None, num_lines: int = 0) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.num_lines = 0
        """Lines of metrics.jsonl."""
        if resumed_after is None:
            move_earlier_run(folder)
        else:
            self.num_lines = truncate(folder / "metrics.jsonl", num_lines)
        self.path = folder / "metrics.jsonl"
        self._lines = self.path.open("a", encoding="utf-8")
        self._events = open_events(folder / "tensorboard", resumed_after)

    def write(self, step: int, metrics: Mapping[str, float | list[int]]) -> None:
        """Record one step; the line is complete on disk on return. NaN and infinities become null.

        Lists (histograms) go into the line only, not into the event file.
        """
        values = {
            name: [_number(item) for item in value] if isinstance(value, list) else _number(value)
            for name, value in metrics.items()
            if name != "step"
        }
        self._lines.write(json.dumps({"step": int(step), **values}, allow_nan=False) + "\n")
        self._lines.flush()
        self.num_lines += 1
        if self._events is not None:
            scalars = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self._events.write(step, scalars)

    def text(self, step: int, name: str, text: str) -> None:
        """Show a text in TensorBoard, as it is."""
        if self._events is not None:
            self._events.text(step, name, text)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._lines.close()
        if self._events is not None:
            self._events.close()

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


def open_events(folder: Path, resumed_after: int | None = None) -> EventFile | None:
    """A TensorBoard event file in `folder`; None, with one warning, where tensorboard is not installed."""
    try:
        return EventFile(folder, resumed_after)
    except ImportError as err:
        logger.warning("no TensorBoard files: %s; pip install tensorboard", err)
        return None


class EventFile:
    """A file in TensorBoard's record format, written in the calling thread: it is complete after every step."""

    def __init__(self, folder: Path, resumed_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self._file: BinaryIO = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_after is not None:
            # TensorBoard drops this step and later ones of earlier files.
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=resumed_after + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record every scalar at `step`."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, which its lines' indentation shows as code: TensorBoard reads Markdown."""
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shown = "".join(f"    {line}\n" for line in text.splitlines())
        value = self._summary.Value(
            tag=name,
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, string_val=[shown.encode("utf-8", "replace")]),
        )
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


def _number(value: float) -> float | int | None:
    """A Python, numpy or one-element tensor value as a number for JSON; None where it is not finite."""
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
