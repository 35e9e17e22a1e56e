"""A step's batch: from scored groups to the packs of each data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mgrpo import packing
from mgrpo.algo.credit.own_advantages import AdvantageFunction
from mgrpo.algo.credit.turn_credit import TurnCredit
from mgrpo.algo.training_samples import train_samples
from mgrpo.config import Config
from mgrpo.layout import Layout
from mgrpo.run.records import Batch, Rollouts


def turn_credit(config: Config) -> TurnCredit | None:
    """Rule for advantages of single turns; None: all turns of a completion share one."""
    tools = config.tools
    if not config.has_turns or tools.turn_credit == "trajectory":
        return None
    return TurnCredit(aggregator=tools.reward_aggregator)


def make_batch(
    rollouts: Rollouts,
    config: Config,
    *,
    layout: Layout,
    hidden: int,
    reward_weights: Mapping[str, float],
    policy_version: int,
    advantage_fn: AdvantageFunction | None = None,
) -> Batch:
    """Advantages, then the slices of all data-parallel ranks.

    Args:
        hidden: width of the model, for the cost of a document.
        reward_weights: by reward function; empty if verifiers score.
        policy_version: the version of the weights that train.
        advantage_fn: computes the advantages in place of the named estimator.
    """
    algorithm, parallel = config.algorithm, config.parallel
    samples = train_samples(
        [*rollouts.groups, *rollouts.replayed],
        dropped=rollouts.dropped,
        normalization=algorithm.advantage_normalization_type,
        ddof=algorithm.advantage_ddof,
        eps=algorithm.advantage_eps,
        reward_weights=reward_weights,
        mask_truncated=algorithm.mask_truncated_completions,
        mask_tool_use=config.tools.mask_tool_use,
        turn_credit=turn_credit(config),
        function=advantage_fn,
        policy_version=policy_version if config.is_off_policy else None,
        distillation_only=config.distillation.distillation_only,
    )
    padding = {"multiple_of": layout.pack_multiple_of, "document_multiple_of": layout.document_multiple_of}
    plan = packing.plan_step(
        samples,
        pack_length=layout.round_up(parallel.pack_length),
        dp=layout.data,
        num_mini_batches=algorithm.num_mini_batches,
        micro_batches_multiple_of=layout.micro_batches_multiple_of,
        share_prompts=parallel.shared_prompt_packing,
        cost=packing.Cost.of_width(hidden),
        **padding,
    )
    index, slices = packing.to_slices(samples, plan, **padding)
    packs = [pack for ranks in plan for row in ranks for pack in row]
    return Batch(
        index={"num_sampled": np.array([len(rollouts.groups) + len(rollouts.dropped)]), **index},
        slices=slices,
        rollouts=rollouts,
        policy_version=policy_version,
        samples=samples,
        lengths=packing.pack_lengths(samples, packs, **padding),
    )
