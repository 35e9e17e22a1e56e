"""Rewards of completions: the rows' verifiers or the user's functions decide, then the length penalty is added."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mgrpo.config import Config
from mgrpo.rewards.compose import add_to_rewards, score_groups
from mgrpo.rewards.function_catalog import close_functions, load_functions, start_functions
from mgrpo.rewards.overlong import overlong_penalty
from mgrpo.rewards.registry import UNSCORED
from mgrpo.rewards.reward_functions import TrainerState, function_names, renamed, score_with_functions
from mgrpo.rewards.rubrics.judging import score_evolving
from mgrpo.rewards.scorer import Scorer
from mgrpo.rewards.trajectory_rewards import TurnRewards, with_turn_rewards
from mgrpo.types import RewardContext, RewardScale, RolloutGroup, ScoredBatch, ScoredGroup

_log = logging.getLogger(__name__)


class Rewarder:
    """Rewards of a run's completions. Always `close` it."""

    def __init__(
        self,
        config: Config,
        functions: Sequence[str | Callable] = (),
        verifiers: Sequence[str] = (),
        turns: TurnRewards | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            functions: reward functions, or words that name them; without any, verifiers decide.
            verifiers: names of the rows' verifiers.
            turns: the rule that combines the rewards of a trajectory's turns.
        """
        self.config, self.turns = config, turns or TurnRewards()
        self.is_verified = config.reward.apply_verifiable_reward and {name.lower() for name in verifiers} != {UNSCORED}
        """True if verifiers decide, and not an environment alone."""
        self._lock = threading.Lock()
        self.scorer = Scorer(config.reward, verifiers)
        self.functions = load_functions(
            functions,
            max_completion_length=config.rollout.response_length,
            scorer=self.scorer,
            reward_model={
                "chat_template_kwargs": json.loads(config.data.chat_template_kwargs),
                "gpu": config.reward.reward_model_gpu,
            },
        )

    def start(self) -> None:
        """Start the processes that score, without waiting for them."""
        if self.functions:
            for note in renamed(self.functions):
                _log.warning(note)
            start_functions(self.functions)
        else:
            self.scorer.start()

    def score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        """Rewards of whole groups. From any thread; one call at a time, because functions share random states."""
        with self._lock:
            return self._score(groups, context)

    def _score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        if self.functions:
            algorithm = self.config.algorithm
            state = TrainerState(
                global_step=context.step * algorithm.num_epochs * algorithm.num_mini_batches,
                max_steps=self.config.num_optimizer_steps,
                epoch=float(groups[0].prompt.id[0]) if groups else 0.0,
            )
            weights = algorithm.reward_weights
            batch = score_with_functions(
                groups,
                self.functions,
                weights,
                state=state,
                seed=context.seed,
                timeout_s=self.config.reward.reward_funcs_timeout,
            )
            batch = replace(batch, groups=with_turn_rewards(batch.groups, self.turns))
        else:
            score = partial(score_groups, config=self.config.reward, turns=self.turns)
            scored = score_evolving(groups, score, pool=self.scorer, remote=self.scorer.remote)
            batch = ScoredBatch(groups=scored)
        cache_length = self.config.algorithm.overlong_cache_length
        if cache_length is None:
            return batch
        return replace(batch, groups=[_with_penalty(group, context.max_tokens, cache_length) for group in batch.groups])

    def metrics(self) -> dict[str, float]:
        """Sums of the verifiers that call servers since the start of the run, such as a judge's tokens."""
        return self.scorer.metrics()

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward function and of the length penalty, by name; empty without functions."""
        if not self.functions:
            return {}
        algorithm, names = self.config.algorithm, function_names(self.functions)
        weights = dict(zip(names, algorithm.reward_weights or [1.0] * len(names), strict=True))
        return weights | {"overlong": 1.0} if algorithm.overlong_cache_length is not None else weights

    @property
    def scale(self) -> RewardScale | None:
        """The scale of rewards; None where functions decide."""
        if self.functions:
            return None
        reward = self.config.reward
        verification = reward.verification_reward if self.is_verified else 0.0
        without = reward.max_possible_score - reward.verification_reward * reward.apply_verifiable_reward
        return RewardScale(
            max_possible_score=without + verification,
            verification_reward=verification,
            format_reward=reward.r1_style_format_reward,
            weights={**reward.weight_by_verifier, UNSCORED: 0.0},
        )

    def close(self) -> None:
        """End every process that scores."""
        close_functions(self.functions)
        self.scorer.close()


def logged_metrics(logged: Mapping[str, Sequence[float]], prefix: str = "") -> dict[str, float]:
    """`{prefix}custom/{name}`: the mean of the values that reward functions logged under each name.

    Args:
        logged: `ScoredBatch.logged` of one batch, or of several with their lists joined.
        prefix: "eval/" for an evaluation.
    """
    return {f"{prefix}custom/{name}": float(np.mean(values)) for name, values in logged.items()}


def _with_penalty(group: ScoredGroup, max_tokens: int, cache_length: int) -> ScoredGroup:
    lengths = np.array([len(completion.tokens) for completion in group.group.completions])
    penalties = overlong_penalty(lengths, max_length=max_tokens, cache_length=cache_length)
    return add_to_rewards(group, "overlong", penalties.tolist())
