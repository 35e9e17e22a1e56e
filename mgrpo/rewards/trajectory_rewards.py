"""Rewards of trajectories: those of the turns and the one of verifiers or reward functions for the whole become one;
and the record of a trajectory that reward functions receive.

Completions of a single turn have no rewards of turns; the one given is their reward.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mgrpo.rewards.verifier import LARGEST
from mgrpo.types import Completion, ScoredGroup, TrajectoryRecord, Turn

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRewards:
    """The rule by which the rewards of a trajectory's turns become one."""

    aggregator: Literal["last", "sum"] = "last"
    """`reward_aggregator`: the last turn's reward, or the sum of all."""
    only_good_outputs: bool = False
    """`only_reward_good_outputs`: the given reward counts only if `used_tools_well`."""

    def total(self, completion: Completion, given: float) -> float:
        """The reward of a completion to which verifiers or functions have given this; NaN where its environment was lost.

        A reward that the environment has for the whole trajectory takes the place of its last turn's; `given` is added
        to the last turn's.
        """
        record = completion.trajectory
        if is_lost(completion):
            return math.nan
        if self.only_good_outputs and not (record and used_tools_well(record)):
            given = 0.0
        if record is None:
            return given
        earlier = [turn.reward for turn in record.turns]
        last = earlier.pop() if earlier else 0.0
        if record.reward is not None:
            last = record.reward
        total = last + given + (sum(earlier) if self.aggregator == "sum" else 0.0)
        return held(total, f"the rewards {[*earlier, last]} of its environment and {given:g} of verifiers or functions")


def held(reward: float, origin: str) -> float:
    """The reward, or NaN with a warning where float32 does not hold it: one completion must not make a batch infinite."""
    if abs(reward) <= LARGEST or math.isnan(reward):
        return reward
    _log.warning("a completion has no reward: %.200s make %g, beyond %g (float32)", origin, reward, LARGEST)
    return math.nan


def is_lost(completion: Completion) -> bool:
    """True if it ended because its environment failed, so that it cannot be judged."""
    return completion.trajectory is not None and completion.trajectory.ended_by == "error"


def used_tools_well(record: TrajectoryRecord) -> bool:
    """True if a tool was called, and no call failed, was late, could not be read or named an unknown tool."""
    is_answered = all(not (any(turn.failed) or turn.num_unreadable or turn.num_unknown) for turn in record.turns)
    return is_answered and any(turn.calls for turn in record.turns)


def told(record: TrajectoryRecord) -> dict[str, Any]:
    """A trajectory as lists and dicts, for reward functions: its turns, the messages of each branch, and its end."""
    branches = record.branches or (None,)
    return {
        "turns": [_turn(turn, record) for turn in record.turns],
        "branches": [
            {
                "parent": branch.parent if branch and branch.parent >= 0 else None,
                "after": branch.after if branch and branch.after >= 0 else None,
                "messages": [dict(message) for message in (branch.messages if branch else record.messages)],
            }
            for branch in branches
        ],
        "ended_by": record.ended_by,
        "text": record.scored_text,
        "reward": record.reward,
        "metrics": dict(record.metrics),
        "agent": record.agent and {**asdict(record.agent), "counts": dict(record.agent.counts)},
    }


def _turn(turn: Turn, record: TrajectoryRecord) -> dict[str, Any]:
    own = (number for number, branch in enumerate(record.branches) if branch.start <= turn.start < branch.end)
    return {
        "branch": next(own, 0),
        "num_tokens": turn.end - turn.start,
        "calls": list(turn.calls),
        "failed": list(turn.failed),
        "seconds": list(turn.seconds),
        "unreadable_calls": turn.num_unreadable,
        "unknown_calls": turn.num_unknown,
        "reward": turn.reward,
    }


def with_turn_rewards(groups: Sequence[ScoredGroup], turns: TurnRewards) -> list[ScoredGroup]:
    """Groups that reward functions have scored, with the rewards of their turns."""
    return [
        replace(
            group,
            scores=tuple(
                replace(score, reward=turns.total(completion, score.reward))
                for completion, score in zip(group.group.completions, group.scores, strict=True)
            ),
        )
        for group in groups
    ]
