"""Losses worked out by hand: two completions, of two tokens and of one.

    token                 0      1      2
    completion            0      0      1
    advantage             1      1     -1
    ratio to old          2     1/2    3/2
    rho, old to engine    2     1/2    3/2   unless a test says otherwise

The ratios and the rhos of completion 0 multiply to 1, and so do its sequence levels.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mgrpo.algo import LossConfig, denominators, loss_denominator, policy_loss
from tests.unit.algo.loss_cases import loss_config, reduced

LOG2, LOG15 = math.log(2), math.log(1.5)
OLD = [-1.0, -1.0, -2.0]
RATIO = [LOG2, -LOG2, LOG15]
LOGPROBS = [old + ratio for old, ratio in zip(OLD, RATIO, strict=True)]


def evaluate(config: LossConfig, log_rho: list[float] | None = None, advantages: tuple[float, float] = (1.0, -1.0)):
    """Loss, gradient and metrics."""
    double = {"dtype": torch.float64}
    old = torch.tensor(OLD, **double)
    logprobs = torch.tensor(LOGPROBS, **double, requires_grad=True)
    got = policy_loss(
        logprobs,
        old,
        torch.tensor(advantages, **double),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 2, 3], dtype=torch.int32),
        config=config,
        rollout_logprobs=old - torch.tensor(RATIO if log_rho is None else log_rho, **double),
        denominator=loss_denominator(3, config, num_seqs=2, response_length=4.0),
    )
    got.loss.backward()
    return got.loss.item(), logprobs.grad.tolist(), reduced(got.metrics, got.maxima)


# Token losses of ppo_clip with 0.2 on both sides: -min(2, 1.2) = -1.2, -min(0.5, 0.8) = -0.5, -min(-1.5, -1.2) = 1.5;
# their sum is -0.2. Only tokens 1 and 2 have a gradient, -0.5 and 1.5: -A r.
@pytest.mark.parametrize(
    ("settings", "loss", "scale"),
    [
        ({"aggregation": "token"}, -0.2 / 3, (1 / 3, 1 / 3)),
        ({"aggregation": "local_token"}, -0.2 / 3, (1 / 3, 1 / 3)),
        ({"aggregation": "constant", "loss_denominator": "10"}, -0.2 / 10, (0.1, 0.1)),
        ({"aggregation": "seq_mean"}, (-1.7 / 2 + 1.5) / 2, (1 / 4, 1 / 2)),
        ({"aggregation": "dr_grpo"}, -0.2 / (2 * 4), (1 / 8, 1 / 8)),
        ({"aggregation": "luspo"}, -0.2 / 2, (1 / 2, 1 / 2)),
    ],
)
def test_each_aggregation_divides_by_what_it_says(settings, loss, scale):
    """The weight of long completions, and the size of every step, would be another one."""
    got, grad, _ = evaluate(loss_config(**settings))
    assert got == pytest.approx(loss)
    assert grad == pytest.approx([0.0, -0.5 * scale[0], 1.5 * scale[1]])


def test_gspo_takes_one_ratio_a_completion():
    """s0 = sqrt(2 x 1/2) = 1 and s1 = 3/2, clipped at 1.2 for good tokens only: losses -1 and 1.5.

    Every token of a completion has the same gradient, -A s / length, here over 2 completions.
    """
    got, grad, metrics = evaluate(loss_config(ratio_level="sequence", aggregation="seq_mean"))
    assert got == pytest.approx((-1.0 + 1.5) / 2)
    assert grad == pytest.approx([-1 / 4, -1 / 4, 1.5 / 2])
    assert metrics["val/ratio"] == pytest.approx((1 + 1 + 1.5) / 3)


def test_sequence_token_has_the_value_of_gspo_and_the_gradient_of_each_token():
    """With equal advantages GSPO-token is GSPO; its point is that tokens may differ, as under a token's own rho."""
    settings = {"use_rho_correction": True, "clip_lower": 0.9, "clip_higher": 9.0}
    got, grad, _ = evaluate(loss_config(ratio_level="sequence_token", **settings))
    assert got == pytest.approx((-1 * 2 - 1 * 0.5 + 1.5 * 1.5) / 3)  # rho x -A s
    assert grad == pytest.approx([-2 / 3, -0.5 / 3, 2.25 / 3])
    got_sequence, grad, _ = evaluate(loss_config(ratio_level="sequence", **settings))
    assert got_sequence == pytest.approx(got)
    assert grad == pytest.approx([-1.25 / 3, -1.25 / 3, 2.25 / 3])  # both tokens get the mean of their factors


