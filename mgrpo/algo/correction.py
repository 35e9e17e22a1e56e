"""Corrections for the difference between the engine's sampling probabilities and the trainer's.

With d = old_logprob - rollout_logprob, clamped to +-10, and m the loss mask, rho is

    token           exp(d)
    sequence_mean   exp(sum m d / sum m), of each sequence
    sequence_sum    exp(sum m d), the sum also clamped to +-10

It multiplies the policy term, never the KL penalty, and has no gradient. `rho_level` names the one that multiplies,
clamped to [rho_clamp_lower_bound, rho_clamp_upper_bound]; `rho_mask_level` the one that must lie in
[rho_mask_lower_bound, rho_mask_upper_bound], or the term is dropped. So truncated importance sampling (Yao et al. 2025)
is an upper clamp, IcePop (arXiv 2510.18855) two mask bounds without a clamp, and TRL's sequence_mask both levels
"sequence_sum". A sequence is a document, never a pack of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.algo.loss_inputs import LossInputs
from mgrpo.config.loss import DIVERGENCE

LOG_RHO_LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Operands of `mgrpo.ops.policy_loss`, and the terms it cannot compute from them."""

    keep: Tensor | None = None
    """`[tokens]`, a factor of the policy term."""
    rho_is_left_to_op: bool = False
    """True if the op computes rho, from the engine's logprobs or from the two operands below."""
    seq_log_rho: Tensor | None = None
    seq_log_rho_mask: Tensor | None = None
    rho: Tensor | None = None
    """`[tokens]`, the clamped and masked weight where the op does not compute it."""
    rho_sums: Mapping[str, Tensor] | None = None
    """Given with `rho`, column of the op's sums -> scalar: the values the op would have reported."""


def correction(inputs: LossInputs, *, leaves_rho_to_op: bool = True) -> Correction:
    """Corrections that the settings select; none has a gradient.

    Args:
        leaves_rho_to_op: False where the caller needs rho itself. The total-variation mask is never left to the op,
            because it depends on the advantages.
    """
    config, mask = inputs.config, inputs.mask
    if not (config.use_rho_correction or config.off_policy_mask_threshold is not None):
        return Correction()
    if inputs.rollout_logprobs is None:
        raise ValueError("a correction for the engine's probabilities needs rollout_logprobs")
    rollout = torch.where(inputs.rollout_logprobs.isfinite(), inputs.rollout_logprobs, inputs.old_logprobs)
    keep = None
    if config.off_policy_mask_threshold is not None:
        drift = _at_tokens_mean(rollout - inputs.logprobs.detach(), inputs)
        keep = ((inputs.advantages >= 0) | (drift <= config.off_policy_mask_threshold)).to(mask.dtype)
    if not config.use_rho_correction:
        return Correction(keep=keep)
    bounds_divergence = config.rho_mask_level == DIVERGENCE
    if bounds_divergence and not config.rho_mask_upper_bound > 0:
        raise ValueError(
            f"rho_mask_level=divergence needs a bound above 0, got rho_mask_upper_bound={config.rho_mask_upper_bound}"
        )

    log_rho = (inputs.old_logprobs - rollout).clamp(-LOG_RHO_LIMIT, LOG_RHO_LIMIT)
    seq_log_rho = _of_sequences(log_rho, inputs, config.rho_level)
    seq_log_rho_mask = None if bounds_divergence else _of_sequences(log_rho, inputs, config.rho_mask_level)
    if leaves_rho_to_op and not bounds_divergence:
        return Correction(keep=keep, rho_is_left_to_op=True, seq_log_rho=seq_log_rho, seq_log_rho_mask=seq_log_rho_mask)
    rho, rho_sums = _rho(log_rho, seq_log_rho, seq_log_rho_mask, inputs)
    return Correction(keep=keep, rho=rho, rho_sums=rho_sums)


def _rho(
    log_rho: Tensor, seq_log_rho: Tensor | None, seq_log_rho_mask: Tensor | None, inputs: LossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clamped and masked weight `[tokens]`, and the sum of each column that describes it."""
    config = inputs.config

    def at_tokens(seq: Tensor | None) -> Tensor:
        if seq is None:
            return log_rho.exp()
        return inputs.per_token(seq.clamp(-LOG_RHO_LIMIT, LOG_RHO_LIMIT).exp())

    free, judged = at_tokens(seq_log_rho), at_tokens(seq_log_rho_mask)
    held = free.clamp(config.rho_clamp_lower_bound, config.rho_clamp_upper_bound or torch.inf)
    too_low, too_high = judged < config.rho_mask_lower_bound, judged > (config.rho_mask_upper_bound or torch.inf)
    if config.rho_mask_level == DIVERGENCE:
        # Total variation is the distance that VACO (arXiv 2603.01365) bounds; tokens whose step lowers it stay.
        distance = _at_tokens_mean(torch.expm1(log_rho).abs(), inputs)
        too_high = (distance > config.rho_mask_upper_bound) & (log_rho * inputs.advantages > 0)
        too_low = torch.zeros_like(too_high)
    rho = held.masked_fill(too_low | too_high, 0.0)
    columns = {"rho": rho, "rho_clamped": held != free, "rho_dropped_low": too_low, "rho_dropped_high": too_high}
    stacked = torch.stack([column.to(rho.dtype) for column in columns.values()])
    return rho, dict(zip(columns, torch.where(inputs.loss_mask, stacked, 0.0).sum(1).unbind(), strict=True))


def _of_sequences(log_rho: Tensor, inputs: LossInputs, level: str) -> Tensor | None:
    if level == "token":
        return None
    total, count = ops.segment_sums(log_rho, inputs.mask, inputs.cu_seqlens)
    return total if level == "sequence_sum" else total / count.clamp(min=1)


def _at_tokens_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """The mean over a sequence's trained tokens, at each of its tokens."""
    return inputs.per_token(ops.segment_mean(values, inputs.mask, inputs.cu_seqlens))
