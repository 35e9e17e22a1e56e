"""Order of the rounds that a sender begins and settles in one weight sync."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from mgrpo.sync.group import POLL_S
from mgrpo.sync.transport import Round

Failed = Callable[[int, RuntimeError], None]
"""Drops an engine that failed."""


class Delivery:
    """The rounds that go to one engine.

    Args:
        begin: begins to send the round of this number.
        num_rounds: at least one.
    """

    def __init__(self, begin: Callable[[int], Round], num_rounds: int) -> None:
        self._begin, self._num_rounds = begin, num_rounds
        self._under_way: deque[Round] = deque()
        self.begun = 0
        """Number of rounds that have begun."""

    @property
    def has_more(self) -> bool:
        """True if a round has not begun."""
        return self.begun < self._num_rounds

    @property
    def is_over(self) -> bool:
        """True if all rounds have arrived."""
        return not self.has_more and not self._under_way

    def begin(self) -> bool:
        """Begin the next round unless two are under way; returns True if it has begun."""
        if len(self._under_way) > 1:
            return False
        self._under_way.append(self._begin(self.begun))
        self.begun += 1
        return True

    def settle(self) -> bool:
        """Settle the oldest round under way if it is due; returns True if it was."""
        if not self._under_way or not self._under_way[0].is_due():
            return False
        self._under_way[0].settle()
        self._under_way.popleft()
        return True


def deliver(deliveries: Mapping[int, Delivery], failed: Failed) -> None:
    """Send to all of these engines; one that fails is dropped.

    Engines take turns to begin a round, in the same order on all ranks, as NCCL requires. All of them are polled meanwhile, so that
    a failure is found when it happens, between two rounds and during the last ones.
    """
    left = dict(deliveries)
    while left:
        turn = min(
            (engine for engine in left if left[engine].has_more), key=lambda engine: left[engine].begun, default=None
        )
        has_moved = False
        for engine, delivery in list(left.items()):
            try:
                has_moved |= (engine == turn and delivery.begin()) or delivery.settle()
            except RuntimeError as err:
                failed(engine, err)
                del left[engine]
                continue
            if delivery.is_over:
                del left[engine]
        if not has_moved:
            time.sleep(POLL_S)
