"""Group-relative advantages.

Call it on whole groups, before any sample is filtered out or masked: a group that has lost members has other
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mgrpo.config.algorithm import NAMED_ESTIMATORS

# Rewards of a group that differ by no more than this share of the largest one are equal up to rounding. Asking for a
# standard deviation of exactly 0 is not enough: std([0.1, 0.1, 0.1]) is 1.4e-17.
_RELATIVE_TOLERANCE = 1e-8


def advantages(
    rewards: Tensor,
    *,
    normalization: str = "standard",
    ddof: int = 0,
    eps: float = 1e-8,
    weights: Sequence[float] | None = None,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """Advantage of each completion over its group; computed in float64.

        standard    (reward - mean) / (std + eps), both of the group
        centered    reward - mean of the group (Dr. GRPO, arXiv 2503.20783)
        batch_std   (reward - mean of the group) / (std of all rewards + eps) (Lite PPO, arXiv 2508.08221)
        rloo        reward - mean of the other completions of the group (Kool et al. 2019; RLOO, arXiv 2402.14740)
        reinforce_plus_plus
                    (reward - mean) / (std + eps), both over all tokens of the batch, where each has the reward of its
                    completion (REINFORCE++, arXiv 2501.03262)
        reinforce_plus_plus_baseline
                    the same of "centered" in place of the reward (REINFORCE++-baseline, ibid.)
        gdpo        s = sum over functions of weight x standard(rewards of that function), then
                    (s - mean of all s) / (std of all s + eps) (arXiv 2601.05242)

    A NaN reward (no score) leaves every mean and deviation and gets advantage 0; in "gdpo" a function's NaN leaves out
    that function only, and a completion that no function scores gets 0. Values that are all equal are 0 after centering, and
    so is a completion without another to compare it with. With one completion per prompt the whole batch is the group:
    REINFORCE with a batch baseline.

    Args:
        rewards: `[prompts, group]`, or `[prompts, group, turns]` with NaN where there is no turn, which are compared with all
            turns of the group, or under "rloo" with those of the other completions; for "gdpo" `[prompts, group, functions]`.
        normalization: as above.
        ddof: a deviation divides by the number of its rewards, or tokens, minus this, 0 or 1.
        eps: added to a deviation before it divides.
        weights: one per function, for "gdpo" only; None: 1 each.
        num_tokens: the tokens of each completion or turn, in the shape of `rewards`, for the means over tokens; None: 1 each.
    Returns:
        Advantages in the shape of `rewards`, without functions, in their dtype, float32 if that is an integer type.
    Raises:
        ValueError: an unknown normalization, a shape that it does not take, or an infinite reward.
    """
    _check(rewards, normalization, ddof, weights, num_tokens)
    if rewards.shape[1] == 1 and rewards.shape[0] > 1:
        by_batch, tokens = rewards.transpose(0, 1), None if num_tokens is None else num_tokens.transpose(0, 1)
        return advantages(
            by_batch, normalization=normalization, ddof=ddof, eps=eps, weights=weights, num_tokens=tokens
        ).transpose(0, 1)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return rewards.new_zeros(rewards.shape[:2] if normalization == "gdpo" else rewards.shape, dtype=dtype)

    tolerance = max(_RELATIVE_TOLERANCE, 4 * torch.finfo(dtype).eps)
    if normalization == "gdpo":
        rewards = rewards.double()
        by_function = _centered(rewards, 1, tolerance) / (_std(rewards, 1, ddof) + eps)
        weighted = by_function * torch.tensor(weights or [1.0] * rewards.shape[2], dtype=torch.float64)
        total = weighted.sum(2).masked_fill(rewards.isnan().all(2), torch.nan)
        return (_centered(total, (0, 1), tolerance) / (_std(total, (0, 1), ddof) + eps)).to(dtype)
    # A completion has one turn unless it has several.
    values = rewards.double().reshape(*rewards.shape[:2], -1)
    if normalization == "rloo":
        found = _less_others(values, tolerance)
    elif normalization == "reinforce_plus_plus":
        found = _whitened(values, num_tokens, tolerance, ddof, eps)
    else:
        found = _centered(values, (1, 2), tolerance)
        if normalization == "standard":
            found = found / (_std(values, (1, 2), ddof) + eps)
        elif normalization == "batch_std":
            found = found / (_std(values, (0, 1, 2), ddof) + eps)
        elif normalization == "reinforce_plus_plus_baseline":
            found = _whitened(found.masked_fill(values.isnan(), torch.nan), num_tokens, tolerance, ddof, eps)
    return found.reshape(rewards.shape).to(dtype)


def has_zero_spread(rewards: Tensor) -> Tensor:
    """True where all scored rewards of a group are equal up to rounding; also where none or one is scored.

    Args:
        rewards: `[prompts, group]`, NaN for no score.
    Returns:
        `[prompts]` bool: groups whose every advantage is 0 under any normalization by group.
    """
    if rewards.numel() == 0:
        return torch.ones(rewards.shape[0], dtype=torch.bool)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return _is_flat(rewards.double(), 1, max(_RELATIVE_TOLERANCE, 4 * torch.finfo(dtype).eps))[:, 0]


def _is_flat(values: Tensor, dim: int | tuple[int, ...], tolerance: float) -> Tensor:
    """True where the values along `dim` are equal up to the tolerance; `dim` stays, of size 1."""
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


def _less_others(values: Tensor, tolerance: float) -> Tensor:
    """`[prompts, group, turns]`: values minus the mean of the other completions' values, 0 as in `_centered` and without others."""
    is_known = ~values.isnan()
    num_others = is_known.sum((1, 2), keepdim=True) - is_known.sum(2, keepdim=True)
    others = values.nansum((1, 2), keepdim=True) - values.nansum(2, keepdim=True)
    is_zero = ~is_known | (num_others == 0) | _is_flat(values, (1, 2), tolerance)
    return (values - others / num_others.clamp(min=1)).masked_fill(is_zero, 0.0)


