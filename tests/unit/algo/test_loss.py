"""The policy loss: what holds for every setting. Its combinations are in test_loss_axes.py."""

import math

import pytest
import torch

from mgrpo.algo import loss_denominator, policy_loss
from mgrpo.algo.loss_metrics import MAXIMA, METRICS, MetricSums, add_metrics, metric_sums
from tests.unit.algo.loss_cases import LENGTHS, batch, loop_loss, loss_config, plain, reduced

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_metrics_equal_a_loop_over_tokens(estimator, per_token):
    """A mix-up of sequences in a pack would train each completion with its neighbour's advantage."""
    b = batch()
    config = loss_config(clip_lower=0.1, clip_higher=0.25, beta=0.3, kl_estimator=estimator)
    want, want_metrics = loop_loss(plain(b), config, denominator=17.0)
    if per_token:
        b["advantages"] = b["advantages"].repeat_interleave(torch.tensor(LENGTHS))
    got = policy_loss(**b, config=config, denominator=17.0)
    assert got.loss.item() == pytest.approx(want, rel=1e-12)
    metrics = reduced(got.metrics, got.maxima)
    assert metrics == pytest.approx(want_metrics, rel=1e-5, abs=1e-7)


def test_gradient_is_the_derivative_of_the_loss():
    """A detached factor would leave the value right and the training wrong."""
    b = batch()
    config = loss_config(beta=0.3)
    logprobs = b.pop("logprobs").requires_grad_()
    torch.autograd.gradcheck(lambda x: policy_loss(x, **b, config=config).loss, logprobs)


# advantage, ratio -> loss and whether there is a gradient, for clip_lower 0.2 and clip_higher 0.5
HAND_WORKED = [
    (2.0, 1.0, -2.0, True),
    (2.0, 1.4, -2.8, True),
    (2.0, 1.6, -3.0, False),  # good token, already much likelier: stop
    (2.0, 0.5, -1.0, True),  # good token, became unlikelier: pull back at full strength
    (-2.0, 1.0, 2.0, True),
    (-2.0, 0.9, 1.8, True),
    (-2.0, 0.5, 1.6, False),  # bad token, already much unlikelier: stop
    (-2.0, 1.6, 3.2, True),  # bad token, became likelier: push down at full strength
    (0.0, 1.6, 0.0, False),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "has_gradient"), HAND_WORKED)
def test_clipping_follows_the_hand_worked_cases(advantage, ratio, loss, has_gradient):
    """Clipping on the wrong side would stop the corrections and let the overshoot run."""
    old = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    got = policy_loss(
        logprobs,
        old,
        torch.tensor([advantage]),
        torch.tensor([True]),
        torch.tensor([0, 1], dtype=torch.int32),
        config=loss_config(clip_lower=0.2, clip_higher=0.5),
    )
    got.loss.backward()
    assert got.loss.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(-advantage * ratio if has_gradient else 0.0)
    clipped = reduced(got.metrics)["policy/clipfrac_avg"]
    assert clipped == (1.0 if advantage != 0.0 and not has_gradient else 0.0)


def test_on_policy_gradient_is_the_plain_policy_gradient():
    """On the first pass the ratio is 1 and its gradient must still be that of the logprob."""
    b = batch()
    logprobs = b["logprobs"].requires_grad_()
    # Passing the live tensor as its own past must not cancel the gradient.
    policy_loss(**{**b, "old_logprobs": logprobs}, config=loss_config(), denominator=1.0).loss.backward()
    want = -b["advantages"].repeat_interleave(torch.tensor(LENGTHS)) * b["loss_mask"]
    torch.testing.assert_close(logprobs.grad, want)


@pytest.mark.parametrize("cuts", [[6], [1, 6], [1, 2, 3, 4, 5, 6], [0, 3, 3, 6]])
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches(cuts):
    """The effective learning rate would depend on how the samples happened to be packed."""
    b = batch()
    config = loss_config(clip_lower=0.1, clip_higher=0.25, beta=0.3)
    denominator = loss_denominator(int(b["loss_mask"].sum()), config)
    logprobs = b.pop("logprobs").requires_grad_()
    whole = policy_loss(logprobs, **b, config=config)  # its own denominator: the same tokens
    want = torch.autograd.grad(whole.loss, logprobs)[0]

    total, sums = 0.0, {name: torch.zeros(2) for name in METRICS}
    maxima = {name: torch.tensor(-INF) for name in MAXIMA}
    ends = b["cu_seqlens"].tolist()
    for first, last in zip([0, *cuts[:-1]], cuts, strict=True):
        rows = slice(ends[first], ends[last])
        part = policy_loss(
            logprobs[rows],
            **{name: b[name][rows] for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "loss_mask")},
            advantages=b["advantages"][first:last],
            cu_seqlens=b["cu_seqlens"][first : last + 1] - ends[first],
            config=config,
            denominator=denominator,
        )
        part.loss.backward()
        total += part.loss.item()
        sums = {name: sums[name] + part.metrics[name] for name in sums}
        maxima = {name: torch.maximum(maxima[name], part.maxima[name]) for name in maxima}
    assert total == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(logprobs.grad, want, rtol=1e-12, atol=0)
    assert reduced(sums, maxima) == pytest.approx(reduced(whole.metrics, whole.maxima), rel=1e-5)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
