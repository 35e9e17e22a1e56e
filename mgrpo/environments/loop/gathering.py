"""Sampling requests of trajectories to the engines, gathered into batches: in rounds, or on arrival.

In rounds a batch is sent when every trajectory that is alive waits for its next turn: an engine's batch then depends on the
prompts and answers alone, not on how long a tool took. Otherwise no trajectory waits for another one's tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """The next turn of one trajectory, or the first one of all trajectories of a prompt."""

    prompt: Prompt
    place: int
    """The prompt's number among all that were ever begun."""
    sample: int
    """The trajectory's number among those of its prompt."""
    turn: int
    tokens: np.ndarray
    """`[len]` int32, everything before the turn."""
    num_samples: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    """Further strings at which it ends."""
    answer: asyncio.Future[Sequence[Sampled]]


Send = Callable[[Sequence[Ask]], None]
"""Sends these asks to the engines; called in the loop."""
Withdraw = Callable[[Ask], None]
"""Cancel an ask that was sent; called in the loop."""


class Gathering:
    """The asks of all trajectories. For one event loop."""

    def __init__(self, send: Send, withdraw: Withdraw, *, in_rounds: bool) -> None:
        self.send, self.withdraw, self.in_rounds = send, withdraw, in_rounds
        self.alive = 0
        """Trajectories that will ask, or leave; those of a prompt count as one until its first turn is sampled."""
        self.asked: list[Ask] = []

    def enter(self, count: int) -> None:
        """Count more trajectories as alive."""
        self.alive += count

    def leave(self) -> None:
        """Count a trajectory as over: it asks for nothing more."""
        self.alive -= 1
        self._flush_if_whole()

    async def sample(self, ask: Ask) -> Sequence[Sampled]:
        """The `num_samples` answers to an ask."""
        self.asked.append(ask)
        if not self.in_rounds and len(self.asked) == 1:
            # Together with other requests of this turn of the loop.
            asyncio.get_running_loop().call_soon(self._flush)
        self._flush_if_whole()
        try:
            return await ask.answer
        except asyncio.CancelledError:
            if ask in self.asked:
                self.asked.remove(ask)
            else:
                self.withdraw(ask)
            raise

    def _flush_if_whole(self) -> None:
        if self.in_rounds and self.asked and len(self.asked) == self.alive:
            self._flush()

    def _flush(self) -> None:
        asked, self.asked = self.asked, []
        try:
            self.send(sorted(asked, key=lambda ask: (ask.place, ask.sample)))
        except Exception as err:
            for ask in asked:
                if not ask.answer.done():
                    ask.answer.set_exception(err)
