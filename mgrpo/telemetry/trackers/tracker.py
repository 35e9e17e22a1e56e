"""The program that runs a tracker for `process.Tracker`: one JSON object per line, one answer for each."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from mgrpo.processes.json_lines import take_standard_streams
from mgrpo.processes.lifetime import adopt_orphans, kill_descendants

LAST_S = 5.0
"""Seconds in which the tracker of a dead run must finish, unless the run has set another limit."""
POLL_S = 1.0
"""Seconds between two checks that the run still exists."""

_END = object()


class TrackedRun(Protocol):
    """A run as recorded by a tracker. A method that cannot record raises."""

    where: str
    """Line with the tracker's address."""
    remark: str
    """Note on deviations from the request; "": none."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Record the numbers of a step."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record samples of a step."""

    def summary(self, values: dict[str, float]) -> None:
        """Record numbers of the whole run."""

    def close(self) -> None:
        """Send remaining data, however long that takes."""


def main() -> None:
    """Serve until the run closes the pipe; everything that this process has started ends with it."""
    parent = os.getppid()
    # Signals are for the run, which ends its tracker.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    # Trackers leave folders behind; short, because sockets have their paths in it.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t")
    questions, answers = take_standard_streams()
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    limit = _Limit()
    threading.Thread(target=_read, args=(questions, lines, parent, limit), name="reader", daemon=True).start()
    run: TrackedRun | None = None
    while (line := lines.get()) is not _END:
        answer: dict[str, Any] = {}
        ((verb, arguments),) = json.loads(line).items()
        try:
            if verb == "open":
                name, options, limit.last_s = arguments
                run = importlib.import_module(f"mgrpo.telemetry.trackers.{name}").open_run(**options)
                answer = {"where": run.where} | ({"remark": run.remark} if run.remark else {})
            elif run is not None:
                getattr(run, verb)(*arguments)
        except Exception as err:
            answer = {"error": f"{type(err).__name__}: {err}"}
        with contextlib.suppress(OSError):
            os.write(answers, json.dumps(answer).encode() + b"\n")
        if verb == "close":
            _leave()
    with contextlib.suppress(Exception):
        if run is not None:
            run.close()
    _leave()


@dataclass(slots=True)
class _Limit:
    last_s: float = LAST_S


def _read(questions: BinaryIO, lines: queue.SimpleQueue[Any], parent: int, limit: _Limit) -> None:
    """Queue the run's lines; after their end, or the run's, this process ends within `limit.last_s` seconds."""
    rest = b""
    while os.getppid() == parent:
        if not select.select([questions], [], [], POLL_S)[0]:
            continue
        chunk = os.read(questions.fileno(), 1 << 16)
        if not chunk:
            break
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            lines.put(line)
    lines.put(_END)
    threading.Timer(limit.last_s, _leave).start()


def _leave() -> None:
    kill_descendants(os.getpid())
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
