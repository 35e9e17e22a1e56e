"""Rank 0 leads: it works while the other learners wait. Once a run has started, the only place that tests for rank 0.

While they wait, rank 0 sends the others a heartbeat at intervals, so that they give up soon after rank 0 dies, not after the
time-out of the training's collectives, which is hours.
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
"""A learner that receives nothing from rank 0 for this long, heartbeats included, gives up: the channel's time-out."""

T = TypeVar("T")


class Stopped(Exception):
    """The run ends before its last step: it was asked to (SIGTERM), or cannot go on for the reason in the message."""


class Rejoining(Protocol):
    """Engines that were started again, which get the weights while rank 0's work waits for engines."""

    def wants_rejoin(self) -> bool:
        """Whether there are any. Rank 0 only."""

    def rejoin(self) -> None:
        """Give them the weights. Collective."""


class Lead:
    """One rank's part in working and waiting. Every rank makes one and makes the same calls in the same order."""

    def __init__(self, stop: threading.Event | None = None, pulse: Pulse | None = None) -> None:
        """Collective over all learners.

        Args:
            stop: set on rank 0 when the run is to save its state and end.
            pulse: is told what this rank does.
        """
        self.pulse = pulse or Pulse()
        self.channel = BroadcastChannel(timeout_s=PATIENCE_S)
        self.stop = stop or threading.Event()
        self._leads = self.channel.rank == 0
        self._thread = Background("rank-0")
        self._aside = Background("rank-0-aside")
        """The thread for work that is done while other work goes on in `_thread`."""
        self._is_aside = False

    def run(self, task: Callable[[], T], *, may_stop: bool = False, rejoining: Rejoining | None = None) -> T | None:
        """Rank 0: the result of `task`; None on the others, which wait for it. See `work`."""
        if self._leads:
            return self.work(task, may_stop=may_stop, rejoining=rejoining)
        self.follow(rejoining)
        return None

    def work(self, task: Callable[[], T], *, may_stop: bool = False, rejoining: Rejoining | None = None) -> T:
        """Rank 0: the result of `task`, which runs in a thread, while the others `follow`.

        Args:
            may_stop: `task` waits for engines, and may have to for long: it is cancelled when rank 0 is asked to end.
            rejoining: gives the weights to engines that were started again meanwhile; the others pass theirs to `follow`.

        Raises:
            Stopped: on all ranks, with `may_stop`, once rank 0 has been asked to end; `task` may still be running then.
            Exception: what `task` raised; `follow` raises a RuntimeError with its message on the others.
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
        """The other ranks: wait until rank 0's work is done. They give `rejoining` where rank 0 does."""
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
        """Rank 0: the result of `task`; None on the others, which do not wait."""
        return task() if self._leads else None

    def share(self, make: Callable[[], T]) -> T:
        """The value that rank 0 makes, on every rank: JSON carries it, so that tuples become lists on all of them."""
        made = self.call(lambda: {"json": np.frombuffer(json.dumps(make()).encode(), np.uint8)})
        return json.loads(self.channel.arrays(made)["json"].tobytes())

    def fail(self, message: str) -> None:
        """Rank 0, before it exits: send the waiting ranks the reason."""
        self.channel.fail(message)

    def close(self) -> None:
        """Take no more work."""
        self._thread.close()
        self._aside.close()
