"""What the policy loss reports, in a form that adds up over micro-batches and ranks.

A metric is a pair (sum over trained tokens, number of tokens in that sum). Pairs are added, and divided once at the end,
so every token weighs the same wherever it was computed. A pair with count 0 was not measured and is not logged.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mgrpo.algo.kl import NUM_ESTIMATORS, kl_estimate
from mgrpo.config.loss import LossConfig

_RATIO, _RATIO_VAR = "val/ratio", "val/ratio_var"
_SUMS = (
    "loss/policy_avg",
    "loss/kl_avg",
    "loss/total_avg",
    "policy/clipfrac_avg",
    _RATIO,
    _RATIO_VAR,
    "debug/vllm_vs_local_logprob_diff_mean",
    *(f"objective/kl{k}_avg" for k in range(NUM_ESTIMATORS)),
)
_MAXIMA = ("debug/vllm_vs_local_logprob_diff_max",)


def metric_names(config: LossConfig) -> tuple[str, ...]:
    """Keys of `PolicyLoss.metrics` in their order: what a rank without a loss fills with zeros to join the reduction.

    Whether a reference or rollout logprobs were given does not change the names, only the counts.
    """
    return _SUMS


def maxima_names(config: LossConfig) -> tuple[str, ...]:
    """Keys of `PolicyLoss.maxima` in their order; the value that joins a maximum without changing it is -inf."""
    return _MAXIMA


def reduce_metrics(
    sums: Mapping[str, Tensor] | Tensor | np.ndarray, maxima: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Logged names and values, from pairs that were already added over micro-batches and ranks.

    Args:
        sums: name -> `[2]` (sum, count), further names of the caller's own allowed; or `[metrics, 2]` in the order of
            `metric_names`.
        maxima: name -> scalar.
    """
    if isinstance(sums, Mapping):
        pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in sums.items()}
    else:
        assert tuple(sums.shape) == (len(_SUMS), 2), f"sums must be [{len(_SUMS)}, 2], got {list(sums.shape)}"
        pairs = {name: (total, count) for name, (total, count) in zip(_SUMS, sums.tolist(), strict=True)}
    logged = {name: total / count for name, (total, count) in pairs.items() if count > 0}
    if _RATIO_VAR in logged:
        # The pair holds squares of (ratio - 1), not of the ratio: near 1 the difference of two squares would cancel.
        logged[_RATIO_VAR] = max(logged[_RATIO_VAR] - (logged[_RATIO] - 1.0) ** 2, 0.0)
    for name, value in (maxima or {}).items():
        if float(value) != -np.inf:
            logged[name] = float(value)
    return logged


@torch.no_grad()
def measure(
    *,
    mask: Tensor,
    old_logprobs: Tensor,
    ratio: Tensor,
    is_clipped: Tensor,
    surrogate: Tensor,
    penalty: Tensor | None,
    d_ref: Tensor | None,
    rollout_logprobs: Tensor | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima of one call of the loss.

    Args:
        mask: `[tokens]` bool. All others are `[tokens]` and finite where the mask is False; `penalty` is already
            multiplied by beta; `d_ref` is logprobs - reference; a `rollout_logprobs` that is not finite is not counted.
    """
    trained = mask.to(ratio.dtype)
    deviation = ratio - 1.0
    total = surrogate if penalty is None else surrogate + penalty
    columns = [surrogate, penalty, total, is_clipped.to(ratio.dtype), ratio, deviation.square()]
    if rollout_logprobs is None:
        columns += [None, None]
        largest = ratio.new_full((), -torch.inf)
    else:
        known = mask & rollout_logprobs.isfinite()
        difference = torch.where(known, (old_logprobs - rollout_logprobs).abs(), 0.0)
        columns += [difference, known.to(ratio.dtype)]
        largest = torch.where(known, difference, -torch.inf).amax() if len(mask) else ratio.new_full((), -torch.inf)
    columns += [None if d_ref is None else kl_estimate(d_ref, ratio, k) for k in range(NUM_ESTIMATORS)]
    columns += [torch.ones_like(trained)]

    zeros = torch.zeros_like(trained)
    sums = torch.stack([zeros if column is None else column.detach() for column in columns]).mul_(trained).sum(dim=1)
    policy, kl, total, clipfrac, ratio_sum, ratio_square, diff, num_known, *kls, num_trained = sums.float().unbind()
    num_ref = torch.zeros_like(num_trained) if d_ref is None else num_trained
    pairs = [(value, num_trained) for value in (policy, kl, total, clipfrac, ratio_sum, ratio_square)]
    pairs += [(diff, num_known)] + [(value, num_ref) for value in kls]
    table = torch.stack([value for pair in pairs for value in pair]).view(len(_SUMS), 2)
    return dict(zip(_SUMS, table.unbind(), strict=True)), dict(zip(_MAXIMA, (largest.float(),), strict=True))
