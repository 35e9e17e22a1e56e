"""An evaluation as TRL reports it: for each set of held-out prompts its metrics, with a loss among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mgrpo.config import Config
from mgrpo.telemetry.metrics.evaluation import evaluation_metrics
from mgrpo.trl.metric_names import of_evaluation
from mgrpo.types import ScoredGroup

if TYPE_CHECKING:
    from mgrpo.run.records import Evaluation


def by_set(
    config: Config, metrics: Mapping[str, float], evaluation: Evaluation, *, prefix: str, has_sets: bool
) -> dict[str, float]:
    """Metrics under TRL's names.

    Args:
        config: of the training run, whose loss is reported.
        metrics: of the whole evaluation, under the names of docs/metrics.md.
        prefix: of all names, as a rule `eval`.
        has_sets: the prompts are several sets by name, each of which is reported by itself.
    """
    if not has_sets:
        found = _of_set(config, metrics, evaluation.groups, f"{prefix}_")
        num_completions = sum(len(group.scores) for group in evaluation.groups)
        found[f"{prefix}_runtime"] = evaluation.total_s
        found[f"{prefix}_samples_per_second"] = num_completions / evaluation.total_s
        return found
    found = {}
    for name in dict.fromkeys(evaluation.sources):
        groups = [g for g, source in zip(evaluation.groups, evaluation.sources, strict=True) if source == name]
        found |= _of_set(config, evaluation_metrics(groups, scale=evaluation.scale), groups, f"{prefix}_{name}_")
    return found


def _of_set(
    config: Config, metrics: Mapping[str, float], groups: Sequence[ScoredGroup], prefix: str
) -> dict[str, float]:
    return {f"{prefix}loss": loss(config, groups)} | of_evaluation(metrics, prefix)


def loss(config: Config, groups: Sequence[ScoredGroup]) -> float:
    """The loss of these completions under the weights that have sampled them, without its KL term and the entropy bonus."""
    import torch

    from mgrpo.algo import load_advantages, policy_loss
    from mgrpo.algo.training_samples import train_samples

    algorithm = config.algorithm
    names = list(groups[0].scores[0].parts)
    samples = train_samples(
        groups,
        normalization=algorithm.advantage_normalization_type,
        ddof=algorithm.advantage_ddof,
        eps=algorithm.advantage_eps,
        reward_weights=dict(zip(names, algorithm.reward_weights or [1.0] * len(names), strict=False)),
        mask_truncated=algorithm.mask_truncated_completions,
        mask_tool_use=config.tools.mask_tool_use,
        function=load_advantages(algorithm),
    )
    logprobs = torch.from_numpy(np.concatenate([sample.rollout_logprobs for sample in samples]))
    ends = np.cumsum([0, *(len(sample.tokens) for sample in samples)])
    return float(
        policy_loss(
            logprobs,
            logprobs,
            torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
            torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
            torch.from_numpy(ends.astype(np.int32)),
            config=dataclasses.replace(config.loss, beta=0.0, use_rho_correction=False),
        ).loss
    )
