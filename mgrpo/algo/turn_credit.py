"""Advantages of turns: each turn of a trajectory answers for what came after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mgrpo.algo.advantage import advantages
from mgrpo.types import Completion, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """`turn_credit=return`: with u_k the rewards of a trajectory's turns, turn t is worth G_t = sum over k >= t of
    discount^(k - t) u_k, compared with all turns of its group.

    The last u is what the trajectory's reward leaves to it, so that whatever was given for the whole counts there.
    """

    discount: float = 1.0
    """`turn_discount`."""
    aggregator: Literal["last", "sum"] = "last"
    """`reward_aggregator`, by which the trajectory's reward was made."""

    def advantages(
        self, groups: Sequence[ScoredGroup], *, normalization: str, ddof: int, eps: float
    ) -> list[list[list[float]]]:
        """The advantage of each turn, as [group][completion][turn]; 0 without a score.

        With one completion per prompt all turns of the batch are one group, as in `advantage.advantages`.
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
        rows = [list(itertools.chain.from_iterable(group)) for group in returns]
        if all(len(group) == 1 for group in returns):
            rows = [list(itertools.chain.from_iterable(rows))]
        # A missing turn is like a missing score: it is in no mean and no deviation.
        table = np.full((len(rows), max(map(len, rows))), np.nan)
        for row, own in zip(table, rows, strict=True):
            row[: len(own)] = own
        found = advantages(torch.from_numpy(table), normalization=normalization, ddof=ddof, eps=eps).tolist()
        flat = iter([value for values, own in zip(found, rows, strict=True) for value in values[: len(own)]])
        return [[[next(flat) for _ in turns] for turns in group] for group in returns]

    def _returns(self, completion: Completion, reward: float) -> list[float]:
        earlier = [turn.reward for turn in completion.trajectory.turns[:-1]] if completion.trajectory else []
        last = reward - sum(earlier) if self.aggregator == "sum" else reward
        returns = [last]
        for step_reward in reversed(earlier):
            returns.append(step_reward + self.discount * returns[-1])
        return returns[::-1]


def token_advantages(completion: Completion, by_turn: Sequence[float]) -> np.ndarray:
    """`[len]` float32: that of each token's turn; what stands behind a turn has its advantage."""
    values = np.zeros(len(completion.tokens), np.float32)
    turns = completion.trajectory.turns if completion.trajectory else ()
    for start, value in zip([turn.start for turn in turns] or [0], by_turn, strict=True):
        values[start:] = value
    return values
