"""A worker process and the environments in it: which serve a trajectory, which are idle, which cannot be ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from mgrpo.environments.offered.catalog import Description, Spec
from mgrpo.environments.workers.limits import WorkerLimits
from mgrpo.environments.workers.link import Link
from mgrpo.processes.json_lines import Message

START_LIMIT_S = 120.0
"""Long, because imports from a slow network disk take long."""


def load_question(specs: Sequence[Spec], limits: WorkerLimits) -> Message:
    """What a worker is asked first; its first environment is then instance 0."""
    return {
        "ask": "load",
        "instance": 0,
        "specs": [spec.to_json() for spec in specs],
        "limits": dataclasses.asdict(limits),
        "limit_s": START_LIMIT_S,
    }


def description_in(answer: Message) -> Description:
    """What the worker offers.

    Raises:
        ValueError: an environment cannot be built.
    """
    if "error" in answer:
        raise ValueError(f"the tools cannot be started: {answer['error']}")
    return Description.from_json(answer["description"])


class Host:
    """Counts the environments of one worker, at most `capacity`."""

    def __init__(self, link: Link, capacity: int) -> None:
        self.link, self.capacity = link, capacity
        self.is_ready = False
        """Whether it has loaded."""
        self.held: dict[int, tuple[str, float]] = {}
        """Which trajectory an instance serves, and since when."""
        self.stuck: set[int] = set()
        """Instances with a call that cannot be ended; while there are any, the worker takes no new trajectory."""
        self._alive: set[int] = {0}
        self._idle: list[tuple[int, float]] = [(0, time.monotonic())]
        """Since when; who was idle longest comes first."""
        self._next = 1

    @property
    def room(self) -> int:
        """How many more trajectories it can serve now."""
        if not self.is_ready or self.stuck or self.link.is_over:
            return 0
        return len(self._idle) + self.capacity - len(self._alive)

    @property
    def instances(self) -> list[int]:
        """All that exist."""
        return sorted(self._alive)

    def take(self, trajectory: str) -> int:
        """An instance for the trajectory, idle or new."""
        if self._idle:
            number, _ = self._idle.pop()
        else:
            number, self._next = self._next, self._next + 1
            self._alive.add(number)
        self.held[number] = (trajectory, time.monotonic())
        return number

    def put_back(self, number: int) -> None:
        """It may serve another trajectory."""
        self._idle.append((number, time.monotonic()))

    def take_idle(self, idle_s: float) -> list[int]:
        """Instances that have been idle for so long, which are to be closed."""
        before = time.monotonic() - idle_s
        taken = [number for number, since in self._idle if since < before]
        del self._idle[: len(taken)]
        return taken

    def forget(self, number: int) -> None:
        """It does not exist any more."""
        self._alive.discard(number)
        self.stuck.discard(number)
