"""Trajectories that wait for an environment: in order, and until none was given to anybody for too long.

A long queue that moves is no failure. Nor is one that stands still while environments are held and not asked anything: the
model is sampled or trained then, and no environment is late. The clock is slow then, and does not stop: a wait has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator

from mgrpo.environments.workers.host import Host
from mgrpo.processes.stopwatch import Stopwatch

Place = tuple[Host, int]

_IDLE_PACE = 0.1
"""Of the clock, while no environment is asked anything."""
_LEAST_WAIT_S = 0.05


class Queue:
    """For one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[asyncio.Future[Place], str]] = deque()
        self._served_at = 0.0
        """By `_clock`, when anybody was last."""
        self._num_asked = 0
        """Questions that are not answered yet."""
        self._asked_time = Stopwatch()

    @property
    def first(self) -> str | None:
        """The trajectory that is the next one to be served."""
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        return self._waiting[0][1] if self._waiting else None

    def join(self, trajectory: str, *, is_first: bool) -> asyncio.Future[Place]:
        """Wait behind all others, or before them."""
        place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_first else self._waiting.append)((place, trajectory))
        return place

    def serve_first(self, place: Place) -> None:
        self._served_at = self._clock
        self._waiting.popleft()[0].set_result(place)

    def refuse(self, why: str) -> None:
        """All who wait get a RuntimeError."""
        for place, _ in self._waiting:
            if not place.done():
                place.set_exception(RuntimeError(why))
        self._waiting.clear()

    async def wait(self, place: asyncio.Future[Place]) -> None:
        """Until it is done, or it takes too long."""
        since = self._clock
        while not place.done() and (left_s := max(since, self._served_at) + self._timeout_s - self._clock) > 0:
            await asyncio.wait({place}, timeout=max(left_s, _LEAST_WAIT_S))

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """An environment is asked something."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._num_asked += change
        self._asked_time.run(self._num_asked > 0)

    @property
    def _clock(self) -> float:
        return _IDLE_PACE * time.perf_counter() + (1 - _IDLE_PACE) * self._asked_time.seconds
