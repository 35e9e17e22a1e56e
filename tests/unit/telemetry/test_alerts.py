"""Warnings about steps that teach nothing: each has its metric and a likely cause, and a good run has none."""

from __future__ import annotations

import json

import pytest

from mgrpo.telemetry.alerts import PATIENCE, REPEAT_AFTER, AlertWatch, replay, signs

GOOD = {
    "reward": 0.4,
    "frac_reward_zero_std": 0.3,
    "val/no_score_rate": 0.0,
    "objective/integer_error_rate": 0.0,
    "completions/clipped_ratio": 0.1,
    "completions/max_length": 40.0,
    "batch/filtered_prompts": 9,
    "batch/filtered_prompts_solved": 9,
    "optim/steps": 1,
    "optim/grad_norm": 0.5,
}
TOOLS = {
    "tools/aggregate/avg_calls_per_rollout": 1.2,
    "tools/aggregate/failure_rate": 0.1,
    "turns/unreadable_calls": 0.5,
    "turns/unknown_calls": 0.0,
    "turns/max": 3,
}
UNCALLED = TOOLS | {
    "tools/aggregate/avg_calls_per_rollout": 0,
    "tools/aggregate/failure_rate": None,
    "turns/unreadable_calls": 0,
    "turns/max": 1,
}
FLAT = {"frac_reward_zero_std": 1.0, "optim/steps": 0, "batch/filtered_prompts_solved": 0}


@pytest.mark.parametrize(
    ("change", "metric", "cause"),
    [
        (FLAT | {"reward": 0.0}, "frac_reward_zero_std", "too hard for the model, or the verifier does not find"),
        (FLAT | {"reward": 0.7}, "frac_reward_zero_std", "one value for everything, or the temperature"),
        (FLAT | {"reward": 1.0, "batch/filtered_prompts_solved": 9}, "frac_reward_zero_std", "every sampled prompt is solved"),
        # Filters are off: every step has an update, whose gradient is 0.
        ({"frac_reward_zero_std": 1.0, "optim/grad_norm": 0.0}, "frac_reward_zero_std", "nothing to learn from"),
        (FLAT | {"val/no_score_rate": 1.0, "reward": None}, "val/no_score_rate", "no completion has a score"),
        (FLAT | {"val/no_score_rate": 1.0, "reward": float("nan")}, "val/no_score_rate", "return NaN or None"),
        ({"val/no_score_rate": 0.5}, "val/no_score_rate", "50 % of the completions have no score"),
        (FLAT | {"val/no_score_rate": 1.0, "turns/ended_by/error": 1.0}, "val/no_score_rate", "environments were lost, late or"),
        (
            {"val/no_score_rate": 0.75, "turns/ended_by/error": 0.25},
            "val/no_score_rate",
            "(turns/ended_by/error is 0.25), for the reasons in the log, and the reward functions return NaN",
        ),
        (
            {"val/no_score_rate": 0.5, "objective/integer_error_rate": 1.0},
            "objective/integer_error_rate",
            "verifier integer scored no completion",
        ),
        ({"completions/clipped_ratio": 0.995}, "completions/clipped_ratio", "the longest at 40 tokens"),
        (FLAT | {"completions/clipped_ratio": 1.0}, "completions/clipped_ratio", "eos_token_id in generation_config.json"),
        ({"completions/clipped_ratio": 0.0, "completions/max_length": 1.0}, "completions/max_length", "is empty"),
        (TOOLS | {"tools/aggregate/failure_rate": 1.0}, "tools/aggregate/failure_rate", "every call of a tool fails"),
        (UNCALLED, "tools/aggregate/avg_calls_per_rollout", "never begins a call; look at pass_tools_to_chat_template"),
        (
            UNCALLED | FLAT | {"turns/unreadable_calls": 0.25, "turns/max": 5},
            "tools/aggregate/avg_calls_per_rollout",
            "begins calls that cannot be read (turns/unreadable_calls is 0.25); look at tool_parser_type",
        ),
        (UNCALLED | {"turns/unknown_calls": 2}, "tools/aggregate/avg_calls_per_rollout", "tools that do not exist"),
        ({"optim/steps": 0}, "optim/steps", "nothing was trained"),
        ({"optim/grad_norm": 0.0}, "optim/grad_norm", "the gradient is 0"),
    ],
)  # fmt: skip
def test_each_silent_failure_is_named_with_its_metric_and_a_cause(change, metric, cause):
    """Such a run costs as much as a good one, and its only trace would be a column of zeros."""
    found = signs(GOOD | change)
    assert list(found) == [metric]
    assert metric in found[metric] and cause in found[metric]


