"""Filters of groups, on rewards [prompts, group]."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.algo import advantages, filter_zero_spread, percent_solved, solved_for_good

NAN = float("nan")


def test_groups_without_spread_are_counted_by_what_they_score():
    """The log would blame hard prompts for what easy ones did, or the other way round."""
    rewards = np.array(
        [
            [0.0, 1.0, 0.0],  # kept
            [0.0, 0.0, 0.0],  # zero
            [2.0, 2.0, 2.0],  # solved
            [1.0, 1.0, 1.0],  # neither
            [NAN, NAN, NAN],  # no score
            [2.0, NAN, 2.0],  # solved, as far as it has scores
            [NAN, 0.0, 1.0],  # kept
            [-1.0, -1.0, -1.0],  # neither
        ]
    )
    got = filter_zero_spread(rewards, max_possible_score=2.0)
    assert got.keep.tolist() == [True, False, False, False, False, False, True, False]
    assert (got.num_zero, got.num_solved, got.num_nonzero, got.num_unscored) == (1, 2, 2, 1)
    assert got.num_filtered == 6 == (~got.keep).sum()


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1e9 / 3, -0.1])
@pytest.mark.parametrize("group", [3, 7, 10])
def test_equal_rewards_are_filtered_also_when_their_mean_rounds(value, group):
    """std([0.1] * 3) is 1.4e-17: a test for exactly 0 keeps the group, which then trains nothing."""
    rewards = np.full((1, group), value)
    almost = rewards.copy()
    almost[0, 0] = np.nextafter(value, np.inf)
    for values in (rewards, almost):
        assert not filter_zero_spread(values, max_possible_score=1.0).keep.any()


def test_the_filter_leaves_out_exactly_the_groups_whose_advantages_are_zero():
    """A tolerance of its own would keep groups that train nothing, or drop groups that would have trained."""
    generator = np.random.default_rng(2)
    rewards = generator.choice([0.0, 0.1, 0.1 + 1e-11, 0.3, 1.0, NAN], size=(400, 3))
    keep = filter_zero_spread(rewards, max_possible_score=1.0).keep
    assert 0 < keep.sum() < len(keep)
    for normalization in ("standard", "centered", "batch_std"):
        own = advantages(torch.tensor(rewards), normalization=normalization)
        assert (own != 0).any(1).tolist() == keep.tolist()


def test_percent_solved_is_the_mean_score_of_the_highest():
    """Prompts would leave the data set too early or never."""
    rewards = np.array([[10.0, 0.0], [10.0, NAN], [NAN, NAN], [5.0, 10.0]])
    got = percent_solved(rewards, max_possible_score=10.0)
    np.testing.assert_array_equal(got, [0.5, 1.0, NAN, 0.75])
    solved = solved_for_good(rewards, max_possible_score=10.0, pass_rate=0.75)
    assert solved.tolist() == [False, True, False, True]


def test_rounding_does_not_decide_whether_a_prompt_is_solved():
    """The mean of ten times 0.1 is below 0.1 in floating point."""
    rewards = np.full((1, 10), 0.1)
    assert solved_for_good(rewards, max_possible_score=0.1, pass_rate=1.0).tolist() == [True]
    assert filter_zero_spread(np.full((1, 3), 0.1 * 3), max_possible_score=0.3).num_solved == 1


def test_without_a_highest_score_nothing_counts_as_solved():
    """Dividing by 0 would end a run whose rewards have no upper bound."""
    rewards = np.array([[3.0, 3.0], [0.0, 0.0]])
    got = filter_zero_spread(rewards, max_possible_score=0.0)
    assert (got.num_zero, got.num_solved, got.num_nonzero) == (1, 0, 1)
    assert np.isnan(percent_solved(rewards, max_possible_score=0.0)).all()
    assert not solved_for_good(rewards, max_possible_score=0.0, pass_rate=0.5).any()


def test_no_groups_are_no_groups():
    """A round in which nothing came back would crash the sampling of the next one."""
    got = filter_zero_spread(np.zeros((0, 4)), max_possible_score=1.0)
    assert got.keep.shape == (0,) and got.num_filtered == 0
    assert percent_solved(np.zeros((0, 4)), max_possible_score=1.0).shape == (0,)
    with pytest.raises(ValueError, match=r"\[prompts, group\], got shape \[3\]"):
        filter_zero_spread(np.zeros(3), max_possible_score=1.0)
