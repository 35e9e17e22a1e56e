"""The clipped policy loss with a KL penalty, as a sum over tokens divided by a denominator the caller knows.

The denominator covers the whole optimizer mini-batch on all ranks, so micro-batches and ranks simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgrpo.algo.kl import NUM_ESTIMATORS, at_least_fp32, kl_estimate, log_difference
from mgrpo.algo.metrics import measure
from mgrpo.config.loss import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What one micro-batch adds to the loss and to the step's metrics."""

    loss: Tensor
    """Scalar with a graph: (sum of policy loss + beta x KL over the trained tokens) / denominator."""
    metrics: dict[str, Tensor]
    """Name -> `[2]` fp32 (sum, count), detached; names and order as `metric_names`; add them over micro-batches and ranks."""
    maxima: dict[str, Tensor]
    """Name -> scalar fp32, detached; take the maximum; -inf where nothing was measured."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    config: LossConfig,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, -min(ratio A, clip(ratio) A), plus beta x KL, over response tokens.

    Gradients flow through `logprobs` only. A token outside `loss_mask` adds exactly 0 to loss, gradient and metrics,
    whatever its values, inf and NaN included. A trained token whose old logprob is not finite counts as on-policy
    (ratio 1). Zero tokens give 0 with a graph. No collective, and no wait for a GPU.

    Args:
        logprobs: `[tokens]`; computed in fp32 or better.
        old_logprobs: `[tokens]`, those of the policy the ratio refers to; `logprobs.detach()` for a first pass.
        advantages: `[tokens]` or `[num_seqs]`.
        loss_mask: `[tokens]`, bool or 0/1.
        cu_seqlens: `[num_seqs + 1]` int32 over the tokens.
        ref_logprobs: `[tokens]`, required when beta is not 0; with beta 0 it only feeds metrics.
        rollout_logprobs: `[tokens]`, the engine's, for metrics.
        denominator: of the whole mini-batch over all ranks, see `loss_denominator`; None: that of these tokens alone.
    """
    _check(config, ref_logprobs)
    mask = loss_mask.bool()
    # Values under the mask are replaced before any arithmetic: 0 x NaN is NaN, also in a backward pass.
    logprobs = torch.where(mask, at_least_fp32(logprobs), 0.0)
    current = logprobs.detach()
    old = torch.where(mask & old_logprobs.isfinite(), old_logprobs.detach().to(current.dtype), current)
    advantages = torch.where(mask, _per_token(advantages.detach(), cu_seqlens, len(mask)).to(current.dtype), 0.0)

    ratio = log_difference(logprobs, old).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - config.clip_lower, 1.0 + config.clip_higher) * advantages
    surrogate = -torch.minimum(unclipped, clipped)

    d_ref = penalty = None
    if ref_logprobs is not None:
        d_ref = log_difference(logprobs, torch.where(mask, ref_logprobs.detach().to(current.dtype), 0.0))
    if config.beta != 0.0:
        penalty = config.beta * kl_estimate(d_ref, ratio, config.kl_estimator)
    total = (surrogate if penalty is None else surrogate + penalty).sum()
    if denominator is None:
        denominator = config.constant if config.aggregation == "constant" else mask.sum().clamp(min=1)

    metrics, maxima = measure(
        mask=mask,
        old_logprobs=old,
        ratio=ratio,
        is_clipped=clipped < unclipped,
        surrogate=surrogate,
        penalty=penalty,
        d_ref=d_ref,
        rollout_logprobs=rollout_logprobs,
    )
    return PolicyLoss(loss=total / denominator, metrics=metrics, maxima=maxima)


def loss_denominator(num_trained_tokens: int, config: LossConfig) -> float:
    """The denominator of a mini-batch with that many trained tokens over all data-parallel ranks; never 0."""
    return float(config.constant) if config.aggregation == "constant" else float(max(num_trained_tokens, 1))


def _per_token(advantages: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """`[tokens]`. As many advantages as tokens are taken as one a token: every sequence has at least one."""
    if len(advantages) == num_tokens:
        return advantages
    assert len(advantages) == len(cu_seqlens) - 1, (
        f"advantages must be [tokens={num_tokens}] or [num_seqs={len(cu_seqlens) - 1}], got {list(advantages.shape)}"
    )
    # Without output_size a GPU would have to tell the host the sum of the lengths.
    return torch.repeat_interleave(advantages, cu_seqlens.diff(), output_size=num_tokens)


def _check(config: LossConfig, ref_logprobs: Tensor | None) -> None:
    if config.policy_loss != "ppo_clip":
        raise ValueError(f"policy_loss={config.policy_loss!r} is unknown; choose 'ppo_clip'")
    if config.ratio_level != "token":
        raise ValueError(f"ratio_level={config.ratio_level!r} is unknown; choose 'token'")
    if config.aggregation not in ("token", "constant"):
        raise ValueError(f"aggregation={config.aggregation!r} is unknown; choose 'token' or 'constant'")
    if config.aggregation == "constant" and not config.constant:
        raise ValueError(f"aggregation 'constant' needs a divisor, got constant={config.constant}")
    if config.kl_estimator not in range(NUM_ESTIMATORS):
        raise ValueError(f"kl_estimator={config.kl_estimator!r} is unknown; choose 0, 1, 2 or 3")
    if config.beta != 0.0 and ref_logprobs is None:
        raise ValueError(f"beta={config.beta} needs ref_logprobs; load the reference model or set beta=0")
