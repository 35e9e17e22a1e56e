"""Advantages against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from mgrpo.algo import advantages
from mgrpo.config.algorithm import NAMED_ESTIMATORS

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
    """A step in which every group was filtered would end the run."""
    assert advantages(torch.zeros(0, 4)).shape == (0, 4)
    assert advantages(torch.zeros(0, 4, 2), normalization="gdpo").shape == (0, 4)


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
    with pytest.raises(ValueError, match=r"\[prompts, group, functions\] for 'gdpo', got shape \[1, 2\]"):
        advantages(rewards, normalization="gdpo")
    with pytest.raises(ValueError, match="expected 3, got 2"):
        advantages(torch.zeros(1, 2, 3), normalization="gdpo", weights=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"num_tokens must be one per reward, \[1, 2\], got shape \[2\]"):
        advantages(rewards, normalization="rloo", num_tokens=torch.ones(2))
    with pytest.raises(ValueError, match="expected none for 'centered', got 2"):
        advantages(rewards, normalization="centered", weights=[1.0, 2.0])


def test_batch_std_divides_by_the_deviation_of_all_rewards():
    """Group means 1 and 5; all rewards 0, 2, 4, 6 have mean 3 and deviation sqrt(20 / 4), or sqrt(20 / 3) with ddof 1."""
    rewards = torch.tensor([[0.0, 2.0], [4.0, 6.0]], dtype=torch.float64)
    for ddof, std in ((0, math.sqrt(5)), (1, math.sqrt(20 / 3))):
        got = advantages(rewards, normalization="batch_std", ddof=ddof, eps=1e-4)
        torch.testing.assert_close(got, torch.tensor([[-1.0, 1.0]] * 2, dtype=torch.float64) / (std + 1e-4))


def test_batch_std_gives_zero_to_a_group_of_equal_rewards():
    """Group 0 teaches nothing, whatever the deviation of the batch."""
    got = advantages(torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.0, 3.0]]), normalization="batch_std")
    assert torch.equal(got[0], torch.zeros(3)) and got[1].abs().min() > 0
    assert torch.equal(advantages(torch.full((2, 3), 0.1), normalization="batch_std"), torch.zeros(2, 3))


def test_gdpo_follows_the_hand_worked_case():
    """Summed first, the function with the larger numbers would decide alone."""
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, 0.0]]], dtype=torch.float64)
    got = advantages(rewards, normalization="gdpo", weights=[1.0, 3.0], eps=0.0)
    # Both functions standardised are +-1; weighted sums -2, 2, 4, -4 have mean 0 and deviation sqrt(40 / 4).
    want = torch.tensor([[-2.0, 2.0, 4.0, -4.0]], dtype=torch.float64) / math.sqrt(10)
    torch.testing.assert_close(got, want)


def trl_advantages(per_function: np.ndarray, weights: list[float], aggregation: str, scale: str) -> np.ndarray:
    """TRL's definition over rewards [prompts, group, functions], None as NaN; deviations with ddof 1, epsilon 1e-4."""
    unscorable = np.isnan(per_function).all(-1)
    if aggregation == "sum_then_normalize":
        rewards = np.nansum(per_function * weights, -1)
        rewards[unscorable] = NAN
        centered = rewards - np.nanmean(rewards, 1, keepdims=True)
        std = {
            "none": 1.0,
            "group": np.nanstd(rewards, 1, ddof=1, keepdims=True) + 1e-4,
            "batch": np.nanstd(rewards, ddof=1) + 1e-4,
        }[scale]
        return np.nan_to_num(centered / std)
    by_function = per_function - np.nanmean(per_function, 1, keepdims=True)
    by_function = by_function / (np.nanstd(per_function, 1, ddof=1, keepdims=True) + 1e-4)
    total = np.nansum(by_function * weights, -1)
    total[unscorable] = NAN
    return np.nan_to_num((total - np.nanmean(total)) / (np.nanstd(total, ddof=1) + 1e-4))


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:Mean of empty")
@pytest.mark.parametrize("gaps", [False, True])
def test_the_names_of_trl_expand_to_settings_that_compute_the_same(gaps):
    """A run brought over from TRL would take other steps under the same settings."""
    generator = np.random.default_rng(5)
    per_function = generator.normal(size=(6, 4, 3)) * [1.0, 10.0, 0.1]
    if gaps:
        per_function[generator.random(per_function.shape) < 0.25] = NAN
        per_function[1, 2] = NAN  # no score at all
        per_function[2, 1:] = NAN  # one scored completion in its group
        per_function[3] = NAN
        per_function[4, :, 0] = NAN  # a function that does not apply to a prompt
    weights = [1.0, 0.5, 2.0]
    summed = np.nansum(per_function * weights, -1)
    summed[np.isnan(per_function).all(-1)] = NAN
    for scale, normalization in (("none", "centered"), ("group", "standard"), ("batch", "batch_std")):
        got = advantages(torch.tensor(summed), normalization=normalization, ddof=1, eps=1e-4)
        want = trl_advantages(per_function, weights, "sum_then_normalize", scale)
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    got = advantages(torch.tensor(per_function), normalization="gdpo", ddof=1, eps=1e-4, weights=weights)
    want = trl_advantages(per_function, weights, "normalize_then_sum", "group")
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_one_completion_a_prompt_uses_the_batch_under_every_normalization():
    """Each group of one has deviation 0, and the whole run would stand still."""
    rewards = torch.tensor([[4.0], [0.0], [NAN], [2.0]], dtype=torch.float64)
    as_group = advantages(rewards.T).T
    for normalization in ("standard", "batch_std", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        torch.testing.assert_close(advantages(rewards, normalization=normalization), as_group)
    torch.testing.assert_close(advantages(rewards, normalization="rloo")[:, 0], torch.tensor([3.0, -3, 0, 0]).double())
    got = advantages(rewards[:, :, None], normalization="gdpo")
    torch.testing.assert_close(got, as_group, rtol=1e-6, atol=1e-6)


def weighted(values: list[tuple[float, int]], ddof: int) -> tuple[float, float]:
    """Mean and deviation of values, each of which stands there a number of times."""
    each = [value for value, times in values for _ in range(times)]
    mean = sum(each) / len(each)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in each) / (len(each) - ddof))


