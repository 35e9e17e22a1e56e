"""Schedule and destination of training states. Pure, with the caller's clock: runs and simulations of failures decide alike.
No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum


class Due(Enum):
    """Destination of the state after a step."""

    NOTHING = "nothing"
    NEAR = "near"
    """Copies on disks of two nodes."""
    STORAGE = "storage"
    """The same where there are such disks, and files on storage."""


class Schedule:
    """Schedule of rank 0, which decides for all ranks: their clocks differ."""

    def __init__(
        self, *, every_steps: int, every_s: float, has_near: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            every_steps: a state is due after each multiple; 0 or less: none by steps.
            every_s: and after the first step that ends as long after the newest one was taken; 0 or less: none by time.
            has_near: those by time alone stay on disks of the nodes.
            clock: in seconds.
        """
        self.every_steps, self.every_s, self._clock = every_steps, every_s, clock
        self._by_time = Due.NEAR if has_near else Due.STORAGE
        self._newest = clock()

    def due(self, step: int, *, may_wait: bool = False) -> Due:
        """Destination of the state after training step `step`.

        Args:
            may_wait: this is not a good step for one that is due by time alone, which is then due after the next.
        """
        if self.every_steps > 0 and step % self.every_steps == 0:
            return Due.STORAGE
        is_late = self.every_s > 0 and self._clock() - self._newest >= self.every_s
        return self._by_time if is_late and not may_wait else Due.NOTHING

    def saved(self) -> None:
        """Record that a state is taken now, for any reason."""
        self._newest = self._clock()
