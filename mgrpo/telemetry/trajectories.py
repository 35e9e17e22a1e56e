"""Trajectories in the tables of samples: what was called, what was answered, and who ended them."""

from __future__ import annotations

from typing import Any

from mgrpo.telemetry.untrusted import finite, plain
from mgrpo.types import Completion, Turn


def trajectory_record(completion: Completion) -> dict[str, Any]:
    """The entry `trajectory` of a completion's record; nothing for a completion of a single turn."""
    record = completion.trajectory
    if record is None:
        return {}
    found = {
        "ended_by": record.ended_by,
        "turns": [_turn(turn) for turn in record.turns],
        "messages": plain(record.messages),
        "scored_text": record.scored_text,
        "reward": None if record.reward is None else finite(record.reward),
        "metrics": plain(record.metrics),
    }
    return {"trajectory": found}


def _turn(turn: Turn) -> dict[str, Any]:
    calls = zip(turn.calls, turn.failed, turn.seconds, strict=False)
    return {
        "num_tokens": turn.end - turn.start,
        "calls": [
            {"name": name, "failed": bool(failed), "seconds": finite(seconds)} for name, failed, seconds in calls
        ],
        "unreadable_calls": turn.num_unreadable,
        "unknown_calls": turn.num_unknown,
        "reward": finite(turn.reward),
    }