def _whitened(values: Tensor, num_tokens: Tensor | None, tolerance: float, ddof: int, eps: float) -> Tensor:
    """(values - mean) / (std + eps) where each value stands as often as it has tokens; 0 as in `_centered`."""
    tokens = torch.ones_like(values) if num_tokens is None else num_tokens.double().reshape(values.shape)
    counted = values.masked_fill(tokens == 0, torch.nan)
    tokens = tokens.masked_fill(counted.isnan(), 0.0)
    total = tokens.sum().clamp(min=1)
    centered = values - (counted * tokens).nansum() / total
    std = ((centered.square() * tokens).nansum() / (total - ddof).clamp(min=1)).sqrt()
    is_zero = values.isnan() | _is_flat(counted, (0, 1, 2), tolerance)
    return (centered / (std + eps)).masked_fill(is_zero, 0.0)


def _std(values: Tensor, dim: int | tuple[int, ...], ddof: int) -> Tensor:
    """Standard deviation of the values that are not NaN; 0 where there are too few."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    square = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (square / (count - ddof).clamp(min=1)).sqrt()


def _check(
    rewards: Tensor, normalization: str, ddof: int, weights: Sequence[float] | None, num_tokens: Tensor | None
) -> None:
    if normalization not in NAMED_ESTIMATORS:
        raise ValueError(f"normalization={normalization!r} is unknown; choose one of {', '.join(NAMED_ESTIMATORS)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} is not supported; choose 0 (population) or 1 (sample)")
    is_by_function = normalization == "gdpo"
    shape = "[prompts, group, functions]" if is_by_function else "[prompts, group] or [prompts, group, turns]"
    if rewards.ndim not in ((3,) if is_by_function else (2, 3)):
        raise ValueError(f"rewards must be {shape} for {normalization!r}, got shape {list(rewards.shape)}")
    if num_tokens is not None and num_tokens.shape != rewards.shape[: 2 if is_by_function else None]:
        raise ValueError(
            f"num_tokens must be one per reward, {list(rewards.shape)}, got shape {list(num_tokens.shape)}"
        )
    if weights is not None and (not is_by_function or len(weights) != rewards.shape[2]):
        expected = f"{rewards.shape[2]}" if is_by_function else f"none for {normalization!r}"
        raise ValueError(f"weights must be one per reward function, expected {expected}, got {len(weights)}")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite, which makes its whole group useless; use NaN for 'no score'")
