"""What is measured of trainer and engine when tokens of older weights are trained on."""

import math

import pytest
import torch

from mgrpo.algo import LossConfig, MetricSums, add_metrics, agreement, metric_sums, policy_loss, reduce_metrics
from mgrpo.algo.training_samples import train_samples
from tests import builders

MEAN, STD, MAX, KL, TAIL = (
    f"debug/vllm_{name}"
    for name in (
        "vs_local_logprob_diff_mean",
        "vs_local_logprob_diff_std",
        "vs_local_logprob_diff_max",
        "local_reverse_kl",
        "vs_local_ratio_tail_frac",
    )
)


def test_a_batch_with_ages_0_1_and_2_is_the_one_worked_by_hand():
    """Drift in the mean of the present weights' tokens hides an engine that samples from another model, and the other way round."""
    nan = math.nan
    #          present weights  | 1 version older | 2       | not counted: masked, without the engine's logprob
    ages = [0, 0, 0, 1, 1, 2, 0, 1]
    start = [-1.0, -2.0, -0.5, -1.0, -3.0, -2.0, -9.0, -1.0]
    rollout = [-1.01, -2.0, -0.7, -1.5, -2.9, -4.0, -1.0, nan]
    live = [-1.1, -2.0, -0.6, -7.0, -7.0, -7.0, nan, -7.0]
    mask = [True] * 6 + [False, True]
    found = agreement(
        *(torch.tensor(x) for x in (live, start, rollout, mask)), ages=torch.tensor(ages, dtype=torch.uint8), oldest=3
    )
    got = reduce_metrics(metric_sums(*found))
    gaps = [0.01, 0.0, 0.2]
    mean = sum(gaps) / 3
    assert got == pytest.approx(
        {
            MEAN: mean,
            STD: math.sqrt(sum(gap**2 for gap in gaps) / 3 - mean**2),
            MAX: 0.2,
            KL: (0.09 + 0.0 - 0.1) / 3,
            TAIL: 1 / 3,  # e^0.2
            "async/logprob_diff_age_1": (0.5 + 0.1) / 2,
            "async/logprob_diff_age_2": 2.0,
        },
        rel=1e-4,
    )


def test_without_a_token_of_the_present_weights_their_agreement_is_not_measured():
    """A 0 would read as perfect agreement, a NaN as a fault."""
    x = torch.full((2,), -1.0)
    one = agreement(x, x, x - 0.5, torch.ones(2, dtype=torch.bool), ages=torch.ones(2, dtype=torch.uint8), oldest=1)
    assert reduce_metrics(metric_sums(*one)) == pytest.approx({"async/logprob_diff_age_1": 0.5})
    none = agreement(x[:0], x[:0], x[:0], torch.zeros(0, dtype=torch.bool))
    assert reduce_metrics(metric_sums(*none)) == {}


@pytest.mark.parametrize("unknown", [0, 3])
def test_tokens_of_the_present_weights_alone_are_measured_as_the_loss_does(unknown):
    """Micro-batches with and without old tokens lie side by side in a step: two definitions would mix in one number."""
    generator = torch.Generator().manual_seed(0)
    live, start, rollout = (-torch.rand(40, generator=generator) for _ in range(3))
    start[5], rollout[:unknown] = -torch.inf, torch.nan
    mask = torch.rand(40, generator=generator) < 0.7
    cuts = torch.tensor([0, 17, 40], dtype=torch.int32)
    loss = policy_loss(live, start, torch.ones(2), mask, cuts, config=LossConfig(beta=0.0), rollout_logprobs=rollout)
    expected = reduce_metrics(metric_sums(loss.metrics, loss.maxima))
    got = reduce_metrics(metric_sums(*agreement(live, start, rollout, mask)))
    assert got == pytest.approx({name: expected[name] for name in (MEAN, STD, MAX, KL, TAIL)}, rel=1e-5)


def test_parts_add_up_to_the_whole():
    """Which ages a micro-batch has depends on how the step was cut; its metrics must not."""
    generator = torch.Generator().manual_seed(1)
    tensors = [-torch.rand(30, generator=generator) for _ in range(3)] + [torch.rand(30, generator=generator) < 0.8]
    ages = torch.randint(0, 3, (30,), generator=generator).to(torch.uint8).sort().values
    parts: list[MetricSums] = []
    for cut in (slice(0, 7), slice(7, 30)):
        own = ages[cut]
        part = agreement(*(x[cut] for x in tensors), ages=own if own.any() else None, oldest=int(own.max()))
        parts.append(metric_sums(*part))
    whole = reduce_metrics(metric_sums(*agreement(*tensors, ages=ages, oldest=2)))
    assert not ages[:7].any() and reduce_metrics(add_metrics(parts)) == pytest.approx(whole, rel=1e-5)


def test_ages_are_counted_in_versions_up_to_127():
    """One version off, and the tokens that prove the agreement are the wrong ones; an age of 128 would be the mask's bit."""
    completions = [builders.completion(4, version=[3, 5, 6, 7]), builders.completion(1, version=0)]
    groups = [builders.scored_group([1.0, 0.0], completions=completions)]
    settings = {"normalization": "standard", "ddof": 1, "eps": 0.5}
    first, second = train_samples(groups, policy_version=7, **settings)
    assert (first.ages.tolist(), first.ages.dtype, second.ages.tolist()) == ([4, 2, 1, 0], "uint8", [7])
    assert train_samples(groups, policy_version=1000, **settings)[1].ages.tolist() == [127]
    assert train_samples(groups, **settings)[0].ages is None
