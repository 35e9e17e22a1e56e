"""Filters of groups, on [prompts, group]."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.algo import advantages, has_spread, solved_for_good

NAN = float("nan")


def test_groups_without_spread_are_left_out():
    """A group whose answers are all right or all wrong pushes nothing, and dilutes the mean over tokens."""
    rewards = np.array(
        [
            [0.0, 1.0, 0.0],
            [0.0, 0.0, 0.0],
            [2.0, 2.0, 2.0],
            [NAN, NAN, NAN],
            [2.0, NAN, 2.0],
            [NAN, 0.0, 1.0],
            [-1.0, -1.0, -1.0],
        ]
    )
    assert has_spread(rewards).tolist() == [True, False, False, False, False, True, False]


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1e9 / 3, -0.1])
@pytest.mark.parametrize("group", [3, 7, 10])
def test_equal_rewards_are_filtered_also_when_their_mean_rounds(value, group):
    """std([0.1] * 3) is 1.4e-17: a test for exactly 0 keeps the group, which then trains nothing."""
    rewards = np.full((1, group), value)
    almost = rewards.copy()
    almost[0, 0] = np.nextafter(value, np.inf)
    for values in (rewards, almost):
        assert not has_spread(values).any()


def test_the_filter_leaves_out_exactly_the_groups_whose_advantages_are_zero():
    """A tolerance of its own would keep groups that train nothing, or drop groups that would have trained."""
    generator = np.random.default_rng(2)
    rewards = generator.choice([0.0, 0.1, 0.1 + 1e-11, 0.3, 1.0, NAN], size=(400, 3))
    keep = has_spread(rewards)
    assert 0 < keep.sum() < len(keep)
    for normalization in ("standard", "centered", "batch_std"):
        own = advantages(torch.tensor(rewards), normalization=normalization)
        assert (own != 0).any(1).tolist() == keep.tolist()


def test_a_prompt_is_solved_when_its_mean_share_reaches_the_pass_rate():
    """Prompts would leave the data set too early or never; one answer without a score may have been wrong."""
    shares = np.array([[1.0, 0.0], [1.0, NAN], [NAN, NAN], [0.5, 1.0], [1.0, 1.0]])
    assert solved_for_good(shares, pass_rate=0.75).tolist() == [False, False, False, True, True]


def test_rounding_does_not_decide_whether_a_prompt_is_solved():
    """The mean of ten times 0.1 is below 0.1 in floating point."""
    assert solved_for_good(np.full((1, 10), 0.1), pass_rate=0.1).tolist() == [True]


def test_no_groups_are_no_groups():
    """A round in which nothing came back would crash the sampling of the next one."""
    assert has_spread(np.zeros((0, 4))).shape == (0,)
    with pytest.raises(ValueError, match=r"\[prompts, group\], got shape \[3\]"):
        has_spread(np.zeros(3))
