"""The copy of an environment that reward functions are given; the environment itself lives in another process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn


class Snapshot(SimpleNamespace):
    """The attributes that an environment had at the end of a trajectory, those that JSON can hold."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the environment has no attribute {name} that can leave its process; there are "
            f"{', '.join(vars(self)) or 'none'}. Keep plain values in attributes without a leading underscore, or let the "
            "environment compute the reward (get_reward)"
        )
