"""Records that producing, training and reporting exchange, and the steps after which syncs, pauses and evaluations are due.

Data only, so that these folders need not import each other. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mgrpo.config import Config
from mgrpo.types import PackLengths, RewardScale, ScoredGroup, TrainSample

if TYPE_CHECKING:
    from mgrpo.packing import Slice
    from mgrpo.policy.policy import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The scored groups of one step, in the order of their prompts."""

    groups: list[ScoredGroup]
    """The groups to train on."""
    dropped: list[ScoredGroup]
    """Groups that were sampled but have no signal."""
    replayed: Sequence[ScoredGroup] = ()
    """Groups of earlier steps, to train on in place of dropped ones."""
    replay_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the replay buffer, if there is one."""
    generate_s: float = 0.0
    """Seconds of the learners' wait for engines."""
    score_s: float = 0.0
    """Seconds of their further wait for scores."""
    teach_s: float = 0.0
    """Seconds of their further wait for teachers on engines or servers."""
    engine_s: float = 0.0
    """Seconds in which engines had work since the last step was handed over."""
    num_admitted: int = 0
    """Number of groups admitted since then."""
    engine_metrics: Mapping[str, float] = field(default_factory=dict)
    """Failures, replays and environments since then."""
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    """Cost of judges so far, values that reward functions logged in this step, and metrics of evolving rubrics."""
    rubrics: Sequence[Mapping[str, Any]] = ()
    """Answers, criteria and verdicts of each group with an evolving rubric, in JSON."""
    teacher_metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of sequences that teachers score, and their seconds; empty without teachers."""
    num_excluded: int = 0
    """Prompts found solved for good in this step, which are not sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The packs of one step. Every rank has the index and its own slice, rank 0 also the rollouts and samples behind them."""

    index: dict[str, np.ndarray]
    """Figures of the packs of every pass, equal on all ranks, see `packing.to_slices`."""
    slice: np.ndarray = field(default_factory=partial(np.empty, 0, np.uint8))
    """This rank's packs; empty until they have been received."""
    slices: Sequence[Slice] = ()
    """The packs of every data-parallel rank; on rank 0, until they are sent."""
    rollouts: Rollouts | None = None
    policy_version: int = 0
    """The version of the weights that the step starts from."""
    samples: Sequence[TrainSample] = ()
    lengths: PackLengths | None = None
    """The lengths of the packs of one pass over the samples; on rank 0."""

    @property
    def num_sampled(self) -> int:
        """Prompts that were sampled, also those whose groups are not trained on."""
        return int(self.index["num_sampled"][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The results of a training step on one rank."""

    results: list[StepResult]
    """One for each optimizer step; none if no token was trained."""
    metrics: dict[str, float]
    """Metrics over all ranks and mini-batches."""
    learning_rate: float
    """The learning rate of the last update, or of the next one if there was none."""
    not_finite: list[str]
    """Tensors of the policy that are not finite after the step, on any rank."""

    @property
    def has_learned(self) -> bool:
        """True if the step had a finite gradient other than 0."""
        return any(result.is_finite and result.grad_norm > 0 for result in self.results)

    @property
    def has_updated(self) -> bool:
        """True if the weights have changed; an update whose gradient is not finite is skipped."""
        return any(result.is_finite for result in self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The scored groups of all held-out prompts, in their order."""

    groups: list[ScoredGroup]
    sources: Sequence[str]
    """The dataset of each group."""
    generate_s: float
    """Seconds of generation."""
    total_s: float
    """Seconds of generation and scoring, and of the time between them."""
    reward_metrics: Mapping[str, float]
    """The values that reward functions have logged, as `eval/custom/...`."""
    scale: RewardScale | None
    """The scale of rewards; None: functions score."""


def is_due(step: int, every: int) -> bool:
    """True if `step` is a multiple of `every`; False if `every` is 0 or less."""
    return every > 0 and step % every == 0


def syncs_after(config: Config, step: int) -> bool:
    """True if the engines receive the weights of training step `step`: when they are due, and before an evaluation."""
    is_last = step == config.num_training_steps
    return is_last or is_due(step, config.engine.weight_sync_steps) or evaluates_after(config, step)


def pauses_after(config: Config, step: int) -> bool:
    """True if the engines pause between this step and the next: for new weights, and always in a run that repeats."""
    return config.repeats or syncs_after(config, step)


def evaluates_after(config: Config, step: int) -> bool:
    """True if an evaluation follows training step `step`; the one after training is not counted."""
    return is_due(step, config.experiment.local_eval_every) and step < config.num_training_steps
