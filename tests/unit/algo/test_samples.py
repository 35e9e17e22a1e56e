"""From scored groups to samples."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mgrpo.algo.training_samples import train_samples
from mgrpo.types import ScoredGroup
from tests import builders

NAN = float("nan")
samples_of = functools.partial(train_samples, ddof=0, eps=1e-8)


def group(rewards: list[float], reasons: list[str] | None = None, parts: list[dict] | None = None) -> ScoredGroup:
    completions = [builders.completion(3, finish_reason=reason) for reason in reasons or ["stop"] * len(rewards)]
    return builders.scored_group(rewards, completions=completions, parts=parts)


def advantages_of(samples) -> list[float]:
    return [sample.advantage for sample in samples]


def trained(samples) -> list[bool]:
    return [bool(sample.loss_mask.all()) for sample in samples]


def test_truncated_completions_train_nothing_and_stay_in_the_baseline():
    """Taken out first, the others would be compared with another mean, or with the next prompt's completions."""
    groups = [group([3.0, 0.0, 0.0], ["stop", "length", "stop"]), group([1.0, 2.0, 3.0], ["stop", "stop", "abort"])]
    plain = samples_of(groups, normalization="centered")
    masked = samples_of(groups, normalization="centered", mask_truncated=True)
    assert advantages_of(masked) == advantages_of(plain) == pytest.approx([2.0, -1.0, -1.0, -1.0, 0.0, 1.0])
    assert trained(plain) == [True] * 6
    assert trained(masked) == [True, False, True, True, True, False]
    assert not any(sample.loss_mask.any() for sample in masked if not sample.loss_mask.all())
    assert [sample.group for sample in masked] == [0, 0, 0, 1, 1, 1]


def test_deviation_and_epsilon_are_those_asked_for():
    """TRL's runs would not be reproduced."""
    got = train_samples([group([1.0, 0.0])], normalization="standard", ddof=1, eps=0.5)
    assert advantages_of(got) == pytest.approx([0.5 / (0.5**0.5 + 0.5), -0.5 / (0.5**0.5 + 0.5)])


def test_gdpo_reads_each_functions_rewards_by_name():
    """Weights in another order than the functions would reward the wrong thing."""
    parts = [
        {"right": 1.0, "short": 0.0, "other": 5.0},
        {"right": 0.0, "short": 1.0, "other": 9.0},
        {"right": 1.0, "short": NAN, "other": 7.0},
        {"right": NAN, "short": NAN, "other": 2.0},
    ]
    groups = [group([1.0, 1.0, 1.0, NAN], parts=parts)]
    got = samples_of(groups, normalization="gdpo", reward_weights={"short": 1.0, "right": 10.0})
    # right: mean 2/3, std sqrt(2/9): +0.71, -1.41, +0.71; short: -1, +1. Sums: 6.07, -13.14, 7.07; their mean is 0.
    sums = np.array([10 / 2**0.5 - 1, -20 / 2**0.5 + 1, 10 / 2**0.5])
    assert advantages_of(got) == pytest.approx([*(sums - sums.mean()) / sums.std(), 0.0])
    assert trained(got) == [True, True, True, False]
    with pytest.raises(ValueError, match="needs reward functions"):
        samples_of(groups, normalization="gdpo", reward_weights={})


def test_no_groups_are_no_samples():
    """A step in which every group was filtered would end the run."""
    assert samples_of([], normalization="standard") == []


def test_statistics_of_the_batch_include_groups_that_are_not_trained_on():
    """A deviation over the groups that a filter kept is larger than the batch's, the more so the better the policy."""
    kept, flat = [group([1.0, 0.0])], [group([1.0, 1.0]), group([1.0, 1.0])]
    everything = samples_of([*kept, *flat], normalization="batch_std")
    filtered = samples_of(kept, dropped=flat, normalization="batch_std")
    assert len(filtered) == 2
    assert advantages_of(filtered) == pytest.approx(advantages_of(everything)[:2])
    assert advantages_of(filtered) != pytest.approx(advantages_of(samples_of(kept, normalization="batch_std")))


def with_turns(mask: str, **fields) -> ScoredGroup:
    """Two completions: one of two turns with something between them, and one of a single turn."""
    turns = builders.completion(len(mask), logprobs=-0.5, version=4, trajectory=builders.trajectory(mask), **fields)
    return builders.scored_group([1.0, 0.0], completions=[turns, builders.completion(2, version=5)])