def looped(rewards: torch.Tensor, num_tokens: torch.Tensor, normalization: str, ddof: int, eps: float) -> torch.Tensor:
    """The definitions with Python's numbers, over `[prompts, group, turns]`."""
    groups = [[[r for r in turns if r == r] for turns in group] for group in rewards.tolist()]
    found = torch.zeros_like(rewards)
    centered = {}
    for place in np.ndindex(*rewards.shape):
        reward, group = rewards[place].item(), groups[place[0]]
        if reward != reward:
            continue
        everything = [r for turns in group for r in turns]
        if normalization == "rloo":
            others = [r for number, turns in enumerate(group) if number != place[1] for r in turns]
            found[place] = reward - sum(others) / len(others) if others else 0.0
        centered[place] = reward - (sum(everything) / len(everything) if normalization.endswith("baseline") else 0.0)
    if normalization == "rloo":
        return found
    mean, std = weighted([(value, int(num_tokens[place])) for place, value in centered.items()], ddof)
    for place, value in centered.items():
        found[place] = (value - mean) / (std + eps)
    return found


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("num_turns", [None, 1, 3])
@pytest.mark.parametrize("normalization", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_rloo_and_reinforce_plus_plus_equal_a_loop(normalization, num_turns, ddof):
    """With an own reward in its baseline RLOO is Dr. GRPO with larger steps; a mean over completions would not be that over tokens."""
    generator = np.random.default_rng(num_turns or 0)
    shape = (5, 4, num_turns or 1)
    rewards = torch.from_numpy(generator.normal(size=shape))
    num_tokens = torch.from_numpy(generator.integers(0, 6, shape))
    rewards[torch.from_numpy(generator.random(shape)) < 0.2] = NAN
    rewards[1, 2] = NAN  # no score at all
    rewards[2, 1:] = NAN  # nothing to compare the first with
    rewards[2, 0] = 0.5
    rewards[3] = NAN
    want = looped(rewards, num_tokens, normalization, ddof, 1e-3)
    if num_turns is None:
        rewards, num_tokens, want = rewards[..., 0], num_tokens[..., 0], want[..., 0]
    got = advantages(rewards, normalization=normalization, ddof=ddof, eps=1e-3, num_tokens=num_tokens)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_reinforce_plus_plus_compares_groups_and_its_baseline_completions():
    """An easy prompt's answers all beat the batch; with the baseline only those that beat the others of their prompt do."""
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    by_batch = advantages(rewards, normalization="reinforce_plus_plus", eps=0.0)
    torch.testing.assert_close(by_batch, torch.where(rewards == 1.0, 1.0, -1.0).double())
    with_baseline = advantages(rewards, normalization="reinforce_plus_plus_baseline", eps=0.0)
    want = torch.tensor([[0.0, 0.0], [-1.0, 1.0], [0.0, 0.0]], dtype=torch.float64) * math.sqrt(3)
    torch.testing.assert_close(with_baseline, want)
    equal = torch.full((2, 3), 0.1)
    for normalization in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert torch.equal(advantages(equal, normalization=normalization), torch.zeros(2, 3))
        no_tokens = advantages(rewards, normalization=normalization, num_tokens=torch.zeros(3, 2))
        assert normalization == "rloo" or not no_tokens.any()


@pytest.mark.parametrize("normalization", NAMED_ESTIMATORS)
def test_a_batch_without_a_score_is_all_zeros(normalization):
    """A judge that was down for a step would put NaN into every parameter."""
    rewards = torch.full((2, 3, 2) if normalization == "gdpo" else (2, 3), NAN)
    assert torch.equal(advantages(rewards, normalization=normalization), torch.zeros(2, 3))
