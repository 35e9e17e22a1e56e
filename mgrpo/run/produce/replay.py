"""Groups of earlier steps that take the place of groups without a signal: TRL's `grpo_with_replay_buffer`.

The buffer keeps the groups whose rewards differ most: the largest sum |A| * std, which is the sum of |reward - mean|. A step draws
from them without replacement, with chances in proportion to that sum (Efraimidis and Spirakis 2006). A group that was drawn stays.
Its tokens keep the log-probabilities and versions of the policy that sampled them; advantages are computed anew within the group.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.rollout.requests import seed_of
from mgrpo.run.produce.saved_rollouts import PromptOf, fits, packed, plain_scores, read_scores, unpacked
from mgrpo.types import ScoredGroup

PREFIX = "replay_"
"""Prefix of the arrays' names in a saved state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group that a step has trained on."""

    scored: ScoredGroup
    born: int
    """Number of training steps in the engines' weights when its sampling began."""

    @property
    def priority(self) -> float:
        """Sum of |reward - mean| over the completions that have a score."""
        rewards = self.scored.rewards
        return float(np.nansum(np.abs(rewards - np.nanmean(rewards))))


class ReplayBuffer:
    """The stored groups, oldest first. For one thread."""

    def __init__(self, size: int, *, bound: int | None, seed: int) -> None:
        """
        Args:
            size: most groups that are stored; 0: nothing is stored or replayed.
            bound: greatest age of a replayed group in steps; None: no limit.
            seed: seed of the run.
        """
        self.size, self.bound, self.seed = size, bound, seed
        self.stored: list[StoredGroup] = []
        self.drawn: list[StoredGroup] = []
        """Stored groups that the next step also trains on."""
        self.steps = 0
        """Number of steps before the next one."""

    def draw(self, count: int, *, steps: int) -> None:
        """Draw at most `count` groups for the step after `steps` steps, oldest first; equal for equal steps."""
        fit = [group for group in self.stored if self._fits(group, steps)]
        priorities = np.array([group.priority for group in fit], np.float64)
        chances = np.maximum(priorities, np.finfo(np.float64).tiny)
        draws = np.random.default_rng(seed_of(self.seed, "replay", steps)).random(len(fit))
        # Exponential variables of these rates: the least ones are a draw without replacement.
        first = np.argsort(-np.log1p(-draws) / chances, kind="stable")[:count].tolist()
        self.drawn, self.steps = [fit[place] for place in sorted(first)], steps

    def add(self, groups: Iterable[tuple[ScoredGroup, int]], *, steps: int) -> None:
        """After `steps` steps, store the groups of the highest priority that may still be replayed; the newest among equals.

        Args:
            groups: each with its `born`, see `StoredGroup`.
        """
        added = [StoredGroup(scored=scored, born=born) for scored, born in groups]
        fit = [group for group in (*self.stored, *added) if self._fits(group, steps)]
        places = sorted(range(len(fit)), key=lambda place: (fit[place].priority, fit[place].born, place))
        self.stored = [fit[place] for place in sorted(places[max(len(places) - self.size, 0) :])]

    def _fits(self, group: StoredGroup, steps: int) -> bool:
        return self.bound is None or steps - group.born <= self.bound

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that `draw` was for; empty for a buffer of size 0."""
        if not self.size:
            return {}
        ages = [self.steps - group.born for group in self.drawn]
        return {
            "replay/groups": len(ages),
            "replay/age_mean": float(np.mean(ages)) if ages else float("nan"),
            "replay/age_max": max(ages, default=float("nan")),
            "replay/stored": len(self.stored),
        }

    def add_to(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a run with the buffer's: JSON, and arrays under "rollouts"."""
        sampled, arrays = packed({place: group.scored.group for place, group in enumerate(self.stored)})
        records = [
            {
                "born": group.born,
                "prompt": group.scored.group.prompt.id,
                "sampled": sampled[place],
                "scores": plain_scores(group.scored),
            }
            for place, group in enumerate(self.stored)
        ]
        arrays = {PREFIX + name: array for name, array in arrays.items()}
        return {**state, "replay": records, "rollouts": {**state["rollouts"], **arrays}}

    def load_state_dict(self, state: Mapping[str, Any], prompt: PromptOf, rollout: Rollout) -> None:
        """Continue from `add_to`, without groups that do not fit these settings."""
        saved = state.get("rollouts", {}).items()
        arrays = {name.removeprefix(PREFIX): array for name, array in saved if name.startswith(PREFIX)}
        groups = []
        for record in state.get("replay", ()):
            if fits(record["sampled"], arrays, rollout):
                opening = record["sampled"].get("opening", "")
                group = unpacked(prompt(tuple(record["prompt"]), opening), record["sampled"], arrays)
                groups.append((ScoredGroup(group=group, scores=read_scores(record["scores"])), record["born"]))
        self.add(groups, steps=state.get("steps", 0))
