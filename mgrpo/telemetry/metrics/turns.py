"""Metrics of completions of several turns: whether they call tools, whether the calls work, and how they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from mgrpo.types import Completion, ScoredGroup, TrajectoryRecord

ENDINGS = ("stop", "length", "max_calls", "done", "error")
"""The ways in which a trajectory ends."""
NAN = float("nan")


def turn_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Metrics of all completions with a trajectory; empty without any. Clock readings are under time/."""
    completions = [completion for group in groups for completion in group.group.completions]
    records = [completion.trajectory for completion in completions if completion.trajectory is not None]
    if not records:
        return {}
    return {**_turns(records), **_tokens(completions), **_calls(records), **_of_environments(records)}


def _turns(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    counts = [len(record.turns) for record in records]
    turns = [turn for record in records for turn in record.turns]
    return {
        "turns/mean": sum(counts) / len(records),
        "turns/max": max(counts),
        **{f"turns/ended_by/{how}": _share(record.ended_by == how for record in records) for how in ENDINGS},
        "turns/unreadable_calls": sum(turn.num_unreadable for turn in turns) / len(records),
        "turns/unknown_calls": sum(turn.num_unknown for turn in turns) / len(records),
    }


def _tokens(completions: Sequence[Completion]) -> dict[str, float]:
    masks = [completion.loss_mask for completion in completions if completion.trajectory is not None]
    num_tokens = sum(len(mask) for mask in masks)
    share = sum(int(mask.sum()) for mask in masks) / num_tokens if num_tokens else NAN
    return {"turns/sampled_token_share": share}


def _calls(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """Calls by tool, and of all tools together, where there are tools; `_turns` counts those that cannot be read or name none."""
    if not any(record.has_tools for record in records):
        return {}
    calls: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for record in records:
        for turn in record.turns:
            for name, failed, seconds in zip(turn.calls, turn.failed, turn.seconds, strict=True):
                if name:
                    calls[name].append((failed, seconds))
    metrics: dict[str, float] = {}
    together = [call for of_tool in calls.values() for call in of_tool]
    for name, made in (*sorted(calls.items()), ("aggregate", together)):
        metrics[f"tools/{name}/avg_calls_per_rollout"] = len(made) / len(records)
        metrics[f"tools/{name}/failure_rate"] = _share(failed for failed, _ in made)
        metrics[f"time/tools/{name}/avg_runtime"] = float(np.mean([seconds for _, seconds in made])) if made else NAN
    return metrics


def _of_environments(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """Metrics that environments report themselves, as `{environment}/{metric}`."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.metrics.items():
            values[name].append(value)
    return {f"env/{name}": float(np.mean(found)) for name, found in sorted(values.items())}


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found) if found else NAN
