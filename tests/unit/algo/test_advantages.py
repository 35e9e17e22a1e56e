"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from mgrpo.algo import advantages

NAN = float("nan")


def test_standard_divides_by_the_population_deviation():
    """Open Instruct's runs would not be reproduced: with ddof 1 every advantage of a group of 4 shrinks by 13 %."""
    got = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 2.0, 2.0]], dtype=torch.float64))
    root_half = math.sqrt(0.5)  # deviations 0.5 and sqrt(2 / 4)
    want = torch.tensor([[1.0, -1.0, -1.0, 1.0], [1 / root_half, -1 / root_half, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


def test_ddof_1_divides_by_the_sample_deviation():
    """TRL's runs would not be reproduced."""
    got = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64), ddof=1, eps=1e-4)
    want = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    torch.testing.assert_close(got, want * torch.tensor([[1.0, -1.0, -1.0, 1.0]], dtype=torch.float64))


def test_centered_only_subtracts_the_mean():
    """Dr. GRPO would get advantages of unit size instead of reward size."""
    got = advantages(torch.tensor([[10.0, 0.0, 0.0, 10.0]]), normalization="centered")
    torch.testing.assert_close(got, torch.tensor([[5.0, -5.0, -5.0, 5.0]]))


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_reward_that_is_nan_leaves_the_statistics_and_gets_zero(ddof):
    """One crashed verifier would turn its group's gradient into NaN, or bias the mean of the others."""
    with_gap = advantages(torch.tensor([[1.0, NAN, 0.0, 2.0]], dtype=torch.float64), ddof=ddof)
    without = advantages(torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64), ddof=ddof)
    torch.testing.assert_close(with_gap[:, [0, 2, 3]], without)
    assert with_gap[0, 1] == 0.0


@pytest.mark.parametrize("normalization", ["standard", "centered"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("rewards", [[NAN] * 3, [NAN, 7.0, NAN]])
def test_a_group_with_at_most_one_score_gets_zeros(normalization, ddof, rewards):
    """Division by a count of 0 would put NaN into the batch."""
    got = advantages(torch.tensor([rewards]), normalization=normalization, ddof=ddof)
    assert torch.equal(got, torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [3, 7, 10])
def test_equal_rewards_give_exact_zeros_also_when_their_mean_rounds(dtype, group):
    """std([0.1] * 3) is 1.4e-17, so rounding noise would be taken for a difference between the completions."""
    rewards = torch.full((1, group), 0.1, dtype=dtype)
    almost = rewards.clone()
    almost[0, 0] += rewards[0, 0] * torch.finfo(dtype).eps
    for values in (rewards, -rewards, almost):
        assert torch.equal(advantages(values), torch.zeros_like(values))
        assert torch.equal(advantages(values, normalization="centered"), torch.zeros_like(values))


def test_a_small_but_real_difference_counts():
    """A tolerance that is too wide would silence rewards that differ only in a small bonus."""
    got = advantages(torch.tensor([[10.0, 10.001]], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([[-1.0, 1.0]], dtype=torch.float64), rtol=0, atol=1e-4)


def test_one_completion_a_prompt_is_reinforce_with_a_batch_baseline():
    """A group of one compared with itself would give advantage 0 everywhere, and nothing would be learned."""
    got = advantages(torch.tensor([[4.0], [0.0], [NAN], [2.0]]), normalization="centered")
    assert torch.equal(got, torch.tensor([[2.0], [-2.0], [0.0], [0.0]]))
    assert torch.equal(advantages(torch.tensor([[5.0]])), torch.zeros(1, 1))


def test_no_prompts_give_no_advantages():
    """A step in which every group was filtered would crash the controller."""
    assert advantages(torch.zeros(0, 4)).shape == (0, 4)


def test_integer_rewards_are_not_rounded():
    """Rewards of 0 and 1 from a counter would come back as integer advantages, mostly 0."""
    got = advantages(torch.tensor([[0, 1, 1, 1]]), normalization="centered")
    assert torch.equal(got, torch.tensor([[-0.75, 0.25, 0.25, 0.25]]))


def test_bad_settings_and_infinite_rewards_are_errors():
    """A typo would train with another normalization than the one asked for."""
    rewards = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="normalization='std'"):
        advantages(rewards, normalization="std")
    with pytest.raises(ValueError, match="ddof=2"):
        advantages(rewards, ddof=2)
    with pytest.raises(ValueError, match="shape"):
        advantages(torch.zeros(4))
    with pytest.raises(ValueError, match="infinite"):
        advantages(torch.tensor([[1.0, float("inf")]]))
