"""Advantages of turns: each turn of a trajectory is credited with the rewards after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mgrpo.algo.advantage import advantages
from mgrpo.types import Completion, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """`turn_credit=return`: with u_k the rewards of a trajectory's turns, turn t is worth G_t = sum over k >= t of u_k,
    compared with all turns of its group.

    The last u is the trajectory's reward, with the aggregator "sum" less the rewards of the earlier turns.
    """

    aggregator: Literal["last", "sum"] = "last"
    """`reward_aggregator`, by which the trajectory's reward was made."""

    def advantages(
        self,
        groups: Sequence[ScoredGroup],
        masks: Sequence[Sequence[np.ndarray]],
        *,
        normalization: str,
        ddof: int,
        eps: float,
    ) -> list[list[list[float]]]:
        """The advantage of each turn, as [group][completion][turn]; 0 without a score.

        Args:
            masks: by group and completion, `[len]` bool: the tokens that may be trained.
            normalization, ddof, eps: as in `advantage.advantages`.
        """
        if normalization == "gdpo":
            raise ValueError(
                "turn_credit=return needs one reward for each turn, and normalization='gdpo' has one for each function; choose "
                "'standard'"
            )
        returns = [
            [self._returns(*pair) for pair in zip(group.group.completions, group.rewards.tolist(), strict=True)]
            for group in groups
        ]
        # A missing turn is like a missing score: it is in no mean and no deviation.
        width = max(len(own) for group in returns for own in group)
        table = np.full((len(returns), len(returns[0]), width), np.nan)
        num_tokens = np.zeros_like(table)
        for place in np.ndindex(table.shape[:2]):
            group, number = place
            own = returns[group][number]
            table[place][: len(own)] = own
            num_tokens[place][: len(own)] = _turn_lengths(groups[group].group.completions[number], masks[group][number])
        found = advantages(
            torch.from_numpy(table),
            normalization=normalization,
            ddof=ddof,
            eps=eps,
            num_tokens=torch.from_numpy(num_tokens),
        ).tolist()
        return [
            [values[: len(own)] for values, own in zip(rows, group, strict=True)]
            for rows, group in zip(found, returns, strict=True)
        ]

    def _returns(self, completion: Completion, reward: float) -> list[float]:
        earlier = [turn.reward for turn in completion.trajectory.turns[:-1]] if completion.trajectory else []
        last = reward - sum(earlier) if self.aggregator == "sum" else reward
        returns = [last]
        for step_reward in reversed(earlier):
            returns.append(step_reward + returns[-1])
        return returns[::-1]


def token_advantages(completion: Completion, by_turn: Sequence[float]) -> np.ndarray:
    """`[len]` float32: the advantage of each token's turn; tokens after a turn have that turn's."""
    values = np.zeros(len(completion.tokens), np.float32)
    for start, value in zip(_starts(completion), by_turn, strict=True):
        values[start:] = value
    return values


def _starts(completion: Completion) -> list[int]:
    turns = completion.trajectory.turns if completion.trajectory else ()
    return [turn.start for turn in turns] or [0]


def _turn_lengths(completion: Completion, mask: np.ndarray) -> np.ndarray:
    """`[turns]`: the tokens of the mask that have the advantage of each turn."""
    before = np.concatenate(([0], mask.cumsum()))
    return np.diff(before[[*_starts(completion), len(mask)]])
