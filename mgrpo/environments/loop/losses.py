"""Reasons for which a trajectory loses its environment, and their warnings in the log.

Each of these errors costs one trajectory, which then has no score, and not the run.
"""

from __future__ import annotations

import logging
from collections import Counter

_log = logging.getLogger(__name__)

_MOST_OF_A_KIND = 10


class EnvironmentLost(RuntimeError):
    """A trajectory's environment is gone, or cannot report how the trajectory ended."""


class TrajectoryTimeout(EnvironmentLost):
    """The trajectory took too long with all its turns."""


class AcquireTimeout(RuntimeError):
    """No environment became free in time."""


class ResetFailed(RuntimeError):
    """Two environments could not begin the trajectory."""


class Losses:
    """Warnings for one event loop: the first ones of each kind, since a service that is down loses thousands of trajectories."""

    def __init__(self) -> None:
        self._said: Counter[str] = Counter()

    def say(self, kind: str, text: str) -> None:
        self._said[kind] += 1
        if self._said[kind] <= _MOST_OF_A_KIND:
            is_last = self._said[kind] == _MOST_OF_A_KIND
            # It may quote an agent's output, with control characters for the terminal.
            text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
            _log.warning("%s%s", text, " (further ones of this kind are not logged)" if is_last else "")
