"""Every legal combination of surrogate, ratio level, aggregation and correction against loops over Python floats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from mgrpo.algo import LossConfig, policy_loss
from mgrpo.algo.loss_metrics import MAXIMA, METRICS
from tests.unit.algo.loss_cases import batch, loop_loss, loss_config, plain, reduced, whole_denominator

SURROGATES = ("ppo_clip", "cispo", "sapo", "vespo", "reinforce")
RATIO_LEVELS = ("token", "sequence", "sequence_token")
AGGREGATIONS = ("token", "constant", "seq_mean", "local_token", "dr_grpo", "luspo")
LEVELS = ("token", "sequence_mean", "sequence_sum")
CORRECTIONS = {
    "off": [{}],
    "clamp": [{"rho_clamp_lower_bound": 0.9, "rho_clamp_upper_bound": 1.1, "rho_level": level} for level in LEVELS],
    "mask": [{"rho_mask_lower_bound": 0.8, "rho_mask_upper_bound": 1.25, "rho_mask_level": level} for level in LEVELS],
    "clamp+mask": [
        {"rho_clamp_upper_bound": 1.1, "rho_mask_upper_bound": 1.15, "rho_level": level, "rho_mask_level": mask_level}
        for level, mask_level in itertools.product(LEVELS, LEVELS)
    ],
    "tv": [
        {"rho_mask_level": "divergence", "rho_mask_upper_bound": 0.2, "rho_clamp_upper_bound": 1.1, "rho_level": level}
        for level in LEVELS
    ],
    "icepop": [
        {"rho_mask_lower_bound": 0.7, "rho_mask_upper_bound": 1.4, "rho_level": x, "rho_mask_level": x} for x in LEVELS
    ],
    "off_policy_mask": [{"off_policy_mask_threshold": -0.05}],
    "clamp+off_policy_mask": [
        {"off_policy_mask_threshold": -0.05, "rho_clamp_upper_bound": 1.1, "rho_level": level} for level in LEVELS
    ],
}
SEED = 279
"""One whose batch meets every branch, see below."""


def combinations(surrogate: str, kind: str) -> Iterator[LossConfig]:
    for ratio_level, aggregation, settings in itertools.product(RATIO_LEVELS, AGGREGATIONS, CORRECTIONS[kind]):
        if surrogate == "vespo" and settings.get("rho_level", "token") != "token":
            continue  # refused, see below
        yield loss_config(
            policy_loss=surrogate,
            ratio_level=ratio_level,
            aggregation=aggregation,
            loss_denominator="50" if aggregation == "constant" else "token",
            clip_lower=0.1,
            clip_higher=0.2,
            sapo_temperature_pos=0.75,
            sapo_temperature_neg=1.25,
            vespo_k_pos=2.3,
            vespo_lambda_neg=1.7,
            beta=0.3,
            use_rho_correction=any(name.startswith("rho") for name in settings),
            **settings,
        )


def derivative(b: dict[str, list], config: LossConfig, token: int, step: float = 1e-6) -> float:
    ends = []
    for sign in (1, -1):
        live = list(b["logprobs"])
        live[token] += sign * step
        ends.append(loop_loss(b, config, live=live)[0])
    return (ends[0] - ends[1]) / (2 * step)


def check(b: dict[str, torch.Tensor], config: LossConfig) -> None:
    """Value, gradient and metrics in float64, then value and gradient of the compiled op in float32."""
    lists = plain(b)
    want, want_metrics = loop_loss(lists, config)
    grads = {}
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in b.items()}
        logprobs = tensors.pop("logprobs").clone().requires_grad_()
        got = policy_loss(logprobs, **tensors, config=config, denominator=whole_denominator(b, config))
        got.loss.backward()
        grads[dtype] = logprobs.grad.double()
        assert got.loss.item() == pytest.approx(want, rel=tolerance, abs=tolerance), config
        metrics = reduced(got.metrics, got.maxima)
        assert metrics == pytest.approx(want_metrics, rel=1e-5, abs=1e-6), config
        assert set(got.metrics) == set(METRICS) and set(got.maxima) == set(MAXIMA)
    scale = grads[torch.float64].abs().max().item()
    torch.testing.assert_close(grads[torch.float32], grads[torch.float64], rtol=1e-5, atol=1e-5 * scale)
    trained = [t for t, is_trained in enumerate(lists["loss_mask"]) if is_trained]
    for token in trained[:: len(trained) // 3]:
        assert grads[torch.float64][token].item() == pytest.approx(
            derivative(lists, config, token), rel=1e-6, abs=1e-8
        ), config


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_every_combination_equals_a_loop_over_tokens(surrogate, kind):
    """One wrong factor in one corner would train another objective than the one named, and log plausible numbers."""
    b = batch(SEED)
    for config in combinations(surrogate, kind):
        check(b, config)


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_every_kl_penalty_equals_a_loop_over_tokens(estimator, bias_correction):
    """The ratio in the penalty has a gradient of its own, of the whole sequence where the ratio is the sequence's."""
    b = batch(SEED)
    for surrogate, ratio_level in itertools.product(("ppo_clip", "cispo"), RATIO_LEVELS):
        check(
            b,
            loss_config(
                policy_loss=surrogate,
                ratio_level=ratio_level,
                beta=0.7,
                kl_estimator=estimator,
                kl_bias_correction=bias_correction,
            ),
        )


