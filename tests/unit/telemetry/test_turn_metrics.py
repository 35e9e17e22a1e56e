"""Metrics of completions of several turns, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mgrpo.telemetry.metrics.evaluation import evaluation_metrics
from mgrpo.telemetry.metrics.turns import ENDINGS, turn_metrics
from mgrpo.types import TrajectoryRecord, Turn
from tests import builders


def turn(*calls, unreadable=0, unknown=0):
    """A turn with calls as (name, failed, seconds)."""
    names, failed, seconds = zip(*calls, strict=True) if calls else ((), (), ())
    return Turn(
        start=0, end=1, calls=names, failed=failed, seconds=seconds, num_unreadable=unreadable, num_unknown=unknown
    )


def completion(*turns, ended_by="stop", sampled="10", metrics=None):
    """A completion of as many tokens as `sampled` has digits; 1 for those that the model has sampled."""
    mask = np.array([digit == "1" for digit in sampled], dtype=np.bool_)
    record = TrajectoryRecord(
        is_sampled=mask,
        turns=turns,
        messages=(),
        ended_by=ended_by,
        scored_text="",
        sampled_text="",
        metrics=metrics or {},
    )
    return replace(builders.completion(len(mask)), trajectory=record)


def group(*completions):
    return builders.scored_group([0.0] * len(completions), completions=completions)


GROUPS = [
    group(
        completion(turn(("search", False, 1.0), ("python", True, 3.0)), turn(), sampled="1100111"),
        completion(
            turn(("search", True, 2.0), ("", True, 0.0), unreadable=1),
            turn(("", True, 0.0), ("", True, 0.0), unknown=2),
            turn(),
            ended_by="max_calls",
        ),
    ),
    group(
        completion(ended_by="error", sampled=""),
        completion(turn(), ended_by="length", sampled="1", metrics={"game/score": 4.0}),
        completion(turn(("search", False, 3.0)), ended_by="done", sampled="10", metrics={"game/score": 1.0, "game/won": 0}),
    ),
]  # fmt: skip


def test_calls_are_counted_for_each_tool_and_for_all():
    """A tool that always fails is hidden by the others in one number for all of them, and "" is the name of none."""
    metrics = turn_metrics(GROUPS)
    expected = {
        "tools/search/avg_calls_per_rollout": 3 / 5,
        "tools/search/failure_rate": 1 / 3,
        "time/tools/search/avg_runtime": 2.0,
        "tools/python/avg_calls_per_rollout": 1 / 5,
        "tools/python/failure_rate": 1.0,
        "time/tools/python/avg_runtime": 3.0,
        "tools/aggregate/avg_calls_per_rollout": 4 / 5,
        "tools/aggregate/failure_rate": 2 / 4,
        "time/tools/aggregate/avg_runtime": 9 / 4,
    }
    assert {name: value for name, value in metrics.items() if "tools/" in name} == expected


def test_a_program_without_tools_has_no_metrics_of_calls():
    """A mean of 0 calls is a warning: the model never begins a call."""
    talk = completion(turn())
    talk = replace(talk, trajectory=replace(talk.trajectory, has_tools=False))
    assert not [name for name in turn_metrics([group(talk)]) if "tools/" in name]
    assert turn_metrics([group(talk, completion(turn()))])["tools/aggregate/avg_calls_per_rollout"] == 0.0


def test_turns_and_how_they_end():
    """A model that stops calling, and one that never stops, both lose reward, for opposite reasons."""
    metrics = turn_metrics(GROUPS)
    expected = {
        "turns/mean": (2 + 3 + 0 + 1 + 1) / 5,
        "turns/max": 3,
        **{f"turns/ended_by/{how}": 1 / 5 for how in ENDINGS},
        "turns/unreadable_calls": 1 / 5,
        "turns/unknown_calls": 2 / 5,
        # 5 of 7, 1 of 2, none, 1 of 1, 1 of 2.
        "turns/sampled_token_share": 8 / 12,
    }
    assert {name: value for name, value in metrics.items() if name.startswith("turns/")} == expected
    two = turn_metrics(GROUPS[:1])
    assert (two["turns/ended_by/stop"], two["turns/ended_by/max_calls"], two["turns/ended_by/error"]) == (0.5, 0.5, 0)


def test_what_environments_report_is_a_mean_of_those_that_report_it():
    """A game that half of the completions never began must not count as lost by them."""
    metrics = turn_metrics(GROUPS)
    assert {name: value for name, value in metrics.items() if name.startswith("env/")} == {
        "env/game/score": 2.5,
        "env/game/won": 0.0,
    }


def test_without_a_call_nothing_has_failed():
    """0 would look like tools that always work."""
    metrics = turn_metrics([group(completion(turn()), completion(ended_by="error", sampled=""))])
    assert metrics["tools/aggregate/avg_calls_per_rollout"] == 0
    assert math.isnan(metrics["tools/aggregate/failure_rate"])
    assert math.isnan(metrics["time/tools/aggregate/avg_runtime"])
    assert math.isnan(turn_metrics([group(completion(sampled=""))])["turns/sampled_token_share"])


def test_runs_without_tools_have_none_of_this():
    """Columns of zeros about turns would be in every metrics.jsonl."""
    assert turn_metrics([group(builders.completion())]) == {} == turn_metrics([])


def test_evaluations_have_the_same_but_clocks():
    """`mgrpo eval` and an evaluation in training are compared to the digit."""
    found = evaluation_metrics(GROUPS)
    of_turns = {name: value for name, value in turn_metrics(GROUPS).items() if not name.startswith("time/")}
    assert of_turns and {name: found[f"eval/{name}"] for name in of_turns} == of_turns
    assert not any("avg_runtime" in name for name in found)
