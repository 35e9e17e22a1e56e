"""The common part of games of calls: one call after the other, and none once the game is over."""

from __future__ import annotations

from collections.abc import Sequence

from mgrpo.environments.environment import Call, Environment, Observation


class Game(Environment):
    """A game; a subclass implements `move`."""

    is_repeatable = True

    def move(self, call: Call) -> Observation:
        raise NotImplementedError

    def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        observations: list[Observation] = []
        for call in calls:
            if observations and observations[-1].done:
                observations.append(Observation(text="not called: the game is over", done=True))
            else:
                observations.append(self.move(call))
        return observations
