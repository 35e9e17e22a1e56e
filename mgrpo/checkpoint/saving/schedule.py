"""When a training state is due, and which ones stay. Pure, with a clock of the caller's: runs and simulations of failures decide
alike. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence


class Schedule:
    """Rank 0 decides by it, and the others do as it says: their clocks differ."""

    def __init__(self, *, every_steps: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            every_steps: a state is due after each multiple; 0 or less: none by steps.
            every_s: and after the first step that ends as long after the newest one was taken; 0 or less: none by time.
            clock: in seconds.
        """
        self.every_steps, self.every_s, self._clock = every_steps, every_s, clock
        self._newest = clock()

    def is_due(self, step: int, *, may_wait: bool = False) -> bool:
        """Whether the state after training step `step` is to be saved.

        Args:
            may_wait: this is no good step for one that is due by time alone, which is then due after the next.
        """
        is_by_step = self.every_steps > 0 and step % self.every_steps == 0
        is_by_time = self.every_s > 0 and self._clock() - self._newest >= self.every_s
        return is_by_step or (is_by_time and not may_wait)

    def saved(self) -> None:
        """A state is being taken now, for whatever reason."""
        self._newest = self._clock()


def superseded(steps: Iterable[int], complete: Sequence[int], *, keep_last_n: int) -> list[int]:
    """The steps whose states are to be deleted: older than the newest complete one, and not among those that are kept.

    Args:
        steps: all that have a folder, also incomplete ones.
        complete: those that are complete, ascending.
        keep_last_n: how many of these are kept, at least one; -1: all.
    """
    if not complete:
        return []
    kept = set(complete if keep_last_n < 0 else complete[-max(keep_last_n, 1) :])
    return [step for step in steps if step < complete[-1] and step not in kept]
