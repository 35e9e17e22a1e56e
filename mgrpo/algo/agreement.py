"""The agreement of trainer and engine about tokens of the present weights, and the policy's distance from older tokens.

A loss measures the same without ages, over all its tokens and against the old logprobs, and for nothing, since it computes the
differences anyway. This is for batches in which that would mix both, and where the old logprobs are the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgrpo.algo.kl import at_least_fp32
from mgrpo.algo.loss_metrics import MISMATCH, MISMATCH_MAX, MISMATCH_STD, MISMATCH_TAIL, ROLLOUT_KL

DRIFT = "async/logprob_diff_age_"
"""Prefix of the age in the name of a metric."""


@torch.no_grad()
def agreement(
    logprobs: Tensor,
    start_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    ages: Tensor | None = None,
    oldest: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Metrics and maxima to put in place of those of the same names in a `PolicyLoss`, and those of older tokens.

    Args:
        logprobs: `[tokens]`, of the pass that trains.
        start_logprobs: `[tokens]`, under the weights that the step started from; not finite: those of the pass.
        rollout_logprobs: `[tokens]`, the engine's; tokens without a finite one are not counted.
        loss_mask: `[tokens]` bool.
        ages: `[tokens]` uint8, see `TrainSample`; None: all 0.
        oldest: at least the largest of the ages, on the host.
    """
    logprobs, start = at_least_fp32(logprobs), at_least_fp32(start_logprobs)
    known = loss_mask & rollout_logprobs.isfinite()
    gap = torch.where(start.isfinite(), start, logprobs) - rollout_logprobs
    rho = gap.clamp(-10, 10).exp()

    def pair(values: Tensor, counted: Tensor) -> Tensor:
        return torch.stack((torch.where(counted, values, 0.0).sum(), counted.sum())).float()

    present = known if ages is None else known & (ages == 0)
    metrics = {
        MISMATCH: pair(gap.abs(), present),
        MISMATCH_STD: pair(gap.square(), present),
        ROLLOUT_KL: pair(rollout_logprobs - logprobs, present),
        MISMATCH_TAIL: pair(((rho < 0.9) | (rho > 1.1)).to(gap.dtype), present),
    }
    if ages is not None:
        metrics |= {f"{DRIFT}{age}": pair(gap.abs(), known & (ages == age)) for age in range(1, oldest + 1)}
    largest = torch.where(present, gap.abs(), -torch.inf)
    return metrics, {MISMATCH_MAX: torch.cat((largest, largest.new_full((1,), -torch.inf))).amax().float()}
