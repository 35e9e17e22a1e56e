"""A user's loss: what it is given, what it may return, and what is wrong with it before a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mgrpo.algo import LossConfig, LossInputs, load_loss, loss_problems, loss_remarks, policy_loss
from mgrpo.algo.loss_metrics import METRICS
from mgrpo.algo.losses import NAMED
from mgrpo.config.loss import NAMED_LOSSES
from tests.unit.algo.loss_cases import LENGTHS, batch, loss_config, reduced

AGGREGATIONS = ("token", "constant", "seq_mean", "luspo")


def clipped(inputs: LossInputs) -> Tensor:
    """The formula of ppo_clip."""
    a, config = inputs.advantages, inputs.config
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return inputs.total(-torch.minimum(ratio * a, ratio.clamp(1 - config.clip_lower, 1 + config.clip_higher) * a))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [None, 17.0, "per sequence"])
def test_a_copy_of_ppo_clip_trains_like_ppo_clip(aggregation, denominator):
    """Another mask, order or divisor than the named losses have would be a bug that a user looks for in his formula."""
    b = batch()
    config = loss_config(aggregation=aggregation, loss_denominator="50" if aggregation == "constant" else "token")
    if denominator == "per sequence":
        denominator = torch.arange(1.0, len(LENGTHS) + 1)
    logprobs = b.pop("logprobs").requires_grad_()
    losses, gradients = [], []
    for function in (None, clipped):
        result = policy_loss(logprobs, **b, config=config, denominator=denominator, function=function)
        losses.append(result.loss.item())
        gradients.append(torch.autograd.grad(result.loss, logprobs)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)


def test_it_is_given_what_its_record_says():
    """A user writes his formula from that page; a tensor in another shape or type is an error deep in his code."""
    b = batch(dtype=torch.float32)
    b["old_logprobs"][4] = math.nan
    seen = []

    def function(inputs):
        seen.append(inputs)
        return inputs.total(inputs.logprobs)

    logprobs = b.pop("logprobs").to(torch.bfloat16).requires_grad_()
    config, tokens = loss_config(), sum(LENGTHS)
    b["loss_mask"] = b["loss_mask"].int()
    policy_loss(logprobs, **b, config=config, function=function, keep=torch.ones(tokens), denominator=3.0)
    (inputs,) = seen
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "keep"):
        value = getattr(inputs, name)
        assert value.shape == (tokens,) and value.dtype == torch.float32, name
        assert value.requires_grad == (name == "logprobs"), name
    assert inputs.old_logprobs[4] == inputs.logprobs[4]  # unknown counts as on-policy
    assert inputs.loss_mask.dtype == torch.bool and inputs.cu_seqlens.dtype == torch.int32
    assert inputs.advantages.tolist() == b["advantages"].repeat_interleave(torch.tensor(LENGTHS)).tolist()
    assert inputs.config is config and inputs.denominator == 3.0
    assert inputs.per_token(torch.arange(6)).tolist() == [i for i, n in enumerate(LENGTHS) for _ in range(n)]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_untrained_tokens_add_nothing_to_the_total(poison):
    """Their values are arbitrary; 0 x NaN would end the run."""
    b = batch()
    advantages = b["advantages"].repeat_interleave(torch.tensor(LENGTHS)).masked_fill(~b["loss_mask"], poison)
    logprobs = b.pop("logprobs").requires_grad_()
    result = policy_loss(
        logprobs,
        **b | {"advantages": advantages},
        config=loss_config(),
        function=lambda inputs: (
            inputs.total(inputs.advantages + inputs.logprobs),
            {"a": inputs.measured(inputs.advantages)},
        ),
    )
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert result.loss.isfinite() and result.metrics["custom/loss/a"].isfinite().all()
    assert gradient[~b["loss_mask"]].count_nonzero() == 0


def test_its_metrics_are_sums_with_counts_beside_those_that_do_not_depend_on_it():
    """A mean of means weighs short micro-batches more; a clip fraction of ours would describe a loss that did not run."""
    b = batch()
    values = torch.arange(float(sum(LENGTHS)))

    def function(inputs):
        pairs = {"x": inputs.measured(values), "y": (torch.tensor(6), 4), "none": (0.0, 0)}
        return inputs.total(inputs.logprobs), pairs

    logprobs = b.pop("logprobs").requires_grad_()
    named = policy_loss(logprobs, **b, config=loss_config())
    got = policy_loss(logprobs, **b, config=loss_config(), function=function)
    assert not any(pair.requires_grad for pair in got.metrics.values())
    assert {"custom/loss/x", "custom/loss/y", "custom/loss/none"} == set(got.metrics) - set(METRICS)
    logged, expected = reduced(got.metrics, got.maxima), reduced(named.metrics, named.maxima)
    assert logged.pop("custom/loss/x") == pytest.approx(values[b["loss_mask"]].mean().item())
    assert logged.pop("custom/loss/y") == 1.5
    surrogates = {name for name in expected if name.startswith(("loss/", "policy/clip", "clip_ratio/"))}
    assert logged == {
        name: value
        for name, value in expected.items()
        if name not in {*surrogates, "policy/bounded_frac", "val/policy_term_drop_frac"}
    }


def test_a_metric_may_mix_a_tensor_with_a_number():
    """On a GPU, a sum on the device with a count that is a number would be an error of torch's; meta stands for it."""
    zeros = torch.zeros(4, device="meta")
    got = policy_loss(
        zeros.clone().requires_grad_(),
        zeros,
        zeros,
        zeros.bool(),
        torch.zeros(2, dtype=torch.int32, device="meta"),
        config=loss_config(),
        denominator=1.0,
        function=lambda inputs: (inputs.total(inputs.logprobs), {"x": (inputs.logprobs.sum(), 1.0)}),
    )
    assert got.metrics["custom/loss/x"].device.type == "meta"