def test_cispo_caps_the_weight_and_never_the_gradient():
    """Weights min(2, 1.2), 0.5 (no lower cap) and min(1.5, 1.2); gradient -A x weight."""
    got, grad, metrics = evaluate(loss_config(policy_loss="cispo"))
    weights = [1.2, 0.5, 1.2]
    losses = [-1.2 * LOGPROBS[0], -0.5 * LOGPROBS[1], 1.2 * LOGPROBS[2]]
    assert got == pytest.approx(sum(losses) / 3)
    assert grad == pytest.approx([-weights[0] / 3, -weights[1] / 3, weights[2] / 3])
    assert metrics["policy/clipfrac_avg"] == pytest.approx(2 / 3)


def test_two_sided_cispo_also_lifts_small_weights():
    """Weights 1.2, max(0.5, 0.9) and 1.2; a weight at its lower bound has a gradient as well."""
    got, grad, metrics = evaluate(loss_config(policy_loss="cispo", cispo_two_sided=True, clip_lower=0.1))
    losses = [-1.2 * LOGPROBS[0], -0.9 * LOGPROBS[1], 1.2 * LOGPROBS[2]]
    assert got == pytest.approx(sum(losses) / 3)
    assert grad == pytest.approx([-1.2 / 3, -0.9 / 3, 1.2 / 3])
    assert (metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) == pytest.approx((1 / 3, 2 / 3))


def test_sapo_is_a_sigmoid_with_the_slope_of_the_plain_gradient():
    """-A 4/tau sigmoid(tau (r - 1)); its derivative in l is -A r 4 sigmoid (1 - sigmoid), which is -A at r = 1."""
    config = loss_config(policy_loss="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=2.0)
    gates = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-1.0))]  # tau (r - 1): 1, -1/2, 1
    got, grad, _ = evaluate(config)
    assert got == pytest.approx((-4 * gates[0] - 4 * gates[1] + 2 * gates[2]) / 3)
    slopes = [4 * g * (1 - g) for g in gates]
    assert grad == pytest.approx([-2 * slopes[0] / 3, -0.5 * slopes[1] / 3, 1.5 * slopes[2] / 3])


def test_vespo_weighs_by_the_product_of_the_ratios():
    """w0 = 2 x 1/2 = 1, so phi = 1; w1 = 3/2 and A < 0: phi = 1.5^3 e^(2 (1 - 1.5)) = 3.375 / e."""
    phi = 3.375 / math.e
    got, grad, _ = evaluate(loss_config(policy_loss="vespo"))
    assert got == pytest.approx((-LOGPROBS[0] - LOGPROBS[1] + phi * LOGPROBS[2]) / 3)
    assert grad == pytest.approx([-1 / 3, -1 / 3, phi / 3])


