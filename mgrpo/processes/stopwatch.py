"""A stopwatch for the total time of several stretches."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds up the time for which it runs; stopped at first."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def run(self, runs: bool = True) -> None:
        """Run from now on, or stop."""
        now = time.perf_counter()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if runs else None

    @property
    def seconds(self) -> float:
        """The seconds for which it has run since it was reset."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def reset(self) -> None:
        """Begin at 0; a running one goes on."""
        self._seconds, self._since = 0.0, None if self._since is None else time.perf_counter()