def test_a_micro_batch_without_tokens_gives_a_zero_with_a_graph():
    """A rank with a dummy pack has to join the backward pass."""
    logprobs = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    got = policy_loss(
        logprobs,
        empty,
        empty,
        empty.bool(),
        torch.zeros(1, dtype=torch.int32),
        config=loss_config(),
        denominator=1.0,
        function=clipped,
    )
    got.loss.backward()
    assert got.loss.item() == 0.0 and reduced(got.metrics, got.maxima) == {}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda inputs: inputs.logprobs, r"returned a tensor of shape \[22\] with a gradient as its loss"),
        (lambda inputs: inputs.total(inputs.advantages), r"returned a tensor of shape \[\] with no gradient as its"),
        (lambda inputs: 1.0, "returned float as its loss, expected a scalar tensor computed from inputs.logprobs"),
        (lambda inputs: None, "returned NoneType as its loss"),
        (lambda inputs: (inputs.total(inputs.logprobs), {"x": 1.0}), "returned the metric 'x' as float, expected name"),
        (lambda inputs: (inputs.total(inputs.logprobs), {3: (1, 1)}), "returned the metric 3 as tuple, expected name"),
        (lambda inputs: (inputs.total(inputs.logprobs), [1.0]), "returned its metrics as list, expected"),
    ],
)
def test_what_it_returns_by_mistake_is_named(returned, words):
    """Otherwise it is an error of autograd's, far from the user's file, or a run that trains nothing."""
    b = batch()
    b["logprobs"].requires_grad_()
    with pytest.raises(ValueError, match=f"policy_loss: .*<lambda> {words}"):
        policy_loss(**b, config=loss_config(), function=returned)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module of losses, in which Python looks for modules."""
    (tmp_path / "my_losses.py").write_text(
        "RATE = 1\n"
        "class Loss: ...\n"
        "def good(inputs): return inputs.total(inputs.logprobs)\n"
        "def two(inputs, temperature): ...\n"
        "def none(): ...\n"
        "def keyword(*, inputs): ...\n"
        "def more(inputs, temperature=1.0): ...\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    (tmp_path / "raises.py").write_text("raise SystemExit('not like this')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_losses", "broken", "raises"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["good", "more"])
def test_a_function_is_found_by_file_and_by_module(folder, name):
    """Both forms name the same function, and the file runs once."""
    for module in ("my_losses", folder / "my_losses.py"):
        config = LossConfig(policy_loss=f"{module}:{name}")
        function = load_loss(config)
        assert isinstance(function, Callable) and function.__name__ == name
        assert load_loss(config) is function
        assert loss_problems(config) == []
    assert load_loss(LossConfig()) is None and loss_problems(LossConfig()) == []


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("no_such_module:loss", "cannot be imported: there is no module no_such_module; put its folder on PYTHONPATH"),
        ("{folder}/other.py:loss", "there is no file {folder}/other.py"),
        ("broken:loss", "cannot be imported: there is no module no_such_thing"),
        ("raises:loss", "cannot be imported: SystemExit: not like this"),
        ("my_losses:god", "god does not exist; functions there: good"),
        ("my_losses:RATE", "RATE is not a function"),
        ("my_losses:Loss", "Loss is not a function"),
        ("my_losses:two", "cannot be called with one argument: missing a required argument: 'temperature'"),
        ("my_losses:none", "cannot be called with one argument: too many positional arguments"),
        ("my_losses:keyword", "cannot be called with one argument"),
    ],
)
def test_what_is_wrong_with_a_name_is_one_problem(folder, word, words):
    """Found after the engines have started it would cost minutes."""
    word = word.format(folder=folder)
    (problem,) = loss_problems(LossConfig(policy_loss=word))
    assert problem.startswith("policy_loss") and word in problem and words.format(folder=folder) in problem


@pytest.mark.parametrize(("given", "words"), [(3, "loss=3 is not a function"), (lambda: 0, "with one argument")])
def test_what_is_wrong_with_an_object_is_one_problem(given, words):
    """The same for `mgrpo.train(..., loss=...)`."""
    (problem,) = loss_problems(LossConfig(), given)
    assert problem.startswith("policy_loss: loss=") and words in problem


def test_every_named_loss_has_a_file():
    """A name that the configuration accepts but no file computes would fail after the engines have started."""
    assert set(NAMED) == set(NAMED_LOSSES)


def test_a_run_says_which_part_of_its_loss_has_no_kernel():
    """A user who compares two losses' speed has to know."""
    remarks = {name: loss_remarks(LossConfig(policy_loss=name), None) for name in NAMED}
    assert [name for name, found in remarks.items() if found] == ["sapo", "vespo"]
    assert remarks["sapo"] == ["policy_loss sapo: computed in PyTorch, the extension has no kernel for it"]
    assert "clipped" in loss_remarks(LossConfig(), clipped)[0]
