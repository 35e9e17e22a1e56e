"""Scoring of sampled groups in a thread, with their teacher prompts, and the choice of groups with a signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from mgrpo.config.schema import Algorithm
from mgrpo.processes.background import Background
from mgrpo.rewards.rewarder import Rewarder, logged_metrics
from mgrpo.run.produce.groups import Unscored
from mgrpo.run.produce.lessons import Lessons
from mgrpo.types import RewardContext, RolloutGroup, ScoredBatch, ScoredGroup

Post = Callable[[Callable[[], object]], None]
"""Schedules work in the caller's thread."""
Done = Callable[[Sequence[int], Sequence[ScoredGroup], Sequence[bool]], None]
"""Called with the numbers of groups, the scored groups, and for each True if it has a signal."""


class Scoring:
    """Passes waiting groups to the rewarder whenever it is idle. Methods are called in the caller's thread."""

    def __init__(
        self, algorithm: Algorithm, rewarder: Rewarder, *, lessons: Lessons | None, post: Post, done: Done
    ) -> None:
        """
        Args:
            lessons: builds teacher prompts; None: no teachers.
        """
        self.algorithm, self.rewarder, self.lessons = algorithm, rewarder, lessons
        self.post, self.done = post, done
        self.waiting: list[Unscored] = []
        self.is_busy = False
        self.logged: dict[str, list[float]] = {}
        self.thread = Background("scoring")

    def add(self, part: Unscored) -> None:
        """Score these groups; reward functions receive them without others."""
        self.waiting.append(part)
        # Groups that are added before `_next` runs are scored together.
        self.post(self._next)

    def take_metrics(self) -> dict[str, float]:
        """Cost of judges so far, and values that reward functions logged since the last call."""
        logged, self.logged = self.logged, {}
        return self.rewarder.metrics() | logged_metrics(logged)

    def _next(self) -> None:
        if self.is_busy or not self.waiting:
            return
        self.is_busy = True
        parts = self.waiting[:1] if self.rewarder.functions else self.waiting
        self.waiting = self.waiting[len(parts) :]
        numbers = [number for part in parts for number in part.numbers]
        groups = [group for part in parts for group in part.groups]
        scored = self.thread.submit(partial(self._score, groups, parts[0].context))
        scored.add_done_callback(lambda scored: self.post(partial(self._finish, numbers, scored)))

    def _score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        batch = self.rewarder.score(groups, context)
        return replace(batch, groups=[self.lessons.added(group) for group in batch.groups]) if self.lessons else batch

    def _finish(self, numbers: Sequence[int], scored: Future[ScoredBatch]) -> None:
        self.is_busy = False
        batch = scored.result()
        for name, values in batch.logged.items():
            self.logged.setdefault(name, []).extend(values)
        self._next()
        self.done(numbers, batch.groups, self._keep(batch.groups))

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """For each group, True if it has a signal."""
        from mgrpo.algo import has_spread

        algorithm = self.algorithm
        if not algorithm.filter_zero_std_samples:
            return [True] * len(groups)
        is_taught = np.array([group.is_taught for group in groups])
        if algorithm.advantage_normalization_type != "gdpo":
            return (is_taught | has_spread(np.stack([group.rewards for group in groups]))).tolist()
        # Scores that differ may add up to equal rewards; each function has an advantage of its own.
        by_function = [
            np.array([[score.parts[name] for score in group.scores] for group in groups])
            for name in self.rewarder.weights
        ]
        return np.any([is_taught, *(has_spread(values) for values in by_function)], axis=0).tolist()
