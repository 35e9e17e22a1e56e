"""From completions to rewards on rank 0: the rows' verifiers or the user's functions, and what a completion's length costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from mgrpo.config import Config
from mgrpo.rewards.compose import add_to_rewards, score_groups
from mgrpo.rewards.scorer import Scorer
from mgrpo.types import RewardScale, RolloutGroup, ScoredGroup


class Scoring:
    """Rewards of a run's completions. Always `close` it."""

    def __init__(self, config: Config, functions: Sequence[str | Callable] = (), verifiers: Sequence[str] = ()) -> None:
        """Nothing is started yet.

        Args:
            functions: reward functions, or words that name them; none: verifiers decide.
            verifiers: names of those that will be asked.
        """
        self.config = config
        self.scorer = Scorer(config.reward, verifiers)
        self.functions: list[Callable] = []
        self.done = 0
        """Training steps done."""
        self.longest = config.rollout.response_length
        """Tokens that a completion may have."""
        self.logged: dict[str, list[float]] = {}
        """What the functions said by `log_metric` since the last report of training."""
        self.evaluated: dict[str, list[float]] = {}
        """The same, in the newest evaluation."""
        if functions:
            from mgrpo.rewards.function_catalog import load_functions

            self.functions = load_functions(
                functions,
                max_completion_length=config.rollout.response_length,
                scorer=self.scorer,
                chat_template_kwargs=json.loads(config.data.chat_template_kwargs),
            )

    def start(self) -> None:
        """Start the processes that score, without waiting for them."""
        if not self.functions:
            self.scorer.start()
            return
        from mgrpo.rewards.function_catalog import start_functions

        start_functions(self.functions)

    def score(self, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
        """Rewards of whole groups."""
        scored = self._by_functions(groups) if self.functions else score_groups(groups, self.scorer, self.config.reward)
        cache_length = self.config.algorithm.overlong_cache_length
        if cache_length is None:
            return scored
        from mgrpo.rewards.overlong import overlong_penalty

        return [
            add_to_rewards(
                group,
                "overlong",
                overlong_penalty(
                    np.array([len(completion.tokens) for completion in group.group.completions]),
                    max_length=self.longest,
                    cache_length=cache_length,
                ),
            )
            for group in scored
        ]

    @contextmanager
    def evaluating(self, done: int) -> Iterator[None]:
        """While it lasts completions are those of an evaluation after `done` training steps.

        What functions log meanwhile is in `evaluated`, and not among the metrics of training.
        """
        rollout, logged = self.config.rollout, self.logged
        self.done, self.logged = done, {}
        self.longest = rollout.eval_response_length or rollout.response_length
        try:
            yield
        finally:
            self.longest = rollout.response_length
            self.logged, self.evaluated = logged, self.logged

    def metrics(self) -> dict[str, float]:
        """What judges have cost since the start, and what reward functions have logged since the last call."""
        logged, self.logged = self.logged, {}
        return self.scorer.metrics() | _means(logged)

    def evaluation_metrics(self) -> dict[str, float]:
        """What reward functions have logged in the newest evaluation."""
        return {f"eval/{name}": value for name, value in _means(self.evaluated).items()}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward function, and of what the length costs, by name; empty without functions."""
        if not self.functions:
            return {}
        from mgrpo.rewards.functions import function_names

        algorithm, names = self.config.algorithm, function_names(self.functions)
        weights = dict(zip(names, algorithm.reward_weights or [1.0] * len(names), strict=True))
        return weights | {"overlong": 1.0} if algorithm.overlong_cache_length is not None else weights

    @property
    def scale(self) -> RewardScale | None:
        """What rewards are measured in; nothing where functions decide."""
        if self.functions:
            return None
        reward = self.config.reward
        return RewardScale(
            max_possible_score=reward.max_possible_score,
            verification_reward=reward.verification_reward if reward.apply_verifiable_reward else 0.0,
            format_reward=reward.r1_style_format_reward,
            weights=reward.weight_by_verifier,
        )

    def close(self) -> None:
        """End every process that scores."""
        if self.functions:
            from mgrpo.rewards.function_catalog import close_functions

            close_functions(self.functions)
        self.scorer.close()

    def _by_functions(self, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
        from mgrpo.rewards.functions import TrainerState, score_with_functions

        updates = self.config.algorithm.num_epochs * self.config.algorithm.num_mini_batches
        state = TrainerState(
            global_step=self.done * updates,
            max_steps=self.config.num_optimizer_steps,
            epoch=float(groups[0].prompt.id[0]) if groups else 0.0,
        )
        found = score_with_functions(groups, self.functions, self.config.algorithm.reward_weights, state=state)
        for name, value in found.metrics.items():
            self.logged.setdefault(name, []).append(value)
        if not found.columns:
            return found.groups
        extras = iter(
            [dict(zip(found.columns, values, strict=True)) for values in zip(*found.columns.values(), strict=True)]
        )
        return [
            dataclasses.replace(
                group, scores=tuple(dataclasses.replace(score, extras=next(extras)) for score in group.scores)
            )
            for group in found.groups
        ]


def _means(logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {f"custom/{name}": float(np.mean(values)) for name, values in logged.items()}