def test_vespo_takes_rho_into_that_product():
    """Rhos 2, 1/2, 3/2 held at most 1: w0 = 1 x (1 x 1/2), w1 = 3/2 x 1. A masked token closes its whole completion."""
    phi0 = 0.5**2 * math.exp(3 * 0.5)
    phi1 = 3.375 / math.e
    config = loss_config(policy_loss="vespo", use_rho_correction=True, rho_clamp_upper_bound=1.0)
    _, grad, metrics = evaluate(config)
    assert grad == pytest.approx([-phi0 / 3, -phi0 / 3, phi1 / 3])
    assert metrics["val/rho_weight"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert metrics["val/rho_clipfrac"] == pytest.approx(2 / 3)
    _, grad, metrics = evaluate(loss_config(policy_loss="vespo", use_rho_correction=True, rho_mask_upper_bound=1.8))
    # w0 = 1e-8 x 1/2, held at 1e-8: phi = e^3 1e-16. w1 = 3/2 x 3/2.
    assert grad == pytest.approx([0.0, 0.0, 2.25**3 * math.exp(-2 * 1.25) / 3], abs=1e-14)
    assert metrics["val/rho_drop_frac"] == pytest.approx(1 / 3)


REINFORCE = {"policy_loss": "reinforce", "use_rho_correction": True}


# The gradient of reinforce is -A rho / 3, so it shows the weights.
@pytest.mark.parametrize(
    ("settings", "log_rho", "weights"),
    [
        ({}, None, [2, 0.5, 1.5]),
        ({"rho_clamp_upper_bound": 1.8}, None, [1.8, 0.5, 1.5]),  # truncated importance sampling
        ({"rho_clamp_lower_bound": 0.8, "rho_clamp_upper_bound": 1.2}, None, [1.2, 0.8, 1.2]),
        ({"rho_mask_lower_bound": 0.8, "rho_mask_upper_bound": 1.8}, None, [0, 0, 1.5]),  # IcePop
        ({"rho_clamp_upper_bound": 1.2, "rho_mask_upper_bound": 1.8}, None, [0, 0.5, 1.2]),
        ({"rho_level": "sequence_mean"}, None, [1, 1, 1.5]),
        ({"rho_level": "sequence_mean"}, [LOG2, LOG2, 0], [2, 2, 1]),
        ({"rho_level": "sequence_sum"}, [LOG2, LOG2, 0], [4, 4, 1]),
        # TRL's sequence_mask: the mean, 2, would pass; the product, 4, does not.
        (
            {"rho_level": "sequence_sum", "rho_mask_level": "sequence_sum", "rho_mask_upper_bound": 3.0},
            [LOG2, LOG2, 0],
            [0, 0, 1],
        ),
        # Each token's own weight, dropped by completion.
        ({"rho_mask_level": "sequence_mean", "rho_mask_upper_bound": 1.2}, None, [2, 0.5, 0]),
        # Total variation: means of |rho - 1| are (1 + 1/2) / 2 = 0.75 and 0.5. In completion 0 only token 0 would raise it.
        ({"rho_mask_level": "divergence", "rho_mask_upper_bound": 0.6}, None, [0, 0.5, 1.5]),
        # In completion 1 the step lowers the probability of a token whose rho is above 1: that lowers the distance.
        ({"rho_mask_level": "divergence", "rho_mask_upper_bound": 0.4}, None, [0, 0.5, 1.5]),
        ({"rho_mask_level": "divergence", "rho_mask_upper_bound": 0.4}, [LOG2, -LOG2, -LOG2], [0, 0.5, 0]),
    ],
)
def test_rho_weighs_and_masks_by_level(settings, log_rho, weights):
    """The mismatch of one document would be cured with the ratio of another, or not at all."""
    _, grad, metrics = evaluate(loss_config(**REINFORCE, **settings), log_rho)
    assert grad == pytest.approx([-weights[0] / 3, -weights[1] / 3, weights[2] / 3])
    assert metrics["val/rho_weight"] == pytest.approx(sum(weights) / 3)
    assert metrics["val/rho_drop_frac"] == pytest.approx(weights.count(0) / 3)


def test_the_off_policy_mask_drops_bad_completions_that_drifted():
    """Means of engine's - present logprob: completion 0: -log(rho) - log(ratio) summed is 0; completion 1: -2 log 1.5."""
    drift = -2 * LOG15
    for threshold, kept in ((drift - 0.01, 0.0), (drift + 0.01, 1.0)):
        config = loss_config(policy_loss="reinforce", off_policy_mask_threshold=threshold)
        _, grad, metrics = evaluate(config)
        assert grad == pytest.approx([-1 / 3, -1 / 3, kept / 3])
        assert metrics["val/policy_term_drop_frac"] == pytest.approx((1 - kept) / 3)
    # A completion with advantage 0 or above stays, however far it drifted.
    config = loss_config(policy_loss="reinforce", off_policy_mask_threshold=-9.0)
    _, grad, metrics = evaluate(config, advantages=(0.0, 0.5))
    assert grad == pytest.approx([0.0, 0.0, -0.5 / 3])
    assert metrics["val/policy_term_drop_frac"] == 0.0


# advantage, ratio, delta, dual clip -> loss, slope in the logprob; both clips at 0.2
@pytest.mark.parametrize(
    ("advantage", "ratio", "delta", "dual_clip", "loss", "slope"),
    [
        (-1.0, 3.0, None, None, 3.0, 3.0),
        (-1.0, 3.0, 2.0, None, 2.0, 0.0),  # delta holds the ratio
        (-1.0, 1.5, 2.0, None, 1.5, 1.5),
        (1.0, 3.0, 2.0, None, -1.2, 0.0),  # good tokens are clipped before delta
        (-1.0, 3.0, None, 2.5, 2.5, 0.0),  # dual clip holds the loss
        (-2.0, 3.0, None, 2.5, 5.0, 0.0),
        (-1.0, 2.0, None, 2.5, 2.0, 2.0),
        (1.0, 3.0, None, 2.5, -1.2, 0.0),
    ],
)
def test_delta_and_dual_clip_bound_bad_tokens_only(advantage, ratio, delta, dual_clip, loss, slope):
    """The bound on the wrong side would stop good tokens from being learned."""
    old = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    got = policy_loss(
        logprobs,
        old,
        torch.tensor([advantage]),
        torch.tensor([True]),
        torch.tensor([0, 1]),
        config=loss_config(delta=delta, dual_clip=dual_clip),
    )
    got.loss.backward()
    assert got.loss.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)


