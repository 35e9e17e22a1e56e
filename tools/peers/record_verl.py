"""Losses and gradients that verl's own functions give, for tests.

    PYTHONPATH=.:VERL python -m tools.peers.record_verl VERL > tests/unit/algo/losses_of_verl.json

VERL is a clone of verl that can be imported: with torch, tensordict, omegaconf, hydra-core, codetiming and a release of
transformers that it supports. Run it again when verl changes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.config import omega_conf_to_dataclass

from tools.peers.losses import LONGEST, Batch, record, version_of

ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
MODES = ("vanilla", "gspo", "sapo", "cispo")
AVERAGES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
COMMON = ("algorithm.adv_estimator=grpo", f"data.max_response_length={LONGEST}")
CLIPS: tuple[tuple[str, ...], ...] = (
    (),
    (f"{ACTOR}clip_ratio=0.3",),
    (f"{ACTOR}clip_ratio=0.3", f"{ACTOR}clip_ratio_low=null", f"{ACTOR}clip_ratio_high=null"),
    (f"{ACTOR}clip_ratio_low=0.1", f"{ACTOR}clip_ratio_high=0.28"),
    (f"{ACTOR}clip_ratio_low=1.0", f"{ACTOR}clip_ratio_high=4.0"),
    (f"{ACTOR}clip_ratio_c=1.5",),
    (f"{ACTOR}tau_pos=0.75", f"{ACTOR}tau_neg=1.3"),
)
CORRECTIONS: tuple[tuple[str, ...], ...] = (
    (f"{CORRECTION}rollout_is=token",),
    (f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold=1.5"),
)
KL = ("low_var_kl", "k1", "mse")


def words() -> Iterator[tuple[str, ...]]:
    """The words of each case, beside `COMMON`."""
    for mode, average in itertools.product(MODES, AVERAGES):
        loss = f"{ACTOR}policy_loss.loss_mode={mode}", f"{ACTOR}loss_agg_mode={average}"
        for clip in CLIPS:
            # PPO without a lower bound is not a loss of this project.
            if mode == "cispo" or "clip_ratio_low=1.0" not in "".join(clip):
                yield *loss, *clip
        for correction in CORRECTIONS:
            yield *loss, *correction
        for kind in KL if mode in ("vanilla", "cispo") or average == "seq-mean-token-mean" else ():
            yield *loss, f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_coef=0.05", f"{ACTOR}kl_loss_type={kind}"


def loss_of(defaults: Any, given: list[str], batch: Batch, logprobs: Tensor) -> Tensor:
    """The loss as verl's actor adds it up, of micro-batches of one sequence where the average depends on their number."""
    config = OmegaConf.merge(defaults, OmegaConf.from_dotlist([*given, f"{ACTOR}ppo_micro_batch_size_per_gpu=1"]))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    correction = config.algorithm.rollout_correction
    is_by_micro_batch = actor.loss_agg_mode == "seq-mean-token-sum-norm"
    everything = range(len(batch.lengths))
    parts = [[row] for row in everything] if is_by_micro_batch else [list(everything)]
    return sum(_part(actor, correction, batch, logprobs, rows) for rows in parts) / len(parts)


def _part(actor: Any, correction: Any, batch: Batch, logprobs: Tensor, rows: list[int]) -> Tensor:
    old, mask = batch.old_logprobs[rows], batch.mask[rows].double()
    weights = None
    if correction.rollout_is:
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            old - batch.rollout_logprobs[rows],
            mask,
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
        )
    loss, _ = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=logprobs[rows],
        advantages=batch.advantages[rows, None].expand_as(old),
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=weights,
    )
    if not actor.use_kl_loss:
        return loss
    kl = core_algos.kl_penalty(logprobs[rows], batch.ref_logprobs[rows], actor.kl_loss_type)
    return loss + actor.kl_loss_coef * core_algos.agg_loss(kl, mask, actor.loss_agg_mode)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    defaults = OmegaConf.load(folder / "verl/trainer/config/_generated_ppo_trainer.yaml")
    record(f"verl {version_of(folder)}", ([*COMMON, *given] for given in words()), partial(loss_of, defaults))
