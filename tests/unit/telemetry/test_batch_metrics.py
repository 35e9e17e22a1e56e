"""Metrics of a step's rollouts, worked by hand."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.algo.training_samples import train_samples
from mgrpo.packing import pack_lengths, plan_step
from mgrpo.telemetry.metrics.batch import (
    advantage_histogram,
    batch_metrics,
    is_solved,
    length_histogram,
    rate_histogram,
    staleness,
    tokens_per_second,
)
from mgrpo.types import RewardScale, TrajectoryRecord, Turn
from tests import builders

NAN = float("nan")
SCALE = RewardScale(max_possible_score=10.0, verification_reward=10.0, format_reward=0.5)


def group(rewards, *, lengths=None, stops=None, parts=None, verifiers=("integer",), prompt=3, versions=7):
    """One group; the parts are those of a single verifier unless given."""
    if parts is None:
        parts = [{"integer": r / 10, "correct": NAN if r != r else float(r == 10)} for r in rewards]
    completions = [
        builders.completion(length, version=versions, finish_reason="stop" if stop else "length")
        for length, stop in zip(lengths or [2] * len(rewards), stops or [True] * len(rewards), strict=True)
    ]
    of = builders.prompt(range(prompt), verifiers=verifiers)
    return builders.scored_group(rewards, completions=completions, parts=parts, of=of)


def samples_of(groups, advantages):
    """One per completion; those with advantage NaN train nothing."""
    completions = [(number, index) for number, scored in enumerate(groups) for index in range(len(scored.scores))]
    return [
        builders.train_sample(groups[number].group, index, advantage=advantage, number=number)
        for (number, index), advantage in zip(completions, advantages, strict=True)
    ]


def plan_of(samples, **settings):
    """The documents of each pack."""
    choices = {"pack_length": 32, "dp": 1, "num_mini_batches": 1, "multiple_of": 1, "share_prompts": False} | settings
    return [pack for ranks in plan_step(samples, **choices) for micro_batches in ranks for pack in micro_batches]


def packs_of(samples, *, multiple_of=1, document_multiple_of=1, **settings):
    padding = {"multiple_of": multiple_of, "document_multiple_of": document_multiple_of}
    return pack_lengths(samples, plan_of(samples, **padding, **settings), **padding)


def measure(kept, dropped=(), *, advantages=None, scale=SCALE, packs=None, **given):
    count = sum(len(scored.scores) for scored in kept)
    samples = given.pop("samples", None) or samples_of(kept, advantages or [0.0] * count)
    settings = {"batch_size": 8, "policy_version": 7, "num_excluded_prompts": 0, "engine_s": 2.0} | given
    packs = packs_of(samples) if packs is None else packs
    return batch_metrics(kept, dropped, samples=samples, packs=packs, scale=scale, **settings)


def subset(metrics, *names):
    return {name: metrics[name] for name in names}


KEPT = [
    group([10.0, 0.0, 10.0, NAN], lengths=[1, 4, 3, 8], stops=[True, False, True, True], prompt=4, versions=6),
    group([5.0, 0.0, 0.0, 0.0], lengths=[2, 2, 4, 16], stops=[True, True, True, False], prompt=2, versions=7),
]
DROPPED = [group([0.0] * 4), group([10.0] * 4), group([5.0] * 4), group([NAN] * 4)]


def test_scores_are_of_the_batch_and_rewards_of_all_that_was_sampled():
    """A filter that removes unsolved prompts must not look like learning."""
    metrics = measure(KEPT, DROPPED)
    assert metrics["scores"] == pytest.approx(25 / 7)  # 10 + 0 + 10, 5 + 0 + 0 + 0
    assert metrics["reward"] == pytest.approx((25 + 0 + 40 + 20) / 19)
    assert metrics["val/no_score_rate"] == pytest.approx(5 / 24)
    assert measure(KEPT)["reward"] == measure(KEPT)["scores"]


def test_turns_are_those_of_all_that_was_sampled():
    """A filter that removes groups of one kind must not look like a model that has learned to call tools."""
    mask = np.array([True, True])
    record = TrajectoryRecord(
        is_sampled=mask, turns=(Turn(start=0, end=2),), messages=(), ended_by="stop", scored_text="", sampled_text=""
    )
    (of, *_) = DROPPED
    completions = tuple(replace(completion, trajectory=record) for completion in of.group.completions)
    assert measure(KEPT, [replace(of, group=replace(of.group, completions=completions))])["turns/mean"] == 1
    assert "turns/mean" not in measure(KEPT, DROPPED)


def test_spread_is_the_mean_over_groups_with_two_scores():
    """A group of equal rewards trains nothing; their share shows how much sampling was wasted."""
    metrics = measure(KEPT, DROPPED)
    # [10, 0, 10]: mean 20/3, squares 100/9 x 2 + 400/9 = 600/9, over 2; [5, 0, 0, 0]: 12.5 x 1.5 = 18.75, over 3.
    first, second = math.sqrt(600 / 9 / 2), math.sqrt(18.75 / 3)
    assert metrics["reward_std"] == pytest.approx((first + second + 0 + 0 + 0) / 5)
    assert metrics["frac_reward_zero_std"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.3, 0.1 + 0.2, 0.3], [-0.7] * 5])
def test_equal_up_to_rounding_is_equal(rewards):
    """The standard deviation of three times 0.1 is 1.4e-17: compared with 0, such groups count as informative."""
    assert measure([group(rewards)])["frac_reward_zero_std"] == 1.0
    assert measure([group([*rewards[:-1], rewards[-1] + 1e-6])])["frac_reward_zero_std"] == 0.0


def test_one_completion_a_prompt_has_no_spread():
    """REINFORCE has no group: null, not a division by zero."""
    metrics = measure([group([1.0]), group([0.0])])
    assert math.isnan(metrics["reward_std"]) and math.isnan(metrics["frac_reward_zero_std"])


def test_solved_and_unsolved_split_the_scored_completions():
    """Lengths of right and wrong answers part ways long before the mean shows it."""
    metrics = measure(KEPT)
    assert metrics["unsolved_batch_size_ratio"] == pytest.approx(5 / 7)
    assert metrics["val/sequence_lengths_solved"] == pytest.approx((1 + 3) / 2)
    assert metrics["val/sequence_lengths_unsolved"] == pytest.approx((4 + 2 + 2 + 4 + 16) / 5)
    assert metrics["val/sequence_lengths_solved_hist"] == [1, 1] + [0] * 14
    assert metrics["val/sequence_lengths_unsolved_hist"] == [0, 2, 2, 0, 1] + [0] * 11
    # Group rates: 20/3 / 10 and 5/4 / 10.
    assert metrics["batch/percent_solved_mean"] == pytest.approx((2 / 3 + 1 / 8) / 2)
    assert metrics["batch/percent_solved_hist"] == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_all_solved_leaves_no_length_of_the_unsolved():
    """0 would be a length, and would bend the curve."""
    metrics = measure([group([10.0, 10.0])])
    assert metrics["val/sequence_lengths_solved"] == 2
    assert math.isnan(metrics["val/sequence_lengths_unsolved"])
    assert metrics["unsolved_batch_size_ratio"] == 0


def test_a_row_with_two_verifiers_is_solved_by_both():
    """One of two right answers earns the highest reward of a row with one verifier."""
    parts = [{"a": 1.0, "b": 1.0, "correct": 1.0}, {"a": 1.0, "b": 0.0, "correct": 0.0}]
    both = group([20.0, 10.0], parts=parts, verifiers=("a", "b"))
    assert is_solved(both, SCALE).tolist() == [True, False]
    metrics = measure([both])
    assert metrics["unsolved_batch_size_ratio"] == 0.5
    assert metrics["batch/percent_solved_mean"] == 0.75
    dropped = measure([], [group([10.0, 10.0], parts=parts, verifiers=("a", "b"))])
    assert subset(dropped, "batch/filtered_prompts_solved", "batch/filtered_prompts_nonzero") == {
        "batch/filtered_prompts_solved": 0,
        "batch/filtered_prompts_nonzero": 1,
    }


def test_where_nothing_can_be_earned_nothing_is_solved():
    """Verifiers and format off: every reward is the highest one, 0."""
    nothing = RewardScale(max_possible_score=0.0, verification_reward=0.0, format_reward=0.0)
    metrics = measure([group([0.0, 0.0])], scale=nothing)
    assert metrics["unsolved_batch_size_ratio"] == 1
    assert math.isnan(metrics["batch/percent_solved_mean"])
    half = RewardScale(max_possible_score=0.5, verification_reward=0.5, format_reward=0.0)
    assert measure([group([0.3])], scale=half)["batch/percent_solved_mean"] == pytest.approx(0.6)


def test_a_long_right_answer_is_solved():
    """A penalty that rises smoothly with the length would make every long answer count as wrong."""
    parts = [{"integer": 1.0, "correct": 1.0, "overlong": -0.25}, {"integer": 0.0, "correct": 0.0, "overlong": -0.5}]
    assert is_solved(group([9.75, -0.5], parts=parts), SCALE).tolist() == [True, False]


def test_rewards_of_each_verifier():
    """A mixed data set hides a verifier that always fails behind the others."""
    kept = [
        group(
            [10.0, 0.0, NAN],
            parts=[
                {"math": 1.0, "correct": 1.0, "format": 1.0},
                {"math": 0.0, "correct": 0.0, "format": 1.0},
                {"math": NAN, "correct": NAN, "format": 0.0},
            ],
            verifiers=("Math",),
        ),
        group(
            [5.0, 20.0],
            parts=[
                {"length": 0.5, "math": 0.0, "correct": 0.0, "format": 0.0},
                {"length": 1.0, "math": 1.0, "correct": 1.0, "format": 1.0},
            ],
            verifiers=("length", "Math"),
        ),
    ]
    left_out = [{"math": NAN, "correct": NAN, "format": 0.0}, {"math": 1.0, "correct": 1.0, "format": 1.0}]
    dropped = [group([NAN, 10.0], parts=left_out, verifiers=("Math",))]
    metrics = measure(kept, dropped)
    assert {name: value for name, value in metrics.items() if name.startswith("objective/")} == pytest.approx(
        {
            "objective/math_reward": 0.5,
            "objective/math_correct_rate": 0.5,
            "objective/math_error_rate": 2 / 7,
            "objective/length_reward": 0.75,
            "objective/length_correct_rate": 1.0,
            "objective/length_error_rate": 0.0,
            "objective/correct_reward": 0.5,
            "objective/format_reward": 0.6,
            "objective/verifiable_reward": (10 + 0 + 5 + 20) / 4,
            "objective/verifiable_correct_rate": 3 / 4,
        }
    )
    assert metrics["val/format_scores"] == pytest.approx(0.5 * 0.6)
    assert metrics["rewards/length/std"] == pytest.approx(math.sqrt(2 * 0.25**2))
    # Of all that was sampled: 1, 0, 0, 1, and the 1 of the group that a filter left out.
    assert metrics["rewards/math/mean"] == pytest.approx(0.6) and metrics["rewards/length/mean"] == 0.75
    assert metrics["rewards/math/std"] == pytest.approx(math.sqrt((3 * 0.16 + 2 * 0.36) / 4))


def test_a_users_own_functions_have_no_highest_reward():
    """Rewards of -40 to 0 would all be unsolved, and a function that does not apply is not an error."""
    parts = [{"brevity": 0.5, "tone": NAN}, {"brevity": -40.0, "tone": NAN}]
    metrics = measure([group([0.5, -40.0], parts=parts)], [group([3.0, 3.0], parts=parts)], scale=None)
    assert metrics["objective/brevity_reward"] == metrics["rewards/brevity/mean"] == pytest.approx(-19.75)
    assert math.isnan(metrics["objective/tone_reward"])
    left_out = ("verifiable", "correct_rate", "error_rate", "solved_", "unsolved", "percent_solved", "format")
    assert not [name for name in metrics if any(word in name for word in left_out)]
    assert metrics["batch/filtered_prompts_solved"] == 0
    assert metrics["batch/filtered_prompts_nonzero"] == 1


def test_lengths_and_ends():
    """Open Instruct's names are of the batch, TRL's of everything sampled."""
    metrics = measure(KEPT, [group([0.0, 0.0], lengths=[64, 5], stops=[False, True])])
    assert subset(
        metrics,
        *(f"val/sequence_lengths{end}" for end in ("", "_min", "_max")),
        "val/stop_rate",
        *(f"completions/{which}_length" for which in ("mean", "min", "max")),
        *(f"completions/{which}_terminated_length" for which in ("mean", "min", "max")),
        "completions/clipped_ratio",
    ) == pytest.approx(
        {
            "val/sequence_lengths": 40 / 8,
            "val/sequence_lengths_min": 1,
            "val/sequence_lengths_max": 16,
            "val/stop_rate": 6 / 8,
            "completions/mean_length": 109 / 10,
            "completions/min_length": 1,
            "completions/max_length": 64,
            "completions/mean_terminated_length": (1 + 3 + 8 + 2 + 2 + 4 + 5) / 7,
            "completions/min_terminated_length": 1,
            "completions/max_terminated_length": 8,
            "completions/clipped_ratio": 3 / 10,
        }
    )
    assert metrics["batch/prompt_lengths"] == [0, 1, 1] + [0] * 13
    assert metrics["batch/response_lengths"] == [1, 3, 2, 1, 1] + [0] * 11


def test_nothing_ended_by_itself():
    """The first steps of a base model."""
    metrics = measure([group([0.0, 0.0], stops=[False, False])])
    assert metrics["completions/clipped_ratio"] == 1
    assert math.isnan(metrics["completions/mean_terminated_length"])


def test_advantages_are_those_that_train():
    """A completion without a score has advantage 0 by convention: it would pull the mean towards 0."""
    metrics = measure(KEPT, advantages=[1.0, -2.0, 1.0, NAN, 3.0, NAN, NAN, NAN])
    assert subset(metrics, *(f"val/advantages_{which}" for which in ("mean", "min", "max", "hist"))) == {
        "val/advantages_mean": pytest.approx(3 / 4),
        "val/advantages_min": -2.0,
        "val/advantages_max": 3.0,
        "val/advantages_hist": [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0],
    }
    assert metrics["real_batch_size_ratio"] == 4 / 8
    assert metrics["val/total_reward_groups"] == 2
    assert measure(KEPT, advantages=[1.0, -2.0, 1.0, NAN] + [NAN] * 4)["val/total_reward_groups"] == 1


def test_filtered_prompts_add_up():
    """Where the sampling goes: too hard, too easy, or a reward without steps."""
    metrics = measure(KEPT, [*DROPPED, group([0.0, NAN, 0.0])], num_excluded_prompts=3)
    kinds = ("zero", "solved", "nonzero", "unscored")
    assert {kind: metrics[f"batch/filtered_prompts_{kind}"] for kind in kinds} == {
        "zero": 2,
        "solved": 1,
        "nonzero": 1,
        "unscored": 1,
    }
    assert subset(
        metrics,
        "batch/filtered_prompts",
        "batch/filtered_prompts_pct",
        "batch/total_prompts",
        "batch/no_resampled_prompts",
        "stale_results_dropped",
    ) == {
        "batch/filtered_prompts": 5,
        "batch/filtered_prompts_pct": pytest.approx(5 / 7),
        "batch/total_prompts": 2,
        "batch/no_resampled_prompts": 3,
        "stale_results_dropped": 0,
    }


def test_policy_versions_are_a_mean_over_tokens():
    """One long completion of old weights is more off-policy than one short one."""
    metrics = measure(KEPT, policy_version=7)
    # 16 tokens of version 6, 24 of version 7.
    assert metrics["model_step_mean"] == pytest.approx(6.6)
    assert (metrics["model_step_min"], metrics["model_step_max"]) == (6, 7)
    assert metrics["num_steps_off_policy"] == pytest.approx(0.4)


def test_what_stands_between_turns_is_no_token_of_the_model():
    """Tool output would read as longer answers, and its version of -1 as a policy that is old."""
    record = builders.trajectory("1100011")
    turns = builders.completion(7, version=6, trajectory=record)
    groups = [builders.scored_group([1.0, 0.0], completions=[turns, builders.completion(2, version=7)])]
    samples = train_samples(groups, normalization="standard", ddof=0, eps=1e-8)
    found = measure(groups, samples=samples, packs=packs_of(samples))
    assert found["val/sequence_lengths"] == found["completions/mean_length"] == 3.0
    assert found["val/sequence_lengths_max"] == 4.0
    assert (found["model_step_mean"], found["model_step_min"]) == (pytest.approx((4 * 6 + 2 * 7) / 6), 6.0)
    assert found["time/actor_tokens_per_second"] == (2 + 6) / 2.0
    assert found["batch/lost_token_frac"] == 0.0
    assert staleness(groups, policy_version=8) == {
        "async/age_mean": 2.0,
        "async/age_max": 2.0,
        "async/mixed_completions": 0,
    }


def test_a_completion_with_branches_counts_once():
    """Or a batch of many turns would be fuller than full, and its advantages weighed by their number."""
    record = builders.trajectory("1101", branches=(builders.branch(0, 2), builders.branch(3, 4, [5, 6, 7])))
    completions = [builders.completion(4, version=7, trajectory=record), builders.completion(2, version=7)]
    groups = [builders.scored_group([1.0, 0.0], completions=completions)]
    samples = train_samples(groups, normalization="centered", ddof=0, eps=1e-8)
    found = measure(groups, samples=samples, packs=packs_of(samples), batch_size=2)
    assert len(samples) == 3 and found["real_batch_size_ratio"] == 1.0
    assert found["val/advantages_mean"] == 0.0 and sum(found["val/advantages_hist"]) == 2
    assert found["packed_ratio"] == 1 / 2 and found["batch/lost_token_frac"] == 0.0
    assert found["val/sequence_lengths"] == (3 + 2) / 2


def test_the_engines_speed_counts_a_prompt_once_and_dropped_groups_too():
    """The engines read a prompt once for its group, and what a filter leaves out was also sampled."""
    assert tokens_per_second(KEPT, 2.0) == pytest.approx((4 + 2 + 40) / 2)
    assert measure(KEPT, [group([0.0], lengths=[7])])["time/actor_tokens_per_second"] == pytest.approx((46 + 3 + 7) / 2)
    assert math.isnan(tokens_per_second(KEPT, 0.0))


def test_packing_counts_what_fills_up():
    """By hand: documents of 3 + 3 = 6 and 3 + 1 = 4 tokens in one pack of 10, filled up to 12."""
    kept = [group([10.0], lengths=[4]), group([0.0], lengths=[2])]
    samples = samples_of(kept, [0.0, 0.0])
    for dp, expected in ((1, (1 / 2, 2 / 12)), (2, (2 / 2, 2 / 12))):
        metrics = measure(kept, packs=packs_of(samples, multiple_of=4, dp=dp))
        assert (metrics["packed_ratio"], metrics["batch/padding_frac"]) == pytest.approx(expected)
        assert metrics["batch/lost_token_frac"] == 0
    # A dummy pack is all padding and holds no completion.
    metrics = measure(kept, packs=packs_of(samples, multiple_of=4, dp=3))
    assert (metrics["packed_ratio"], metrics["batch/padding_frac"]) == pytest.approx((1.0, (2 + 4) / 16))


def test_a_pack_that_went_missing_is_seen():
    """Packs floored to a multiple of the ranks once lost almost half of the data without a trace."""
    kept = [group([10.0], lengths=[4]), group([0.0], lengths=[2])]
    samples = samples_of(kept, [0.0, 0.0])
    assert plan_of(samples, dp=2) == [[[0]], [[1]]]
    left = pack_lengths(samples, [[[0]]], multiple_of=1, document_multiple_of=1)
    assert measure(kept, packs=left)["batch/lost_token_frac"] == pytest.approx(2 / 6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 2), (8, 4)]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3),
)
def test_padding_is_what_no_token_accounts_for(lengths, multiples, dp, share, prompt):
    """Whatever the sharing of prompts and the padding of documents: rows - prompts - completions without their last."""
    multiple_of, document_multiple_of = multiples
    share = share and document_multiple_of == 1
    kept = [group([0.0] * len(own), lengths=own, prompt=prompt) for own in lengths]
    samples = samples_of(kept, [0.0] * sum(map(len, lengths)))
    packs = packs_of(
        samples,
        pack_length=64,
        multiple_of=multiple_of,
        document_multiple_of=document_multiple_of,
        dp=dp,
        share_prompts=share,
    )
    num_prompts = len(kept) if share else len(samples)
    real = prompt * num_prompts + sum(len(sample.tokens) - 1 for sample in samples)
    metrics = measure(kept, packs=packs)
    assert metrics["batch/padding_frac"] == pytest.approx(1 - real / packs.tokens)
    assert metrics["batch/lost_token_frac"] == 0


def test_a_step_without_groups_still_says_how_many_were_left_out():
    """Every prompt solved: the line must be written, and be JSON, without a warning on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dropped in (DROPPED, []):
            metrics = measure([], dropped)
            assert metrics["batch/filtered_prompts"] == len(dropped)
            assert metrics["real_batch_size_ratio"] == 0
            assert math.isnan(metrics["scores"]) and math.isnan(metrics["val/sequence_lengths"])
            assert metrics["val/advantages_hist"] == [0] * 15
            json.dumps(metrics)


