"""What was lost, as warnings in the log: the first of each kind, since a service that is down loses thousands of trajectories."""

from __future__ import annotations

import logging
from collections import Counter

_log = logging.getLogger(__name__)

_MOST_OF_A_KIND = 10


class Losses:
    """For one event loop."""

    def __init__(self) -> None:
        self._said: Counter[str] = Counter()

    def say(self, kind: str, text: str) -> None:
        self._said[kind] += 1
        if self._said[kind] <= _MOST_OF_A_KIND:
            is_last = self._said[kind] == _MOST_OF_A_KIND
            _log.warning("%s%s", text, " (further ones of this kind are not logged)" if is_last else "")
