"""Which groups carry no learning signal, and which prompts have been solved for good.

Pure functions over rewards `[prompts, group]`, NaN for no score. Who samples others in their place, and who remembers the
prompts to leave out, is the callers' affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mgrpo.algo.advantage import has_zero_spread

# A score counts as the highest one down to this much below it, as where a completion is called correct.
_SCORE_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Groups whose rewards are all equal: every advantage would be 0."""

    keep: np.ndarray
    """`[prompts]` bool, the groups that are left."""
    num_zero: int
    """Groups left out whose rewards are all 0."""
    num_solved: int
    """Those with the highest possible score throughout."""
    num_nonzero: int
    """Those with another reward throughout."""
    num_unscored: int
    """Those in which no completion has a score."""

    @property
    def num_filtered(self) -> int:
        """All groups left out."""
        return self.num_zero + self.num_solved + self.num_nonzero + self.num_unscored


def filter_zero_spread(rewards: np.ndarray, *, max_possible_score: float) -> GroupFilter:
    """Leave out the groups whose scored rewards are equal up to rounding, by the tolerance that `advantages` has.

    Args:
        rewards: `[prompts, group]`.
        max_possible_score: of a completion; 0 where there is none, then nothing counts as solved.
    """
    rewards = _two_dimensional(rewards)
    is_flat = has_zero_spread(torch.tensor(rewards)).numpy()
    values, is_scored = _mean_score(rewards)
    is_zero = is_flat & is_scored & (np.abs(values) <= _SCORE_TOLERANCE)
    is_solved = is_flat & is_scored & ~is_zero & _reaches(values, max_possible_score)
    return GroupFilter(
        keep=~is_flat,
        num_zero=int(is_zero.sum()),
        num_solved=int(is_solved.sum()),
        num_nonzero=int((is_flat & is_scored & ~is_zero & ~is_solved).sum()),
        num_unscored=int((~is_scored).sum()),
    )


def percent_solved(rewards: np.ndarray, *, max_possible_score: float) -> np.ndarray:
    """`[prompts]` float64: mean score of each group / max_possible_score; NaN without a score or a highest one."""
    values, _ = _mean_score(_two_dimensional(rewards))
    return values / max_possible_score if max_possible_score > 0 else np.full_like(values, np.nan)


def solved_for_good(rewards: np.ndarray, *, max_possible_score: float, pass_rate: float) -> np.ndarray:
    """`[prompts]` bool: prompts never to be sampled again, whose `percent_solved` reaches `pass_rate`."""
    return percent_solved(rewards, max_possible_score=max_possible_score) >= pass_rate - _SCORE_TOLERANCE


def _mean_score(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of the scored rewards of each group, NaN without any, and whether there is any."""
    is_scored = ~np.isnan(rewards)
    count = is_scored.sum(1)
    total = np.where(is_scored, rewards, 0.0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), count > 0


def _reaches(values: np.ndarray, max_possible_score: float) -> np.ndarray:
    return (values >= max_possible_score - _SCORE_TOLERANCE) & (max_possible_score > 0)


def _two_dimensional(rewards: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [prompts, group], got shape {list(rewards.shape)}")
    return rewards