def test_keep_drops_the_policy_term_and_never_the_penalty():
    """Tokens left out by their entropy still have to stay near the reference."""
    old = torch.tensor(OLD, dtype=torch.float64)
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    got = policy_loss(
        logprobs,
        old,
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 2, 3]),
        config=loss_config(policy_loss="reinforce", beta=0.5, kl_estimator=1),
        ref_logprobs=torch.tensor(LOGPROBS, dtype=torch.float64) - 0.2,
        keep=torch.tensor([1.0, 0.0, 0.5]),
    )
    got.loss.backward()
    # beta d = 0.1 each, over 3 tokens; policy -A keep.
    assert logprobs.grad.tolist() == pytest.approx([-0.9 / 3, 0.1 / 3, 0.6 / 3])
    assert reduced(got.metrics)["val/policy_term_drop_frac"] == pytest.approx(1 / 3)


def test_a_missing_rollout_logprob_weighs_one():
    """A placeholder in its place would give the token an arbitrary weight, and its sequence an arbitrary product."""
    nan = float("nan")
    for missing in (nan, math.inf, -math.inf):
        _, grad, metrics = evaluate(loss_config(**REINFORCE), [LOG2, missing, LOG15])
        assert grad == pytest.approx([-2 / 3, -1 / 3, 1.5 / 3])
        assert metrics["val/rho_weight"] == pytest.approx(4.5 / 3)
        _, grad, _ = evaluate(loss_config(**REINFORCE, rho_level="sequence_sum"), [LOG2, missing, LOG15])
        assert grad == pytest.approx([-2 / 3, -2 / 3, 1.5 / 3])


def test_local_denominators_by_hand():
    """Samples 0 and 2 with 1 + 5 tokens are the first micro-batch, sample 4 with 3 the second: twice their counts."""
    config = loss_config(aggregation="local_token", local_batch_size=2)
    samples, trained, none = np.array([4, 0, 2], np.int32), np.array([3, 1, 5], np.int32), np.zeros(0, np.int32)
    found = denominators(samples, samples, trained, config=config, response_length=9)
    assert found.tolist() == [12, 1, 12, 1, 6] and found.dtype == np.float32
    assert denominators(none, none, none, config=config, response_length=9).tolist() == []
