"""The policy loss of packed sequences, and sums over their tokens, with their gradients.

Owns arguments and autograd. The formulas are in csrc/core/policy_loss.h; named losses, denominators and metrics
belong to `mgrpo.algo`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgrpo.ops import reference
from mgrpo.ops.compiled import ops_for
from mgrpo.ops.reference_loss import per_token
from mgrpo.ops.settings import LossSettings


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    *,
    settings: LossSettings,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    keep: Tensor | None = None,
    seq_log_ratio: Tensor | None = None,
    seq_log_rho: Tensor | None = None,
    seq_log_rho_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of every token's weight x loss, and each sequence's sums for metrics.

    Every tensor is float32, or all are float64 (the reference computes then), on one device; gradients flow to
    `logprobs` and `seq_log_ratio` only. A token of weight 0 adds exactly 0 to everything, whatever its values. No
    collective. One launch on CUDA; the result of a sequence depends on that sequence alone and is reproducible to the
    bit. This does not hold for a surrogate in PyTorch.

    Args:
        logprobs, old_logprobs, ref_logprobs, rollout_logprobs: `[tokens]`.
        advantages: `[tokens]` or `[num_seqs]`; as many as tokens are taken as one per token.
        weights: `[tokens]`, the loss mask times the normaliser: how losses are averaged is decided here.
        cu_seqlens: `[num_seqs + 1]` int32 from 0 to tokens.
        keep: `[tokens]`, a further factor of the policy term, not of the KL penalty.
        seq_log_ratio: `[num_seqs]`, the log of the ratio at levels "sequence" and "sequence_token": `segment_mean` of
            logprobs - old_logprobs.
        seq_log_rho, seq_log_rho_mask: `[num_seqs]`, the log of the rho that multiplies and of the one that the mask
            bounds apply to; None: each token's own.
    Returns:
        The loss, a scalar, and sums `[num_seqs, len(COLUMNS)]`, detached.
    """
    tensors = (ref_logprobs, rollout_logprobs, advantages, weights, keep, cu_seqlens, seq_log_rho, seq_log_rho_mask)
    contiguous = [None if x is None else x.contiguous() for x in tensors]
    return _PolicyLoss.apply(logprobs, seq_log_ratio, old_logprobs.contiguous(), *contiguous, settings)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        seq_log_ratio: Tensor | None,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        rollout_logprobs: Tensor | None,
        advantages: Tensor,
        weights: Tensor,
        keep: Tensor | None,
        cu_seqlens: Tensor,
        seq_log_rho: Tensor | None,
        seq_log_rho_mask: Tensor | None,
        settings: LossSettings,
    ) -> tuple[Tensor, Tensor]:
        is_python = callable(settings.surrogate)
        ops = reference if is_python else ops_for(logprobs)
        grad, seq_grad, sums = ops.policy_loss(
            logprobs.contiguous(),
            old_logprobs,
            ref_logprobs,
            rollout_logprobs,
            advantages,
            weights,
            keep,
            cu_seqlens,
            None if seq_log_ratio is None else seq_log_ratio.contiguous(),
            seq_log_rho,
            seq_log_rho_mask,
            settings if is_python else settings.numbers(),
        )
        ctx.save_for_backward(grad, None if seq_log_ratio is None else seq_grad)
        ctx.mark_non_differentiable(sums)
        return sums[:, 0].sum(), sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad, seq_grad = ctx.saved_tensors
        return g_loss * grad, None if seq_grad is None else g_loss * seq_grad, *(None,) * 10


def segment_sums(x: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of weights x and sum of weights of each sequence, `[2, num_seqs]`; no gradient.

    Args:
        x, weights: `[tokens]` float32 or float64; where the weight is 0, x is not read.
        cu_seqlens: `[num_seqs + 1]` int32 from 0 to tokens.
    """
    return ops_for(x).segment_sums(x.detach().contiguous(), weights.contiguous(), cu_seqlens)


def segment_mean(x: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weighted mean of each sequence, `[num_seqs]`, 0 where all weights are 0. Gradients flow to x.

    Arguments as `segment_sums`.
    """
    return _SegmentMean.apply(x, weights, cu_seqlens)


class _SegmentMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
        total, weight = segment_sums(x, weights, cu_seqlens)
        ctx.save_for_backward(weights, cu_seqlens, weight)
        return torch.where(weight != 0, total / weight, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weights, cu_seqlens, weight = ctx.saved_tensors
        return weights * per_token(torch.where(weight != 0, g / weight, 0.0), cu_seqlens, len(weights)), None, None
