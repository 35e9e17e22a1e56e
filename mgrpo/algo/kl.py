"""Per-token estimates of the KL divergence from the reference model, for use as a penalty in the loss.

With l, l_ref and l_old the log-probabilities of a sampled token, d = l - l_ref and r = exp(l - l_old):

    estimator   value               expected on-policy gradient
    0           d                   0: a metric, useless as a loss
    1           d^2 / 2             that of KL(policy, reference)
    2           exp(-d) - 1 + d     that of KL(reference, policy), although its value estimates KL(policy, reference)
    3           r d                 that of KL(policy, reference)

Value and gradient differ because the gradient of a sample mean misses the dependence of the sampling itself on the
parameters. Estimator 2 is k3 of Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 40.0
"""Differences of log-probabilities are clamped to this, with gradient 0 beyond: exp(40) is still finite in fp32."""

NUM_ESTIMATORS = 4


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, *, estimator: int = 2) -> Tensor:
    """Estimate of the KL divergence at each token; gradients flow through `logprobs` only.

    Args:
        logprobs: `[tokens]`, of the policy; computed in fp32 or better.
        ref_logprobs: `[tokens]`, of the reference model.
        old_logprobs: `[tokens]`, of the policy before the first update on this batch; matters to estimator 3 only.
        estimator: with d = logprob - reference logprob and r = exp(logprob - old logprob), 0 is d, 1 is d^2 / 2, 2 is
            exp(-d) - 1 + d, 3 is r d.
    Returns:
        `[tokens]`, at least fp32.
    Raises:
        ValueError: no such estimator.
    """
    if estimator not in range(NUM_ESTIMATORS):
        raise ValueError(f"kl_estimator={estimator!r} is unknown; choose 0, 1, 2 or 3")
    logprobs = at_least_fp32(logprobs)
    ratio = log_difference(logprobs, old_logprobs.detach()).exp()
    return kl_estimate(log_difference(logprobs, ref_logprobs.detach()), ratio, estimator)


def kl_estimate(d: Tensor, ratio: Tensor, estimator: int) -> Tensor:
    """The table's value column. `d` and `ratio` are `[tokens]` and already clamped."""
    if estimator == 0:
        return d
    if estimator == 1:
        return d.square() / 2
    if estimator == 2:
        return torch.expm1(-d) + d
    return ratio * d


def log_difference(logprobs: Tensor, other: Tensor) -> Tensor:
    """`logprobs - other`, clamped to +-LOG_RATIO_LIMIT."""
    return (logprobs - other).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def at_least_fp32(values: Tensor) -> Tensor:
    """fp32, or float64 unchanged: a bf16 log-probability of -8 has steps of 0.03."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