def test_a_step_without_scores_has_no_warnings():
    """All verifiers down: NaN, and the rates say why."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = measure([group([NAN, NAN])], advantages=[NAN, NAN])
    assert metrics["val/no_score_rate"] == metrics["objective/integer_error_rate"] == 1
    names = ("scores", "objective/integer_reward", "objective/integer_correct_rate", "unsolved_batch_size_ratio")
    assert all(math.isnan(metrics[name]) for name in names)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 5.0, 10.0, -10.0, NAN]), min_size=1, max_size=4), min_size=0, max_size=4),
    st.lists(st.sampled_from([0.0, 10.0, NAN]), min_size=0, max_size=3),
)
def test_numbers_agree_with_each_other(kept, dropped):
    """Whatever was sampled: histograms count everything once, rates lie in [0, 1], parts add up to the whole."""
    groups = [group(rewards) for rewards in kept]
    left_out = [group([reward] * 3) for reward in dropped]
    metrics = measure(groups, left_out)
    scored = [r for rewards in kept for r in rewards if r == r]
    solved, unsolved = (sum(metrics[f"val/sequence_lengths_{kind}_hist"]) for kind in ("solved", "unsolved"))
    assert solved + unsolved == len(scored)
    assert sum(metrics["batch/response_lengths"]) == sum(map(len, kept))
    assert sum(metrics["batch/percent_solved_hist"]) == sum(any(r == r for r in rewards) for rewards in kept)
    kinds = sum(metrics[f"batch/filtered_prompts_{kind}"] for kind in ("zero", "solved", "nonzero", "unscored"))
    assert kinds == metrics["batch/filtered_prompts"] == len(dropped)
    for name, value in metrics.items():
        if isinstance(value, list):
            assert len(value) <= 16 and all(isinstance(count, int) for count in value), name
        elif name.endswith(("_rate", "_frac", "_pct")):
            assert math.isnan(value) or 0 <= value <= 1, name


def test_length_bins():
    """Doubling bins: the same 16 numbers for 10 tokens and for 100 000."""
    assert length_histogram([0, 1, 2, 3, 4, 7, 8]) == [2, 2, 2, 1] + [0] * 12
    assert length_histogram([2**15 - 1, 2**15, 2**20]) == [0] * 14 + [1, 2]
    assert length_histogram([]) == [0] * 16


def test_rate_bins():
    """Never and always solved have their own bins; 0.1 is in [0.1, 0.2) even as 1 - 0.9."""
    assert rate_histogram([-1.0, 0.0, 0.01, 1 - 0.9, 0.3, 0.99, 1.0, 1.5, NAN]) == [
        2,
        1,
        1,
        0,
        1,
        0,
        0,
        0,
        0,
        0,
        1,
        2,
    ]


def test_advantage_bins():
    """Mirrored around zero, which has a bin of its own."""
    values = [-100.0, -8.0, -4.0, -0.25, -0.1, 0.0, -0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    expected = [2, 1, 0, 0, 0, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1]
    assert advantage_histogram(np.array(values)) == expected
    assert advantage_histogram(-np.array(values)) == expected[::-1]


def test_sizes_of_sets_are_those_of_sampled_tokens_alone():
    """What stands between turns has an empty set, and would halve the mean; a set that is not known has no size."""
    first = builders.completion(
        5,
        trajectory=builders.trajectory("11011"),
        kept=builders.kept_tokens([0, 7, 8], [1], [], [3, 4], []),
    )
    second = builders.completion(1, kept=builders.kept_tokens([0, 5]))
    metrics = measure([builders.scored_group([10.0, 0.0], completions=[first, second])])
    assert metrics["rollout/kept_tokens_avg"] == pytest.approx((3 + 1 + 2 + 2) / 4)
    assert metrics["rollout/kept_single_share"] == pytest.approx(1 / 4)
    assert metrics["rollout/kept_unknown_share"] == pytest.approx(1 / 5)
    assert not [name for name in measure([group([10.0], lengths=[4])]) if name.startswith("rollout/kept")]
