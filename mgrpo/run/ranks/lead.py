"""Work of rank 0 while the other learners wait. Once a run has started, the only place that tests for rank 0.

Meanwhile rank 0 sends heartbeats, so that the others fail soon after rank 0 dies, not after the time-out of the training's
collectives, which is hours.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Protocol, TypeVar

import numpy as np

from mgrpo.parallel.broadcast import Action, BroadcastChannel
from mgrpo.processes.background import Background
from mgrpo.run.ranks.liveness import Pulse

HEARTBEAT_S = 5.0
POLL_S = 0.2
PATIENCE_S = 60.0
"""Time-out of the channel in seconds: a learner that receives neither messages nor heartbeats from rank 0 fails."""

T = TypeVar("T")


class Stopped(Exception):
    """The run ends before its last step: stopped (SIGTERM), or unable to continue for the reason in the message."""


class Rejoining(Protocol):
    """Sends the weights to restarted engines while rank 0's work waits for engines."""

    def wants_rejoin(self) -> bool:
        """True if a restarted engine needs the weights. Rank 0 only."""

    def rejoin(self) -> None:
        """Send the weights. Collective."""


class Lead:
    """One rank's part in working and waiting. Every rank makes one and makes the same calls in the same order."""

    def __init__(self, stop: threading.Event | None = None, pulse: Pulse | None = None) -> None:
        """Collective over all learners.

        Args:
            stop: set on rank 0 when the run is to save its state and end.
            pulse: records this rank's part of the work for heartbeats.
        """
        self.pulse = pulse or Pulse()
        self.channel = BroadcastChannel(timeout_s=PATIENCE_S)
        self.stop = stop or threading.Event()
        self._leads = self.channel.rank == 0
        self._thread = Background("rank-0")
        self._aside = Background("rank-0-aside")
        """Thread for work that runs beside the work in `_thread`."""
        self._is_aside = False

    def run(self, task: Callable[[], T], *, may_stop: bool = False, rejoining: Rejoining | None = None) -> T | None:
        """Return the result of `task` on rank 0, None on the others, which wait for it. See `work`."""
        if self._leads:
            return self.work(task, may_stop=may_stop, rejoining=rejoining)
        self.follow(rejoining)
        return None

    def work(self, task: Callable[[], T], *, may_stop: bool = False, rejoining: Rejoining | None = None) -> T:
        """Rank 0: run `task` in a thread and return its result, while the others `follow`.

        Args:
            may_stop: `task` may wait long for engines: the wait ends when the run is stopped.
            rejoining: sends the weights to engines that restart meanwhile; the others pass theirs to `follow`.

        Raises:
            Stopped: on all ranks, with `may_stop`, once the run is stopped; `task` may still be running then.
            Exception: the exception of `task`; on the others `follow` raises a RuntimeError with its message.
        """
        self._stop_if_asked(may_stop)
        done = (self._aside if self._is_aside else self._thread).submit(task)
        beaten = time.monotonic()
        while not wait([done], timeout=min(POLL_S, HEARTBEAT_S)).done:
            self._stop_if_asked(may_stop)
            if rejoining is not None and rejoining.wants_rejoin():
                self.channel.action(Action.REJOIN)
                self._rejoin(rejoining)
            elif time.monotonic() - beaten > HEARTBEAT_S:
                self.channel.action(Action.HEARTBEAT)
                self.pulse.go_on()
                beaten = time.monotonic()
        self._stop_if_asked(may_stop)
        try:
            result = done.result()
        except Exception as err:
            self.channel.action(Action.ERROR, f"rank 0: {err}")
            raise
        self.channel.action(Action.RUN)
        return result

    def follow(self, rejoining: Rejoining | None = None) -> None:
        """The other ranks: wait until rank 0's work is done. `rejoining` must be given if rank 0 gives it."""
        while (action := self.channel.action()) in (Action.HEARTBEAT, Action.REJOIN):
            self.pulse.go_on()
            if action is Action.REJOIN:
                self._rejoin(rejoining)
        if action is Action.STOP:
            raise Stopped

    def _rejoin(self, rejoining: Rejoining | None) -> None:
        assert rejoining is not None, "every rank gives it where rank 0 does"
        self._is_aside = True
        try:
            rejoining.rejoin()
        finally:
            self._is_aside = False

    def _stop_if_asked(self, may_stop: bool) -> None:
        if may_stop and self.stop.is_set():
            self.channel.action(Action.STOP)
            raise Stopped

    def call(self, task: Callable[[], T]) -> T | None:
        """Return the result of `task` on rank 0, None on the others, which do not wait."""
        return task() if self._leads else None

    def share(self, make: Callable[[], T]) -> T:
        """Broadcast rank 0's value of `make()` as JSON: tuples become lists on every rank."""
        made = self.call(lambda: {"json": np.frombuffer(json.dumps(make()).encode(), np.uint8)})
        return json.loads(self.channel.arrays(made)["json"].tobytes())

    def fail(self, message: str) -> None:
        """Rank 0, before it exits: send the waiting ranks the reason."""
        self.channel.fail(message)

    def close(self) -> None:
        """Stop the threads; no more work is accepted."""
        self._thread.close()
        self._aside.close()