@pytest.mark.parametrize("ratio_level", RATIO_LEVELS)
def test_two_sided_cispo_equals_a_loop_over_tokens(ratio_level):
    """The lower bound would be another one, or have a gradient."""
    b = batch(SEED)
    for settings in (setting for kind in ("off", "clamp+mask", "off_policy_mask") for setting in CORRECTIONS[kind][:2]):
        config = loss_config(
            policy_loss="cispo",
            cispo_two_sided=True,
            ratio_level=ratio_level,
            clip_lower=0.1,
            use_rho_correction="rho_clamp_upper_bound" in settings,
            **settings,
        )
        check(b, config)


@pytest.mark.parametrize("ratio_level", RATIO_LEVELS)
def test_both_bounds_of_bad_tokens_equal_a_loop_over_tokens(ratio_level):
    """Without them one token with a huge ratio and a negative advantage decides the step."""
    b = batch(SEED)
    b["old_logprobs"] -= 0.4  # ratios around 1.5
    for delta, dual_clip in ((1.4, None), (None, 1.3), (1.6, 1.3), (1.3, 1.6)):
        config = loss_config(ratio_level=ratio_level, clip_lower=0.1, clip_higher=0.2, delta=delta, dual_clip=dual_clip)
        check(b, config)
        assert loop_loss(plain(b), config)[1]["policy/bounded_frac"] > 0


