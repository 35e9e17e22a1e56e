"""Corrections for the engine that sampled with other probabilities than the trainer computes.

With d = old_logprob - rollout_logprob, held within +-10, and m the loss mask, rho is

    token           exp(d)
    sequence_mean   exp(sum m d / sum m), of each sequence
    sequence_sum    exp(sum m d), the sum held within +-10, too

It multiplies the policy term, never the KL penalty, and has no gradient. `rho_level` names the one that weighs, clamped to
[rho_clamp_lower_bound, rho_clamp_upper_bound]; `rho_mask_level` the one that must lie in [rho_mask_lower_bound, rho_mask_upper_bound], or the term
is dropped. So truncated importance sampling (Yao et al. 2025) is an upper clamp, IcePop (arXiv 2510.18855) two mask bounds
without a clamp, and TRL's sequence_mask both levels "sequence_sum". A sequence is a document, never a pack of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.config.loss import LossConfig

LOG_RHO_LIMIT = 10.0
RHO_COLUMNS = ("rho", "rho_clamped", "rho_dropped_low", "rho_dropped_high")
"""Columns of the loss op's sums that describe rho, side by side in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Operands of `mgrpo.ops.policy_loss`, and what it cannot compute from them."""

    keep: Tensor | None = None
    """`[tokens]`, a factor of the policy term."""
    seq_log_rho: Tensor | None = None
    seq_log_rho_mask: Tensor | None = None
    rho: Tensor | None = None
    """`[tokens]`, the clamped and masked weight. None: the op computes it. VESPO takes it into a weight of its own, and
    which tokens the total-variation mask drops depends on their advantage; the op knows neither."""
    rho_sums: Tensor | None = None
    """`[len(RHO_COLUMNS)]`, given with `rho`: what the op would have reported."""


def correction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    config: LossConfig,
) -> Correction:
    """What `config` asks for; all arguments `[tokens]` but the lengths, the mask as numbers. Nothing has a gradient."""
    rollout = torch.where(rollout_logprobs.isfinite(), rollout_logprobs, old_logprobs)
    keep = None
    if config.off_policy_mask_threshold is not None:
        drift = _at_tokens_mean(rollout - logprobs.detach(), mask, cu_seqlens)
        keep = ((advantages >= 0) | (drift <= config.off_policy_mask_threshold)).to(mask.dtype)
    if not config.use_rho_correction:
        return Correction(keep=keep)

    log_rho = (old_logprobs - rollout).clamp(-LOG_RHO_LIMIT, LOG_RHO_LIMIT)
    seq_log_rho = _of_sequences(log_rho, mask, cu_seqlens, config.rho_level)
    seq_log_rho_mask = _of_sequences(log_rho, mask, cu_seqlens, config.rho_mask_level)
    if not (config.rho_mask_tv_divergence or config.policy_loss == "vespo"):
        return Correction(keep=keep, seq_log_rho=seq_log_rho, seq_log_rho_mask=seq_log_rho_mask)

    def at_tokens(seq: Tensor | None) -> Tensor:
        if seq is None:
            return log_rho.exp()
        return ops.per_token(seq.clamp(-LOG_RHO_LIMIT, LOG_RHO_LIMIT).exp(), cu_seqlens, len(mask))

    free, judged = at_tokens(seq_log_rho), at_tokens(seq_log_rho_mask)
    held = free.clamp(config.rho_clamp_lower_bound, config.rho_clamp_upper_bound or torch.inf)
    too_low, too_high = judged < config.rho_mask_lower_bound, judged > (config.rho_mask_upper_bound or torch.inf)
    if config.rho_mask_tv_divergence:
        # Total variation is the distance that VACO (arXiv 2603.01365) bounds; tokens whose step lowers it stay.
        distance = _at_tokens_mean(torch.expm1(log_rho).abs(), mask, cu_seqlens)
        too_high = (distance > config.rho_mask_upper_bound) & (log_rho * advantages > 0)
        too_low = torch.zeros_like(too_high)
    rho = held.masked_fill(too_low | too_high, 0.0)
    columns = torch.stack((rho, *(x.to(rho.dtype) for x in (held != free, too_low, too_high))))
    return Correction(keep=keep, rho=rho, rho_sums=torch.where(mask != 0, columns, 0.0).sum(1))


def _of_sequences(log_rho: Tensor, mask: Tensor, cu_seqlens: Tensor, level: str) -> Tensor | None:
    if level == "token":
        return None
    total, count = ops.segment_sums(log_rho, mask, cu_seqlens)
    return total if level == "sequence_sum" else total / count.clamp(min=1)


def _at_tokens_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean over a sequence's trained tokens, at each of its tokens."""
    return ops.per_token(ops.segment_mean(values, mask, cu_seqlens), cu_seqlens, len(mask))
