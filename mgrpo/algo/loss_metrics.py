"""The metrics of a loss, in a form that adds up over micro-batches and ranks.

A metric is a pair (sum over trained tokens, number of tokens in that sum). Pairs are added, and divided once at the
end, so every token weighs the same wherever it was computed. A pair with count 0 was not measured and is not logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mgrpo import ops

_RATIO, _RATIO_VAR = "val/ratio", "val/ratio_var"
MISMATCH, MISMATCH_STD = "debug/vllm_vs_local_logprob_diff_mean", "debug/vllm_vs_local_logprob_diff_std"
MISMATCH_TAIL, ROLLOUT_KL = "debug/vllm_vs_local_ratio_tail_frac", "debug/vllm_local_reverse_kl"
MISMATCH_MAX = "debug/vllm_vs_local_logprob_diff_max"
_KEPT_OUT = "val/policy_term_drop_frac"
_COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "loss/policy_avg": (("policy",), "count"),
    "loss/kl_avg": (("penalty",), "count"),
    "loss/total_avg": (("policy", "penalty"), "count"),
    "policy/clipfrac_avg": (("clipped_low", "clipped_high"), "count"),
    "clip_ratio/low_mean": (("clipped_low",), "count"),
    "clip_ratio/high_mean": (("clipped_high",), "count"),
    "policy/bounded_frac": (("bounded",), "count"),
    "policy/approxkl_avg": (("approx_kl",), "count"),
    _RATIO: (("ratio",), "count"),
    _RATIO_VAR: (("ratio_deviation",), "count"),
    MISMATCH: (("mismatch",), "known_rollout"),
    MISMATCH_STD: (("mismatch_square",), "known_rollout"),
    ROLLOUT_KL: (("rollout_kl",), "known_rollout"),
    MISMATCH_TAIL: (("mismatch_tail",), "known_rollout"),
    "objective/kl0_avg": (("kl0",), "count"),
    "objective/kl1_avg": (("kl1",), "count"),
    "objective/kl2_avg": (("kl2",), "count"),
    "objective/kl3_avg": (("kl3",), "count"),
    "val/rho_weight": (("rho",), "count"),
    "val/rho_clipfrac": (("rho_clamped",), "count"),
    "val/rho_drop_frac": (("rho_dropped_low", "rho_dropped_high"), "count"),
    "val/rho_drop_low_frac": (("rho_dropped_low",), "count"),
    "val/rho_drop_high_frac": (("rho_dropped_high",), "count"),
}
"""The columns of `ops.policy_loss`'s sums that make a metric's sum, and those that make its count."""
METRICS = (*_COLUMNS, _KEPT_OUT)
"""Keys of `PolicyLoss.metrics`; a user's function adds its own."""
MAXIMA = (MISMATCH_MAX,)
"""Keys of `PolicyLoss.maxima`."""
KL = frozenset(("kl0", "kl1", "kl2", "kl3"))
RHO = frozenset(("rho", "rho_clamped", "rho_dropped_low", "rho_dropped_high"))
"""Groups of columns that a call may leave unmeasured."""
_SURROGATE = frozenset(("policy", "penalty", "clipped_low", "clipped_high", "bounded"))
OF_THE_SURROGATE = frozenset(
    (_KEPT_OUT, *(name for name, (parts, _) in _COLUMNS.items() if not _SURROGATE.isdisjoint(parts)))
)
"""Metrics that a user's function, in place of the surrogate, does not have."""


class MetricSums(NamedTuple):
    """Metrics of some tokens by name, as plain numbers; made of lists and dictionaries, so that JSON can carry it."""

    sums: Mapping[str, list[float]]
    """Name -> [sum, count]."""
    maxima: Mapping[str, float]


def metric_sums(metrics: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> MetricSums:
    """Metrics of a `PolicyLoss`; waits for the device."""
    pairs = torch.stack(list(metrics.values())).double().tolist()
    return MetricSums(
        dict(zip(metrics, pairs, strict=True)), {name: float(largest) for name, largest in maxima.items()}
    )


def add_metrics(parts: Iterable[MetricSums]) -> MetricSums:
    """The metrics of all tokens, from those of parts of them in a fixed order; a name may be absent from some parts."""
    sums: dict[str, list[float]] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, (total, count) in part.sums.items():
            before = sums.get(name, [0.0, 0.0])
            sums[name] = [before[0] + total, before[1] + count]
        for name, largest in part.maxima.items():
            # Not max(): NaN must propagate.
            maxima[name] = float(np.maximum(maxima.get(name, -np.inf), largest))
    return MetricSums(sums, maxima)


def reduce_metrics(metrics: MetricSums) -> dict[str, float]:
    """Logged names and values, from the metrics of all tokens; names beyond `METRICS` are allowed."""
    logged = {name: total / count for name, (total, count) in metrics.sums.items() if count > 0}
    if _RATIO_VAR in logged:
        # The pair holds squares of (ratio - 1), not of the ratio: near 1 the difference of two squares would cancel.
        logged[_RATIO_VAR] = _variance(logged[_RATIO_VAR], logged[_RATIO] - 1.0)
    if MISMATCH_STD in logged:
        logged[MISMATCH_STD] = _variance(logged[MISMATCH_STD], logged[MISMATCH]) ** 0.5
    return logged | {name: largest for name, largest in metrics.maxima.items() if largest != -np.inf}


def _variance(mean_square: float, mean: float) -> float:
    """Variance from means of fp32 values; 0 below their rounding error."""
    found = mean_square - mean**2
    return found if found > 1e-6 * mean_square else 0.0


@torch.no_grad()
def summarise(
    sums: Tensor,
    *,
    unmeasured: frozenset[str],
    rho_sums: Mapping[str, Tensor] | None = None,
    keep: Tensor | None,
    mask: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pairs and maxima of one call of the loss, from the sums `[num_seqs, columns]` of the op.

    Args:
        unmeasured: columns that have no meaning in this call.
        rho_sums: column -> scalar where the op did not compute it; None: it did.
        keep, mask: `[tokens]`.
    """
    totals = torch.cat((sums[:, :-1].sum(0, dtype=torch.float64), sums.new_zeros(1)))
    for name, total in (rho_sums or {}).items():
        totals[ops.COLUMNS.index(name)] = total
    largest = torch.cat((sums[:, -1], sums.new_full((1,), -torch.inf))).amax()
    # Selected, not multiplied by 0 and 1: a column that is not finite must not affect the others.
    pairs = totals[_choice(unmeasured, sums.device)].sum(-1)
    dropped = mask.new_zeros(2) if keep is None else torch.stack(((mask * (keep == 0)).sum(), mask.sum()))
    pairs = torch.cat((pairs, dropped[None])).float()
    return dict(zip(METRICS, pairs.unbind(), strict=True)), dict(zip(MAXIMA, (largest.float(),), strict=True))


@cache
def _choice(unmeasured: frozenset[str], device: torch.device) -> Tensor:
    """Columns to add up for each metric's sum and count, `[metrics, 2, 2]`; the column after the last one is 0.

    Metrics that were not measured have count 0.
    """
    none = len(ops.COLUMNS) - 1
    choice = torch.full((len(_COLUMNS), 2, 2), none)
    for number, (parts, count) in enumerate(_COLUMNS.values()):
        if unmeasured.isdisjoint(parts):
            choice[number, 0, : len(parts)] = torch.tensor([ops.COLUMNS.index(part) for part in parts])
            choice[number, 1, 0] = ops.COLUMNS.index(count)
    return choice.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else choice