def test_what_was_not_sampled_is_no_response_and_has_no_age():
    """Training on it teaches the model to write what tools answer; its version of -1 would be the oldest token of the step."""
    turns, plain = samples_of([with_turns("11001")], normalization="centered", policy_version=6)
    assert turns.is_sampled.tolist() == turns.loss_mask.tolist() == [True, True, False, False, True]
    assert turns.ages.tolist() == [2, 2, 0, 0, 2] and turns.num_predicted == 3
    assert plain.is_sampled is None and plain.ages.tolist() == [1, 1]
    cut = samples_of([with_turns("101", finish_reason="length")], normalization="centered", mask_truncated=True)[0]
    assert cut.is_sampled.tolist() == [True, False, True] and not cut.loss_mask.any()


def test_tool_output_is_trained_on_only_when_asked_for():
    """Its log-probability under the engine is unknown: 0 would make each of its tokens one that the engine was sure of."""
    turns, _ = samples_of([with_turns("101")], normalization="centered", mask_tool_use=False)
    assert turns.loss_mask.all() and turns.is_sampled is None
    np.testing.assert_array_equal(turns.rollout_logprobs, np.array([-0.5, NAN, -0.5], np.float32))


def test_a_completion_that_never_began_is_a_sample_that_trains_nothing():
    """Its environment was lost before the first turn; a missing sample would shift every advantage after it."""
    empty = builders.completion(0, trajectory=builders.trajectory("", ended_by="error"))
    lost, other = samples_of(
        [builders.scored_group([NAN, 1.0], completions=[empty, builders.completion(2)])],
        normalization="centered",
        policy_version=3,
    )
    assert (
        lost.tokens.tolist() == lost.prompt_tokens[-1:].tolist() and len(lost.ages) == len(lost.rollout_logprobs) == 1
    )
    assert not lost.loss_mask.any() and lost.advantage == 0.0 and other.loss_mask.all()


def test_sets_stay_with_their_tokens_in_every_branch():
    """The ratio of a token whose set is another's is that of two distributions with nothing in common."""
    sets = builders.kept_tokens([0, 9], [1], [], [3, 8, 7], [4])
    branches = (builders.branch(0, 2), builders.branch(3, 5, [7, 7]))
    turns = builders.completion(5, trajectory=builders.trajectory("11011", branches=branches), kept=sets)
    group = builders.scored_group(
        [1.0, 0.0], completions=[turns, builders.completion(1, kept=builders.kept_tokens([0, 2]))]
    )
    samples = samples_of([group], normalization="centered")
    assert [builders.sets_of(sample.kept) for sample in samples] == [[[0, 9], [1]], [[3, 8, 7], [4]], [[0, 2]]]


def test_a_token_whose_set_is_not_known_is_not_trained():
    """Its logprob would be taken over another set than the engine's, and its ratio be wrong by what is missing."""
    sets = builders.kept_tokens([0, 9], [], [2])
    group = builders.scored_group([1.0, 0.0], completions=[builders.completion(3, kept=sets), builders.completion(2)])
    known, uncut = samples_of([group], normalization="centered")
    assert known.loss_mask.tolist() == [True, False, True] and known.is_sampled is None
    # Sampled before a restart that has cut the sampling.
    assert builders.sets_of(uncut.kept) == [[], []] and not uncut.loss_mask.any()
    empty = builders.completion(0, kept=builders.kept_tokens())
    lost, _ = samples_of([builders.scored_group([NAN, 1.0], completions=[empty, empty])], normalization="centered")
    assert builders.sets_of(lost.kept) == [[]] and not lost.loss_mask.any()


def test_a_mean_over_tokens_counts_those_of_the_whole_batch():
    """Over what is left for training, a mask or a filter would change what the others are compared with."""
    long, short = builders.completion(3, finish_reason="length"), builders.completion(1)
    groups = [builders.scored_group([1.0, 0.0], completions=[long, short])]
    dropped = [builders.scored_group([1.0, 1.0], completions=[builders.completion(2), builders.completion(0)])]
    got = samples_of(groups, dropped=dropped, normalization="reinforce_plus_plus", mask_truncated=True)
    # Five tokens with reward 1 and one with 0: mean 5 / 6, variance 5 / 36.
    assert advantages_of(got) == pytest.approx([(1 / 6) * 6 / 5**0.5, (-5 / 6) * 6 / 5**0.5])
    assert trained(got) == [False, True]
