"""What the policy loss reports, in a form that adds up over micro-batches and ranks.

A metric is a pair (sum over trained tokens, number of tokens in that sum). Pairs are added, and divided once at the end,
so every token weighs the same wherever it was computed. A pair with count 0 was not measured and is not logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.algo.correction import RHO_COLUMNS
from mgrpo.config.loss import LossConfig

_RATIO, _RATIO_VAR = "val/ratio", "val/ratio_var"
_MISMATCH, _MISMATCH_STD = "debug/vllm_vs_local_logprob_diff_mean", "debug/vllm_vs_local_logprob_diff_std"
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
    _MISMATCH: (("mismatch",), "known_rollout"),
    _MISMATCH_STD: (("mismatch_square",), "known_rollout"),
    "debug/vllm_local_reverse_kl": (("rollout_kl",), "known_rollout"),
    "debug/vllm_vs_local_ratio_tail_frac": (("mismatch_tail",), "known_rollout"),
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
"""Which columns of `ops.policy_loss`'s sums make a metric's sum, and which its count."""
_NAMES = (*_COLUMNS, _KEPT_OUT)
_MAXIMA = ("debug/vllm_vs_local_logprob_diff_max",)


def metric_names(config: LossConfig) -> tuple[str, ...]:
    """Keys of `PolicyLoss.metrics` in their order: what a rank without a loss fills with zeros to join the reduction.

    Whether a reference or rollout logprobs were given does not change the names, only the counts.
    """
    return _NAMES


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
        assert tuple(sums.shape) == (len(_NAMES), 2), f"sums must be [{len(_NAMES)}, 2], got {list(sums.shape)}"
        pairs = {name: (total, count) for name, (total, count) in zip(_NAMES, sums.tolist(), strict=True)}
    logged = {name: total / count for name, (total, count) in pairs.items() if count > 0}
    if _RATIO_VAR in logged:
        # The pair holds squares of (ratio - 1), not of the ratio: near 1 the difference of two squares would cancel.
        logged[_RATIO_VAR] = max(logged[_RATIO_VAR] - (logged[_RATIO] - 1.0) ** 2, 0.0)
    if _MISMATCH_STD in logged:
        logged[_MISMATCH_STD] = max(logged[_MISMATCH_STD] - logged[_MISMATCH] ** 2, 0.0) ** 0.5
    for name, value in (maxima or {}).items():
        if float(value) != -np.inf:
            logged[name] = float(value)
    return logged


@torch.no_grad()
def summarise(
    sums: Tensor, *, has_reference: bool, use_rho: bool, rho_sums: Tensor | None, keep: Tensor | None, mask: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pairs and maxima of one call of the loss, from the sums `[num_seqs, columns]` that the op gave.

    Args:
        rho_sums: those of `RHO_COLUMNS` where the op did not compute them; None: it did.
        keep, mask: `[tokens]`.
    """
    totals = torch.cat((sums[:, :-1].sum(0), sums.new_zeros(1)))
    if rho_sums is not None:
        first = ops.COLUMNS.index(RHO_COLUMNS[0])
        totals[first : first + len(RHO_COLUMNS)] = rho_sums
    largest = torch.cat((sums[:, -1], sums.new_full((1,), -torch.inf))).amax()
    # Picked, not multiplied by 0 and 1: one column that is not finite must not take the others along.
    pairs = totals[_choice(has_reference, use_rho, sums.device)].sum(-1)
    dropped = mask.new_zeros(2) if keep is None else torch.stack(((mask * (keep == 0)).sum(), mask.sum()))
    pairs = torch.cat((pairs, dropped[None])).float()
    return dict(zip(_NAMES, pairs.unbind(), strict=True)), dict(zip(_MAXIMA, (largest.float(),), strict=True))


@cache
def _choice(has_reference: bool, use_rho: bool, device: torch.device) -> Tensor:
    """Which columns to add up for each metric's sum and count, `[metrics, 2, 2]`; the column behind the last one is 0.

    What was not measured has count 0.
    """
    none = len(ops.COLUMNS) - 1
    choice = torch.full((len(_COLUMNS), 2, 2), none)
    for number, (name, (parts, count)) in enumerate(_COLUMNS.items()):
        if (name.startswith("objective/kl") and not has_reference) or (name.startswith("val/rho") and not use_rho):
            continue
        choice[number, 0, : len(parts)] = torch.tensor([ops.COLUMNS.index(part) for part in parts])
        choice[number, 1, 0] = ops.COLUMNS.index(count)
    return choice.to(device)
