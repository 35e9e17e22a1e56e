"""Group-relative advantages.

Call it on whole groups, before any sample is filtered out or masked: a group that has lost members has other statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rewards of a group that differ by no more than this share of the largest one are equal up to rounding. Asking for a
# standard deviation of exactly 0 is not enough: std([0.1, 0.1, 0.1]) is 1.4e-17.
_RELATIVE_TOLERANCE = 1e-8


def advantages(rewards: Tensor, *, normalization: str = "standard", ddof: int = 0, eps: float = 1e-8) -> Tensor:
    """How much better each completion did than its group.

    A NaN reward (no score) leaves the group's mean and deviation and gets advantage 0; a group whose rewards are all
    equal gets 0. With one completion a prompt the whole batch is the group: REINFORCE with a batch baseline.

    Args:
        rewards: `[prompts, group]`; computed in float64 whatever the type.
        normalization: "standard" is (reward - mean) / (std + eps), "centered" is reward - mean.
        ddof: the deviation divides by the number of scored completions minus this, 0 or 1.
    Returns:
        `[prompts, group]` in the type of `rewards`, float32 if that is an integer type.
    """
    if normalization not in ("standard", "centered"):
        raise ValueError(f"normalization={normalization!r} is unknown; choose 'standard' or 'centered'")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} is not a deviation in use; choose 0 (population) or 1 (sample)")
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [prompts, group], got shape {list(rewards.shape)}")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite, which makes its whole group useless; use NaN for 'no score'")
    prompts, group = rewards.shape
    if group == 1 and prompts > 1:
        return advantages(rewards.T, normalization=normalization, ddof=ddof, eps=eps).T
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return rewards.to(dtype)

    tolerance = max(_RELATIVE_TOLERANCE, 4 * torch.finfo(dtype).eps)
    rewards = rewards.double()
    scored = ~torch.isnan(rewards)
    count = scored.sum(dim=1, keepdim=True)
    mean = rewards.nansum(dim=1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(scored, rewards - mean, 0.0)
    spread = _largest(rewards, scored) + _largest(-rewards, scored)
    is_flat = spread <= tolerance * _largest(rewards.abs(), scored).clamp(min=0.0)
    if normalization == "standard":
        variance = centered.square().sum(dim=1, keepdim=True) / (count - ddof).clamp(min=1)
        centered = centered / (variance.sqrt() + eps)
    return centered.masked_fill(is_flat, 0.0).to(dtype)


def _largest(values: Tensor, scored: Tensor) -> Tensor:
    """`[prompts, 1]`, the largest scored value; -inf in a group without a score."""
    return values.masked_fill(~scored, -torch.inf).amax(dim=1, keepdim=True)
