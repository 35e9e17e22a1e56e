"""TensorBoard's event files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mgrpo.telemetry.trackers.sinks import Table

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class EventFile:
    """A file in TensorBoard's record format, written in the calling thread: it is complete after every step.

    Args:
        resumed_after: the step after which this run continues the run that wrote the folder's other files.
        settings: the configuration, shown among the texts; empty shows none.
    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, resumed_after: int | None = None, *, settings: str = "") -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self._file: BinaryIO = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_after is not None:
            # TensorBoard drops this step and later ones of earlier files.
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=resumed_after + 1, session_log=start))
        if settings:
            self.text(resumed_after or 0, "config", settings)

    @property
    def where(self) -> str:
        """The command that shows the curves."""
        return f"curves   tensorboard --logdir {self.folder}"

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record every scalar at `step`."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def table(self, step: int, table: Table) -> None:
        """Record one text for each row."""
        for number, row in enumerate(table.rows):
            cells = zip(table.columns, row, strict=True)
            self.text(step, f"{table.name}/{number}", "\n".join(f"{name}: {cell}" for name, cell in cells))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text; its lines are indented, so that TensorBoard, which reads Markdown, shows them as code."""
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

    def summary(self, values: Mapping[str, float]) -> None:
        """Do nothing: the curves end with these numbers."""

    def finish(self) -> None:
        """Do nothing: everything recorded is in the file."""

    def close(self, *, wait_s: float = 0.0) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()
