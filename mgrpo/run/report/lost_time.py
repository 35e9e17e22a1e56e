"""Cost of failures over all starts of a run: seconds lost at resumes, seconds of saves, and goodput."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class LostTime:
    """Rank 0's account. It is part of every saved state, so that a continued run goes on counting."""

    def __init__(self, resumed: Mapping[str, float] | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            resumed: `state_dict` of the state that the run continues; None: a new run.
            clock: seconds since an epoch that all starts of the run share.
        """
        self._clock = clock
        self.began = resumed["began"] if resumed else clock()
        self.counted_s = resumed["counted_s"] if resumed else 0.0
        """Seconds of the run's steps; steps repeated after a failure count once."""
        self.lost_s = resumed["lost_s"] if resumed else 0.0
        """Seconds from each state that the run was continued from to the moment when training went on."""
        self._saved_at = resumed["saved_at"] if resumed else None
        self._unsaved_since = self.began
        self._save_s = 0.0

    def begin(self) -> None:
        """Record that training begins or goes on."""
        now = self._clock()
        if self._saved_at is not None:
            self.lost_s += max(0.0, now - self._saved_at)
            self._saved_at = None
        self._unsaved_since = now

    def saved(self, seconds: float) -> None:
        """Record a saved state, which blocked training for `seconds`."""
        self._save_s += seconds
        self._unsaved_since = self._clock() - seconds

    def step(self, seconds: float) -> dict[str, float]:
        """Metrics of a step that took `seconds`, described in docs/metrics.md."""
        now = self._clock()
        self.counted_s += seconds
        metrics = {
            "time/save": self._save_s,
            "time/since_save": max(0.0, now - self._unsaved_since),
            "time/lost": self.lost_s,
            "time/goodput": min(1.0, self.counted_s / max(now - self.began, self.counted_s, 1e-9)),
        }
        self._save_s = 0.0
        return metrics

    def state_dict(self) -> dict[str, float]:
        """Counters in JSON; call when the state is taken."""
        return {
            "began": self.began,
            "counted_s": self.counted_s,
            "lost_s": self.lost_s,
            "saved_at": self._clock(),
        }