def test_rewards_are_not_blamed_for_what_environments_lost():
    lost = GOOD | {"val/no_score_rate": 1.0, "turns/ended_by/error": 1.0}
    assert "reward functions" not in signs(lost)["val/no_score_rate"]


def test_a_good_step_has_no_sign():
    """Neither has one without metrics: what is not measured is not wrong."""
    assert signs(GOOD) == {} and signs({}) == {}
    assert signs(GOOD | TOOLS) == {}
    # A program of the user drives the model: its turns need no calls.
    assert signs(GOOD | UNCALLED | {"turns/max": 2}) == {}
    assert signs(GOOD | {"frac_reward_zero_std": float("nan"), "completions/clipped_ratio": None}) == {}


def test_a_warning_waits_for_a_few_steps_and_is_not_repeated_at_each():
    """One unlucky step is chance; a warning at every step hides everything else."""
    watch = AlertWatch(1000)
    bad = GOOD | FLAT
    said = [step for step in range(1, 301) if watch.after(step, bad if step != 2 else GOOD)]
    assert said == [2 + PATIENCE, 2 + PATIENCE + REPEAT_AFTER, 2 + PATIENCE + 2 * REPEAT_AFTER]
    watch = AlertWatch(1000)
    texts = [watch.after(step, bad) for step in range(1, PATIENCE + 1)]
    assert texts[:-1] == [[]] * (PATIENCE - 1) and texts[-1][0].startswith("3 steps in a row: ")


def test_a_sign_that_comes_and_goes_is_not_said_each_time():
    """Steps 1 to 3 and 5 to 7: one warning."""
    watch = AlertWatch(1000)
    said = [step for step in range(1, 8) if watch.after(step, GOOD if step == 4 else GOOD | FLAT)]
    assert said == [3]


def test_a_run_shorter_than_that_is_judged_by_its_own_steps():
    """A trial of one step that trains nothing must not pass for a good one."""
    (text,) = AlertWatch(1).after(1, GOOD | FLAT)
    assert text.startswith("in this step: ")


def test_a_run_that_learns_nothing_for_changing_reasons_ends_with_one():
    """It ends with "nothing was trained ... the warnings above", and none of its signs lasted for three steps."""
    others = [{"reward": 0.0}, {"frac_reward_zero_std": 0.3}] * 3
    watch = AlertWatch(6)
    said = [watch.after(step, GOOD | FLAT | other) for step, other in enumerate(others, start=1)]
    assert said[:-1] == [[]] * 5 and said[-1][0].startswith("in this step: nothing was trained")
    watch = AlertWatch(6)
    said = [watch.after(step, GOOD if step == 1 else GOOD | FLAT | other) for step, other in enumerate(others, start=1)]
    assert said == [[]] * 6


def test_the_metrics_file_gives_the_same_warnings():
    """The report is written from it, also after a crash; NaN is null there, and evaluations are no steps."""
    steps = [{"step": step, **GOOD, **(FLAT if step > 4 else {}), "reward": None} for step in range(1, 9)]
    lines = [{"step": 0, "eval/scores": 0.5}, *steps, {"step": 8, "eval/scores": 0.5}]
    assert [step for step, _, _ in replay(json.loads(json.dumps(lines)), 100)] == [7]
