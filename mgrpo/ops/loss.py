"""The policy loss of packed sequences, and sums over their tokens, with their gradients.

Owns arguments and autograd. The formulas stand in csrc/core/policy_loss.h; named losses, denominators and metrics are
`mgrpo.algo`'s affair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mgrpo.ops import reference
from mgrpo.ops.library import ops_for
from mgrpo.ops.reference import per_token

SURROGATES = ("ppo_clip", "cispo", "reinforce", "sapo")
"""All compiled but "sapo", which PyTorch computes."""
RATIO_LEVELS = ("token", "sequence", "sequence_token")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    keep: Tensor | None = None,
    seq_log_ratio: Tensor | None = None,
    seq_log_rho: Tensor | None = None,
    seq_log_rho_mask: Tensor | None = None,
    surrogate: str = "ppo_clip",
    ratio_level: str = "token",
    clip_low: float = 0.8,
    clip_high: float = 1.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: int = 2,
    kl_bias_correction: bool = False,
    use_rho: bool = False,
    rho_bounds: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> tuple[Tensor, Tensor]:
    """Sum of every token's weight x loss, and what a step reports about each sequence.

    Every tensor is float32, or all are float64 (the reference computes then), on one device; gradients flow to
    `logprobs` and `seq_log_ratio` only. A token of weight 0 adds exactly 0 to everything, whatever its values. No
    collective. One launch on CUDA, the result of a sequence depends on that sequence alone and repeats to the bit; not so
    "sapo", which PyTorch computes.

    Args:
        logprobs, old_logprobs, ref_logprobs, rollout_logprobs: `[tokens]`.
        advantages: `[tokens]` or `[num_seqs]`; as many as tokens are taken as one a token.
        weights: `[tokens]`, the loss mask times the normaliser: how losses are averaged is decided here.
        cu_seqlens: `[num_seqs + 1]` int32 from 0 to tokens.
        keep: `[tokens]`, a further factor of the policy term, not of the KL penalty.
        seq_log_ratio: `[num_seqs]`, the log of the ratio at levels "sequence" and "sequence_token": `segment_mean` of
            logprobs - old_logprobs, over all ranks that share a sequence.
        seq_log_rho, seq_log_rho_mask: `[num_seqs]`, the log of the rho that weighs and of the one that the mask bounds
            look at; None: each token's own.
        rho_bounds: clamp below and above, mask below and above; 0 is off.
        sapo_temperatures: of SAPO's gate for advantages above 0 and for the others.
    Returns:
        The loss, a scalar, and sums `[num_seqs, len(COLUMNS)]`, detached.
    """
    tensors = (ref_logprobs, rollout_logprobs, advantages, weights, keep, cu_seqlens)
    settings = (
        _code("surrogate", surrogate, SURROGATES),
        _code("ratio_level", ratio_level, RATIO_LEVELS),
        clip_low,
        clip_high,
        delta or 0.0,
        dual_clip or 0.0,
        beta,
        kl_estimator,
        kl_bias_correction,
        use_rho,
        *rho_bounds,
    )
    if surrogate == "sapo":
        settings += sapo_temperatures
    contiguous = [None if x is None else x.contiguous() for x in (*tensors, seq_log_rho, seq_log_rho_mask)]
    return _PolicyLoss.apply(logprobs, seq_log_ratio, old_logprobs.contiguous(), *contiguous, settings)


def _code(argument: str, name: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(f"{argument}={name!r} is unknown; choose one of {', '.join(names)}")
    return names.index(name)


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
        settings: tuple,
    ) -> tuple[Tensor, Tensor]:
        ops = reference if settings[0] == SURROGATES.index("sapo") else ops_for(logprobs)
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
            *settings,
        )
        ctx.save_for_backward(grad, None if seq_log_ratio is None else seq_grad)
        ctx.mark_non_differentiable(sums)
        return sums[:, 0].sum(), sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad, seq_grad = ctx.saved_tensors
        return g_loss * grad, None if seq_grad is None else g_loss * seq_grad, *(None,) * 10


def segment_sums(x: Tensor, weights: Tensor, cu_seqlens: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Sum of weights x and sum of weights of each sequence, `[2, num_seqs]`; no gradient.

    Args:
        x, weights: `[tokens]` float32 or float64; where the weight is 0, x is not read.
        cu_seqlens: `[num_seqs + 1]` int32 from 0 to tokens.
        group: ranks that each hold a part of every sequence (context parallel), all of which must call: one all-reduce.
    """
    sums = ops_for(x).segment_sums(x.detach().contiguous(), weights.contiguous(), cu_seqlens)
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return sums


def segment_mean(x: Tensor, weights: Tensor, cu_seqlens: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """Weighted mean of each sequence, `[num_seqs]`, 0 where all weights are 0. Gradients flow to x.

    Arguments as `segment_sums`. With a group every rank gets the mean of the whole sequence and, backward, adds up what
    all of them did with it: given that each rank's loss covers its own tokens, every rank must run backward, too.
    """
    return _SegmentMean.apply(x, weights, cu_seqlens, group)


class _SegmentMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, cu_seqlens: Tensor, group: ProcessGroup | None) -> Tensor:
        total, weight = segment_sums(x, weights, cu_seqlens, group=group)
        ctx.save_for_backward(weights, cu_seqlens, weight)
        ctx.group = group
        return torch.where(weight != 0, total / weight, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weights, cu_seqlens, weight = ctx.saved_tensors
        if ctx.group is not None and ctx.group.size() > 1:
            g = g.clone(memory_format=torch.contiguous_format)  # autograd may have given it to others, too
            torch.distributed.all_reduce(g, group=ctx.group)
        return (
            weights * per_token(torch.where(weight != 0, g / weight, 0.0), cu_seqlens, len(weights)),
            None,
            None,
            None,
        )
