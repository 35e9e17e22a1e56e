"""From the next prompts to scored groups: data, engines and rewards of a training step. No torch, no other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.rewards.rewarder import Rewarder, logged_metrics
from mgrpo.rollout.collect import seed_of
from mgrpo.rollout.dispatch import Dispatcher, Submitted
from mgrpo.types import Prompt, PromptId, RewardContext, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The scored groups of one step, in the order of their prompts."""

    groups: list[ScoredGroup]
    """To train on."""
    dropped: list[ScoredGroup]
    """Sampled, but not worth training on."""
    generate_s: float = 0.0
    score_s: float = 0.0
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """What judges have cost so far, and what reward functions have logged in this step."""
    num_excluded: int = 0
    """Prompts that were found solved for good in this step, and are not sampled again."""


class Producer:
    """Turns prompts into scored groups. For one thread at a time; only `abort` may be called from another."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        *,
        prompt: Callable[[PromptId], Prompt],
        dispatcher: Dispatcher,
        rewarder: Rewarder,
    ) -> None:
        """
        Args:
            prompt: the training prompt of an id that the sampler gives.
        """
        self.config, self.sampler, self.prompt = config, sampler, prompt
        self.dispatcher, self.rewarder = dispatcher, rewarder
        self.submitted: Submitted | None = None
        """The next step's prompts, queued in the engines."""
        self.before: dict[str, Any] | None = None
        """The sampler's state before it handed out the prompts that are queued or being sampled."""

    def submit_ahead(self) -> None:
        """Queue the next step's prompts in the engines, which begin with them when `collect` is called."""
        self.before = self.sampler.state_dict()
        self.submitted = self._submit(self.config.rollout.num_unique_prompts_rollout)

    def collect(self, step: int) -> Rollouts:
        """Sample and score the groups of training step `step`; with active sampling others in place of those left out.

        Neither groups nor dropped ones: every prompt is solved for good.
        """
        algorithm, wanted = self.config.algorithm, self.config.rollout.num_unique_prompts_rollout
        if self.submitted is None:
            self.submit_ahead()
        submitted, self.submitted = self.submitted, None
        excluded_before = self.sampler.num_excluded
        kept: list[ScoredGroup] = []
        dropped: list[ScoredGroup] = []
        logged: dict[str, list[float]] = {}
        generate_s = score_s = 0.0
        for round_number in range(algorithm.active_sampling_max_rounds if algorithm.active_sampling else 1):
            sampled = self.dispatcher.take(submitted or self._submit(wanted - len(kept)))
            submitted = None
            start = time.perf_counter()
            scored = self.rewarder.score(sampled.groups, self._training(step, round_number))
            generate_s, score_s = generate_s + sampled.seconds, score_s + time.perf_counter() - start
            for name, values in scored.logged.items():
                logged.setdefault(name, []).extend(values)
            for group, is_kept in zip(scored.groups, self._keep(scored.groups), strict=True):
                (kept if is_kept else dropped).append(group)
            if len(kept) == wanted or not scored.groups:
                break
        return Rollouts(
            groups=kept,
            dropped=dropped,
            generate_s=generate_s,
            score_s=score_s,
            reward_metrics=self.rewarder.metrics() | logged_metrics(logged),
            num_excluded=self.sampler.num_excluded - excluded_before,
        )

    def take_over(self) -> None:
        """The groups that `collect` returned have been handed over: a resumed run is not given their prompts again."""
        self.before = None

    def abort(self) -> None:
        """End sampling for good; a `collect` that is under way, or an evaluation, raises EngineError."""
        self.dispatcher.fleet.abort()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, in JSON: prompts that are queued or being sampled are handed out again."""
        return {"sampler": self.before or self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.sampler.load_state_dict(state["sampler"])

    def _submit(self, num_prompts: int) -> Submitted:
        return self.dispatcher.submit([self.prompt(prompt_id) for prompt_id in self.sampler.take(num_prompts)])

    def _training(self, step: int, round_number: int) -> RewardContext:
        return RewardContext(
            step=step - 1,
            seed=seed_of(self.config.experiment.seed, "rewards", step, round_number),
            max_tokens=self.config.rollout.response_length,
        )

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Which groups have something to learn from; prompts that are solved for good are not sampled again."""
        from mgrpo.algo import has_spread, solved_for_good

        algorithm, scale = self.config.algorithm, self.rewarder.scale
        if not groups:
            return []
        if algorithm.no_resampling_pass_rate is not None and scale is not None:
            shares = np.array([scale.shares(group) for group in groups])
            solved = solved_for_good(shares, pass_rate=algorithm.no_resampling_pass_rate)
            self.sampler.exclude(
                {group.group.prompt.id[1] for group, is_solved in zip(groups, solved, strict=True) if is_solved}
            )
        if not algorithm.filter_zero_std_samples:
            return [True] * len(groups)
        if algorithm.advantage_normalization_type != "gdpo":
            return has_spread(np.stack([group.rewards for group in groups])).tolist()
        # Functions that differ may add up to the same reward; each has an advantage of its own.
        by_function = [
            np.array([[score.parts[name] for score in group.scores] for group in groups])
            for name in self.rewarder.weights
        ]
        return np.any([has_spread(values) for values in by_function], axis=0).tolist()
