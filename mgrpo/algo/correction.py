"""Corrections for the engine that sampled with other probabilities than the trainer computes.

With d = old_logprob - rollout_logprob, clamped to +-10, and m the loss mask, rho is

    token           exp(d)
    sequence_mean   exp(sum m d / sum m), of each sequence
    sequence_sum    exp(sum m d)

It multiplies the policy term, never the KL penalty, and has no gradient. `rho_level` names the one that weighs, clamped to
[rho_clamp_lower, rho_clamp_upper]; `rho_mask_level` the one that must lie in [rho_mask_lower, rho_mask_upper], or the term
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Operands of `mgrpo.ops.policy_loss`."""

    log_rho: Tensor | None = None
    """`[tokens]`, each token's own, 0 where the engine's logprob is not finite."""
    seq_log_rho: Tensor | None = None
    seq_log_rho_mask: Tensor | None = None
    keep: Tensor | None = None
    """`[tokens]`, 0 where a mask over sequences drops the policy term."""
    bounds: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


def correction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    config: LossConfig,
) -> Correction:
    """What `config` asks for. Arguments as `mgrpo.algo.policy_loss`, mask as numbers; nothing here has a gradient."""
    logprobs = logprobs.detach()
    advantages = advantages if len(advantages) == len(mask) else ops.per_token(advantages, cu_seqlens, len(mask))
    rollout = torch.where(rollout_logprobs.isfinite(), rollout_logprobs, old_logprobs)
    log_rho = (old_logprobs - rollout).clamp(-LOG_RHO_LIMIT, LOG_RHO_LIMIT)
    keep, bounds = None, config.rho_bounds
    if config.off_policy_mask_threshold is not None:
        drift = _at_tokens_mean(rollout - logprobs, mask, cu_seqlens)
        keep = ((advantages >= 0) | (drift <= config.off_policy_mask_threshold)).to(mask.dtype)
    if not config.use_rho_correction:
        return Correction(log_rho=log_rho, keep=keep)
    if config.rho_mask_tv:
        # Total variation is the distance that VACO (arXiv 2603.01365) bounds; tokens whose step lowers it stay.
        distance = _at_tokens_mean(torch.expm1(log_rho).abs(), mask, cu_seqlens)
        stays = ((distance <= config.rho_mask_upper) | (log_rho * advantages <= 0)).to(mask.dtype)
        keep, bounds = stays if keep is None else keep * stays, (*bounds[:2], 0.0, 0.0)
    return Correction(
        log_rho=log_rho,
        seq_log_rho=_of_sequences(log_rho, mask, cu_seqlens, config.rho_level),
        seq_log_rho_mask=_of_sequences(log_rho, mask, cu_seqlens, config.rho_mask_level),
        keep=keep,
        bounds=bounds,
    )


def _of_sequences(log_rho: Tensor, mask: Tensor, cu_seqlens: Tensor, level: str) -> Tensor | None:
    if level == "token":
        return None
    total, count = ops.segment_sums(log_rho, mask, cu_seqlens)
    return total if level == "sequence_sum" else total / count.clamp(min=1)


def _at_tokens_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean over a sequence's trained tokens, at each of its tokens."""
    return ops.per_token(ops.segment_mean(values, mask, cu_seqlens), cu_seqlens, len(mask))