def test_one_advantage_a_token_equals_a_loop_over_tokens():
    """Turn rewards give the tokens of one completion different advantages, also different in sign."""
    b = batch(SEED)
    b["advantages"] = torch.randn(len(b["logprobs"]), generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    for surrogate, kind in itertools.product(SURROGATES, ("off", "tv", "off_policy_mask")):
        check(b, next(combinations(surrogate, kind)))


def test_the_batch_meets_every_branch():
    """A comparison in which nothing is ever clamped, masked or clipped proves nothing."""
    lists = plain(batch(SEED))
    for kind, variants in CORRECTIONS.items():
        for settings in variants:
            uses_rho = any(name.startswith("rho") for name in settings)
            got = loop_loss(lists, loss_config(use_rho_correction=uses_rho, **settings))[1]
            if kind in ("mask", "icepop"):
                assert got["val/rho_drop_low_frac"] > 0 and got["val/rho_drop_high_frac"] > 0, settings
            if "mask" in kind.split("+") or kind in ("icepop", "tv"):
                assert 0 < got["val/rho_drop_frac"] < 1, settings
            if "clamp" in kind.split("+") or kind == "tv":
                assert 0 < got["val/rho_clipfrac"] < 1, settings
            if "off_policy_mask" in kind:
                assert 0 < got["val/policy_term_drop_frac"] < 1, settings
    for ratio_level in RATIO_LEVELS:
        clipped = loop_loss(lists, loss_config(ratio_level=ratio_level, clip_lower=0.1, clip_higher=0.2))[1]
        assert clipped["clip_ratio/low_mean"] > 0 and clipped["clip_ratio/high_mean"] > 0
    spans = zip(lists["cu_seqlens"], lists["cu_seqlens"][1:], strict=False)
    assert sum(not any(lists["loss_mask"][a:b]) for a, b in spans) == 1  # a sequence without a trained token


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("level", LEVELS)
def test_far_mismatches_are_held_at_the_documented_limits(surrogate, level):
    """One token that the engine got completely wrong would weigh e^30 times as much as any other."""
    b = batch(SEED)
    b["loss_mask"][:] = True
    b["rollout_logprobs"][5] -= 30
    b["rollout_logprobs"][12] += 30
    config = loss_config(
        policy_loss=surrogate,
        use_rho_correction=True,
        rho_level="token" if surrogate == "vespo" else level,
        sapo_temperature_neg=1.25,
    )
    want, want_metrics = loop_loss(plain(b), config)
    got = policy_loss(**b, config=config)
    assert got.loss.item() == pytest.approx(want, rel=1e-12)
    assert reduced(got.metrics, got.maxima) == pytest.approx(want_metrics, rel=1e-5, abs=1e-6)
    if level != "sequence_mean" and surrogate != "vespo":
        assert want_metrics["val/rho_weight"] > math.exp(10) / 22


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_tokens_reach_no_quantity_of_their_sequence(kind, dtype):
    """A tool's token without a logprob would blank the ratio, the mask or the weight of the whole completion."""
    b = batch(SEED, dtype=dtype)
    masked = ~b["loss_mask"]
    b["advantages"] = b["advantages"].repeat_interleave(b["cu_seqlens"].diff())
    b["keep"] = torch.ones_like(b["logprobs"])
    for surrogate, ratio_level in itertools.product(SURROGATES, RATIO_LEVELS):
        config = next(c for c in combinations(surrogate, kind) if c.ratio_level == ratio_level)
        results = []
        for fill in (-1.0, math.nan, math.inf):
            filled = {name: x.masked_fill(masked, fill) if x.is_floating_point() else x for name, x in b.items()}
            filled["logprobs"].requires_grad_()
            got = policy_loss(**filled, config=config, denominator=whole_denominator(b, config))
            got.loss.backward()
            results.append((got.loss.item(), filled["logprobs"].grad, reduced(got.metrics, got.maxima)))
        for loss, grad, metrics in results[1:]:
            assert loss == results[0][0] and metrics == results[0][2], config
            assert torch.equal(grad, results[0][1]) and not grad[masked].any(), config


def test_corrections_that_cannot_be_honoured_are_errors():
    """A mask without its bound would silently drop everything, or nothing."""
    b = batch(SEED)
    with pytest.raises(ValueError, match="rho_mask_level=divergence needs a bound above 0"):
        policy_loss(**b, config=loss_config(use_rho_correction=True, rho_mask_level="divergence"))
    with pytest.raises(ValueError, match="vespo multiplies the rhos of the tokens itself"):
        policy_loss(**b, config=loss_config(policy_loss="vespo", use_rho_correction=True, rho_level="sequence_sum"))
    without = {name: value for name, value in b.items() if name != "rollout_logprobs"}
    for config in (loss_config(use_rho_correction=True), loss_config(off_policy_mask_threshold=0.1)):
        with pytest.raises(ValueError, match="needs rollout_logprobs"):
            policy_loss(**without, config=config)
