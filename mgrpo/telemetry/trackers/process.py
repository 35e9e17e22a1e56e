"""A tracker in a process of its own, which isolates the run from it.

Side effects of importing a tracker's package, its threads and programs, a stalled network and crashes stay in the child. The run
writes to a pipe that never blocks. A child whose run closes the pipe, or has died, finishes and ends with all its own children
within `TrackerLimits.last_s` seconds.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgrpo.processes.json_lines import Child, exchange
from mgrpo.telemetry.trackers.sinks import Table
from mgrpo.telemetry.trackers.tracker import LAST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLimits:
    """Limits after which a run continues, or ends, without a tracker."""

    unanswered: int = 20_000
    """Most unanswered messages; a tracker that falls further behind is dropped."""
    silent_s: float = 10.0
    """Seconds to wait at the end before the run prints that it waits."""
    last_s: float = LAST_S
    """Seconds in which the process must finish after the run has closed the pipe or died."""


class Tracker:
    """One tracker, as a sink."""

    def __init__(
        self,
        name: str,
        opening: Mapping[str, Any],
        *,
        say: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
        limits: TrackerLimits = TrackerLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process without waiting for it.

        Args:
            name: a module of this package.
            opening: keyword arguments of the module's `open_run`.
            say: prints the line with the tracker's address, once.
            warn: prints the reason why the run continues without the tracker, once.
            clock: the time in seconds, for the limits of `close`.
        """
        self.name, self.where = name, ""
        self._say, self._warn, self._limits, self._clock = say, warn, limits, clock
        self._unanswered, self._is_finishing = 0, False
        self._child: Child | None = Child("mgrpo.telemetry.trackers.tracker")
        self._send({"open": [name, dict(opening), limits.last_s]})

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._send({"write": [step, dict(scalars)]})

    def table(self, step: int, table: Table) -> None:
        """See `Sink`."""
        self._send({"table": [step, table.name, table.columns, table.rows]})

    def summary(self, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._send({"summary": [dict(values)]})

    def finish(self) -> None:
        """See `Sink`."""
        if not self._is_finishing:
            self._is_finishing = True
            self._send({"close": []})

    def close(self, *, wait_s: float) -> None:
        """See `Sink`."""
        self.finish()
        limits = self._limits
        began, is_said = self._clock(), wait_s < limits.silent_s
        while self._child and self._unanswered:
            passed = self._clock() - began
            if passed >= limits.silent_s and not is_said:
                self._say(f"waiting up to {wait_s - passed:.0f} s for {self.name} to send what is left")
                is_said = True
            left = max(0.0, wait_s - passed)
            exchange([self._child], min(limits.silent_s, left))
            self._listen()
            if self._child and self._unanswered and not left:
                self._leave(wait_s)
                return
        if self._child:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(limits.last_s)
        self._end()

    def _send(self, message: dict[str, Any]) -> None:
        if self._child is None:
            return
        self._unanswered += 1
        self._child.send([message])
        self._child.pump()
        self._listen()
        if self._unanswered > self._limits.unanswered:
            self._give_up(f"has not answered {self._limits.unanswered} messages")

    def _listen(self) -> None:
        """Read the answers that have arrived."""
        child = self._child
        if child is None:
            return
        for answer in child.answers():
            self._unanswered -= 1
            if "where" in answer:
                self.where = answer["where"]
                self._say(self.where)
            if "remark" in answer:
                self._warn(f"{self.name}: {answer['remark']}")
            if "error" in answer:
                self._give_up(f"failed: {answer['error']}")
                return
        if child.is_over:
            self._give_up(child.how_it_ended)

    def _leave(self, waited_s: float) -> None:
        """Stop waiting; the child has `TrackerLimits.last_s` seconds more."""
        child, self._child = self._child, None
        assert child is not None
        child.close_pipes()
        threading.Thread(target=child.process.wait, name=f"{self.name}-end", daemon=True).start()
        self._warn(
            f"{self.name} has not finished within {waited_s:.0f} s, and has {self._limits.last_s:.0f} s more; "
            "metrics.jsonl has everything"
        )

    def _give_up(self, why: str) -> None:
        self._end()
        self._warn(f"{self.name} {why}; the run goes on without it; metrics.jsonl has everything")

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
