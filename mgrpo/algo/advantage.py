"""Group-relative advantages.

Call it on whole groups, before any sample is filtered out or masked: a group that has lost members has other
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rewards of a group that differ by no more than this share of the largest one are equal up to rounding. Asking for a
# standard deviation of exactly 0 is not enough: std([0.1, 0.1, 0.1]) is 1.4e-17.
_RELATIVE_TOLERANCE = 1e-8

NORMALIZATIONS = ("standard", "centered", "batch_std", "gdpo")


def advantages(
    rewards: Tensor,
    *,
    normalization: str = "standard",
    ddof: int = 0,
    eps: float = 1e-8,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Advantage of each completion over its group; computed in float64.

        standard    (reward - mean) / (std + eps), both of the group
        centered    reward - mean of the group (Dr. GRPO, arXiv 2503.20783)
        batch_std   (reward - mean of the group) / (std of all rewards + eps) (Lite PPO, arXiv 2508.08221)
        gdpo        s = sum over functions of weight x standard(rewards of that function), then
                    (s - mean of all s) / (std of all s + eps) (arXiv 2601.05242)

    A NaN reward (no score) leaves every mean and deviation and gets advantage 0; in "gdpo" a function's NaN leaves out
    that function only, and a completion that no function scores gets 0. Rewards of a group that are all equal are 0
    after centering. With one completion per prompt the whole batch is the group: REINFORCE with a batch baseline.

    Args:
        rewards: `[prompts, group]`; for "gdpo" `[prompts, group, functions]`.
        normalization: "standard", "centered", "batch_std" or "gdpo", as above.
        ddof: a deviation divides by the number of its rewards minus this, 0 or 1.
        eps: added to a deviation before it divides.
        weights: one per function, for "gdpo" only; None: 1 each.
    Returns:
        `[prompts, group]` in the type of `rewards`, float32 if that is an integer type.
    Raises:
        ValueError: an unknown normalization, a shape that it does not take, or an infinite reward.
    """
    _check(rewards, normalization, ddof, weights)
    if rewards.shape[1] == 1 and rewards.shape[0] > 1:
        by_batch = rewards.transpose(0, 1)
        return advantages(by_batch, normalization=normalization, ddof=ddof, eps=eps, weights=weights).transpose(0, 1)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return rewards.new_zeros(rewards.shape[:2], dtype=dtype)

    tolerance = max(_RELATIVE_TOLERANCE, 4 * torch.finfo(dtype).eps)
    rewards = rewards.double()
    if normalization == "gdpo":
        by_function = _centered(rewards, 1, tolerance) / (_std(rewards, 1, ddof) + eps)
        weighted = by_function * torch.tensor(weights or [1.0] * rewards.shape[2], dtype=torch.float64)
        total = weighted.sum(2).masked_fill(rewards.isnan().all(2), torch.nan)
        return (_centered(total, (0, 1), tolerance) / (_std(total, (0, 1), ddof) + eps)).to(dtype)
    centered = _centered(rewards, 1, tolerance)
    if normalization == "standard":
        centered = centered / (_std(rewards, 1, ddof) + eps)
    elif normalization == "batch_std":
        centered = centered / (_std(rewards, (0, 1), ddof) + eps)
    return centered.to(dtype)


def has_zero_spread(rewards: Tensor) -> Tensor:
    """Whether all scored rewards of a group are equal up to rounding; also where none or one is scored.

    Args:
        rewards: `[prompts, group]`, NaN for no score.
    Returns:
        `[prompts]` bool: where every advantage is 0 under any normalization by group.
    """
    if rewards.numel() == 0:
        return torch.ones(rewards.shape[0], dtype=torch.bool)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return _is_flat(rewards.double(), 1, max(_RELATIVE_TOLERANCE, 4 * torch.finfo(dtype).eps))[:, 0]


def _is_flat(values: Tensor, dim: int | tuple[int, ...], tolerance: float) -> Tensor:
    """Whether the values along `dim` are equal up to the tolerance; `dim` stays, of size 1."""
    known = ~values.isnan()

    def largest(x: Tensor) -> Tensor:
        return x.masked_fill(~known, -torch.inf).amax(dim, keepdim=True)

    # -inf where nothing is known, which is flat.
    spread = largest(values) + largest(-values)
    return spread <= tolerance * largest(values.abs()).clamp(min=0.0)


def _centered(values: Tensor, dim: int | tuple[int, ...], tolerance: float) -> Tensor:
    """Values minus their mean along `dim`, exactly 0 where they are all equal and where they are NaN."""
    centered = values - values.nanmean(dim, keepdim=True)
    return centered.masked_fill(values.isnan() | _is_flat(values, dim, tolerance), 0.0)


def _std(values: Tensor, dim: int | tuple[int, ...], ddof: int) -> Tensor:
    """Standard deviation of the values that are not NaN; 0 where there are too few."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    square = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (square / (count - ddof).clamp(min=1)).sqrt()


def _check(rewards: Tensor, normalization: str, ddof: int, weights: Sequence[float] | None) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} is not supported; choose 0 (population) or 1 (sample)")
    shape = "[prompts, group, functions]" if normalization == "gdpo" else "[prompts, group]"
    if rewards.ndim != shape.count(",") + 1:
        raise ValueError(f"rewards must be {shape} for {normalization!r}, got shape {list(rewards.shape)}")
    if weights is not None and (normalization != "gdpo" or len(weights) != rewards.shape[2]):
        expected = f"{rewards.shape[2]}" if normalization == "gdpo" else f"none for {normalization!r}"
        raise ValueError(f"weights must be one per reward function, expected {expected}, got {len(weights)}")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite, which makes its whole group useless; use NaN for 'no score'")