def test_masked_tokens_add_exactly_nothing_whatever_they_hold(poison, estimator):
    """A NaN under the mask (no score, a tool's token) would destroy the step: 0 x NaN is NaN, also in a gradient."""
    b = batch()
    config = loss_config(beta=0.3, kl_estimator=estimator)
    b["advantages"] = b["advantages"].repeat_interleave(torch.tensor(LENGTHS))
    results = []
    for fill in (-1.0, poison):
        filled = {
            name: value.masked_fill(~b["loss_mask"], fill) if value.is_floating_point() else value
            for name, value in b.items()
        }
        logprobs = filled["logprobs"].requires_grad_()
        result = policy_loss(**filled, config=config)
        result.loss.backward()
        results.append((result.loss.item(), logprobs.grad, reduced(result.metrics, result.maxima)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[1][1][~b["loss_mask"]], torch.zeros(int((~b["loss_mask"]).sum()), dtype=torch.float64))
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_nothing_to_train_is_a_zero_with_a_graph(num_tokens):
    """A rank with a dummy pack would not reach the collectives of the backward pass, and all others would wait."""
    logprobs = torch.zeros(num_tokens, requires_grad=True)
    config = loss_config(beta=0.1)
    got = policy_loss(
        logprobs,
        logprobs,
        torch.zeros(1 if num_tokens else 0),
        torch.zeros(num_tokens, dtype=torch.bool),
        torch.tensor([0, num_tokens] if num_tokens else [0], dtype=torch.int32),
        config=config,
        ref_logprobs=logprobs,
        rollout_logprobs=logprobs.detach(),
    )
    assert got.loss.item() == 0.0
    got.loss.backward()
    assert torch.equal(logprobs.grad, torch.zeros(num_tokens))
    assert tuple(got.metrics) == METRICS and tuple(got.maxima) == MAXIMA
    assert reduced(got.metrics, got.maxima) == {}


def test_a_missing_rollout_logprob_is_left_out_of_the_comparison():
    """One NaN of the engine would blank the metric that shows trainer and engine drifting apart."""
    b = batch()
    b["loss_mask"][:] = True
    b["rollout_logprobs"] = b["old_logprobs"] + 0.5
    b["rollout_logprobs"][2] = NAN
    got = policy_loss(**b, config=loss_config())
    assert got.metrics["debug/vllm_vs_local_logprob_diff_mean"].tolist() == pytest.approx([0.5 * 21, 21.0])
    assert got.maxima["debug/vllm_vs_local_logprob_diff_max"].item() == pytest.approx(0.5)


def test_a_missing_old_logprob_counts_as_on_policy():
    """A placeholder value for it would give that token an arbitrary ratio."""
    b = batch()
    b["loss_mask"][:] = True
    b["old_logprobs"] = b["logprobs"].clone()
    b["old_logprobs"][4] = NAN
    got = policy_loss(**b, config=loss_config())
    assert got.loss.isfinite()
    assert reduced(got.metrics)["val/ratio"] == 1.0


def test_a_ratio_that_explodes_stays_finite():
    """exp overflows fp32 at a difference of 88; with advantage 0 the product would be NaN."""
    for advantage in (1.0, 0.0, -1.0):
        logprobs = torch.tensor([-0.1], requires_grad=True)
        old = torch.tensor([-200.0])
        got = policy_loss(
            logprobs, old, torch.tensor([advantage]), torch.tensor([True]), torch.tensor([0, 1]), config=loss_config()
        )
        got.loss.backward()
        assert got.loss.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("tokens", [1, 7])
def test_values_that_are_all_alike_have_no_spread_however_large(tokens):
    """The spread of one token is none; as the difference of two squares in fp32 it would be thousands."""
    old = torch.linspace(-20.0, -19.0, tokens)
    got = policy_loss(
        old + 11.2,
        old,
        torch.ones(tokens),
        torch.ones(tokens),
        torch.tensor([0, tokens]),
        config=loss_config(),
        rollout_logprobs=old - 1.13,
    )
    metrics = reduced(got.metrics, got.maxima)
    assert (metrics["val/ratio_var"], metrics["debug/vllm_vs_local_logprob_diff_std"]) == (0.0, 0.0)
    assert metrics["val/ratio"] == pytest.approx(math.exp(11.2), rel=1e-5)


def test_reference_metrics_appear_only_with_a_reference():
    """A KL of 0.0 in the log would be read as a policy that has not moved."""
    b = batch()
    without = {name: value for name, value in b.items() if name != "ref_logprobs"}
    assert not any(
        name.startswith("objective/kl") for name in reduced(policy_loss(**without, config=loss_config()).metrics)
    )
    assert "objective/kl2_avg" in reduced(policy_loss(**b, config=loss_config()).metrics)


def test_metrics_add_up_by_name_whatever_their_order():
    """A rank with a metric more, or in another order, would report its neighbour's number under its own name."""
    b = batch()
    config = loss_config(beta=0.3)
    got = policy_loss(**b, config=config)
    assert tuple(got.metrics) == METRICS
    assert not any(pair.requires_grad for pair in got.metrics.values())
    own = metric_sums(got.metrics, got.maxima)
    assert own.sums == {name: pair.tolist() for name, pair in got.metrics.items()}
    other = MetricSums({"custom/loss/x": [6.0, 4.0], "val/ratio": [1.0, 1.0]}, {MAXIMA[0]: math.inf})
    total = add_metrics([MetricSums({}, {}), other, own])
    assert total.sums["custom/loss/x"] == [6.0, 4.0] and total.maxima[MAXIMA[0]] == math.inf
    assert total.sums["val/ratio"] == [a + b for a, b in zip(own.sums["val/ratio"], [1.0, 1.0], strict=True)]
    assert {name: pair for name, pair in total.sums.items() if name not in other.sums} == {
        name: pair for name, pair in own.sums.items() if name != "val/ratio"
    }


def test_callers_may_add_metrics_of_their_own():
    """The trainer's entropy travels in the same reduction."""
    assert reduced({"policy/entropy_avg": torch.tensor([6.0, 4.0])}) == {"policy/entropy_avg": 1.5}


def test_constant_denominator_does_not_depend_on_the_number_of_tokens():
    """Dr. GRPO would turn back into a mean over tokens."""
    b = batch()
    config = loss_config(aggregation="constant", loss_denominator="100")
    summed = policy_loss(**b, config=loss_config(), denominator=1.0).loss
    torch.testing.assert_close(policy_loss(**b, config=config).loss, summed / 100.0)
    assert loss_denominator(3, config) == 100.0
    assert loss_denominator(3, loss_config()) == 3.0
    assert loss_denominator(0, loss_config()) == 1.0
    assert loss_denominator(torch.tensor(0), loss_config()).item() == 1


def test_bf16_logprobs_are_computed_in_fp32():
    """The sum of a few thousand bf16 values stops growing at 256."""
    tokens = 4096
    ones = torch.ones(tokens)
    got = policy_loss(
        torch.full((tokens,), -1.0, dtype=torch.bfloat16),
        torch.full((tokens,), -1.0, dtype=torch.bfloat16),
        ones,
        ones.bool(),
        torch.tensor([0, tokens]),
        config=loss_config(),
        denominator=1.0,
    )
    assert got.loss.item() == -tokens


def test_settings_that_cannot_be_honoured_are_errors():
    """A penalty that was asked for would silently be missing."""
    b = batch()
    del b["ref_logprobs"]
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        policy_loss(**b, config=loss_config(beta=0.1))
    with pytest.raises(ValueError, match="policy_loss='dpo' is unknown; choose one of ppo_clip, cispo"):
        policy_loss(**b, config=loss_config(policy_loss="dpo"))
    with pytest.raises(ValueError, match="loss_denominator=token"):
        policy_loss(**b, config=loss_config(aggregation="constant"))


def test_one_value_that_is_not_finite_leaves_the_other_metrics_readable():
    """The step that went wrong would be the one step without a single number in its log."""
    b = batch()
    b["loss_mask"][:] = True
    b["logprobs"][3] = NAN
    b["old_logprobs"][3] = -2.0
    got = policy_loss(**b, config=loss_config())
    metrics = reduced(got.metrics, got.maxima)
    assert not got.loss.isfinite()
    assert math.isnan(metrics["loss/policy_avg"])
    assert math.isfinite(metrics["debug/vllm_vs_local_logprob_diff_mean"])
    assert metrics["policy/bounded_frac"] == 0.0
