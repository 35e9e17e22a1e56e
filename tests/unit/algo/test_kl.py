"""KL estimators: values by formula, gradients by exact expectation over a small distribution."""

import math

import pytest
import torch

from mgrpo.algo import kl_penalty, policy_loss
from tests.unit.algo.loss_cases import loss_config


def categorical() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, reference


def gradient_of(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
def test_expected_on_policy_gradient_is_the_documented_divergence(estimator):
    """The penalty would pull towards something else than the reference, or not at all, while its value looks right."""
    logits, reference = categorical()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach()
    # Each outcome is one token, weighed by its probability: the expectation over samples of the policy, exactly.
    expected = (old.exp() * kl_penalty(logprobs, reference, old, estimator=estimator)).sum()
    got = gradient_of(expected, logits)
    policy_to_reference = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - reference)).sum()
    reference_to_policy = (reference.exp() * (reference - logits.log_softmax(0))).sum()
    want = {
        0: torch.zeros(7, dtype=torch.float64),
        1: gradient_of(policy_to_reference, logits),
        2: gradient_of(reference_to_policy, logits),
        3: gradient_of(policy_to_reference, logits),
    }[estimator]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
def test_bias_correction_has_the_gradient_of_the_policys_own_divergence(estimator):
    """The ratio's gradient is what the plain estimators miss: how the sampling itself depends on the parameters.

    Through `policy_loss`, where the ratio multiplies the estimate; also off-policy, sampled from another distribution.
    """
    logits, reference = categorical()
    behaviour = torch.randn(7, generator=torch.Generator().manual_seed(9), dtype=torch.float64).log_softmax(0)
    for old in (logits.log_softmax(0).detach(), behaviour):
        logprobs = logits.log_softmax(0)
        config = loss_config(beta=1.0, kl_estimator=estimator, kl_bias_correction=True)
        # Each outcome a sequence of one token; its probability as the inverse of its denominator.
        loss = policy_loss(
            logprobs,
            old,
            torch.zeros(7),
            torch.ones(7),
            torch.arange(8),
            config=config,
            ref_logprobs=reference,
            denominator=1 / old.exp(),
        ).loss
        p, d = logits.log_softmax(0).exp(), logits.log_softmax(0) - reference
        # Gradients of E[d], E[d^2 / 2], E[k3] = E[d] and, with its own ratio squared, E_old[r^2 d], under the policy.
        truth = {
            0: (p * d).sum(),
            1: (p * d.square() / 2).sum(),
            2: (p * d).sum(),
            3: (p * (p / old.exp()) * d).sum(),
        }[estimator]
        torch.testing.assert_close(gradient_of(loss, logits), gradient_of(truth, logits), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("estimator", [0, 2, 3])
def test_expected_value_is_the_divergence_of_the_policy_from_the_reference(estimator):
    """objective/kl would report a number that is not a KL divergence."""
    logits, reference = categorical()
    logprobs = logits.detach().log_softmax(0)
    value = (logprobs.exp() * kl_penalty(logprobs, reference, logprobs, estimator=estimator)).sum()
    torch.testing.assert_close(value, (logprobs.exp() * (logprobs - reference)).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("estimator", "want"),
    [(0, 0.5), (1, 0.125), (2, math.exp(-0.5) - 1 + 0.5), (3, math.exp(0.25) * 0.5)],
)
def test_values_follow_the_formulas(estimator, want):
    """Off-policy, a ratio in the wrong direction would go unnoticed by the on-policy checks above."""
    got = kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([-1.25]), estimator=estimator)
    torch.testing.assert_close(got, torch.tensor([want]))


@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
@pytest.mark.parametrize("d", [1000.0, -1000.0])
def test_far_differences_stay_finite_and_stop_pulling(estimator, d):
    """One token the reference finds impossible would make the whole step infinite and lose it."""
    logprobs = torch.tensor([-1000.0 if d < 0 else 0.0], requires_grad=True)
    value = kl_penalty(logprobs, logprobs.detach() - d, logprobs.detach(), estimator=estimator)
    value.sum().backward()
    assert value.isfinite().all() and logprobs.grad.isfinite().all()
    if estimator < 3:  # estimator 3 still has the gradient of its ratio, clamped d times that of logprobs
        assert logprobs.grad.item() == 0.0


def test_bf16_is_computed_in_fp32():
    """A bf16 difference near -8 moves in steps of 0.03: the penalty would be rounding noise."""
    logprobs, reference = torch.tensor([-8.0], dtype=torch.bfloat16), torch.tensor([-8.0625], dtype=torch.bfloat16)
    got = kl_penalty(logprobs, reference, logprobs)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([math.expm1(-0.0625) + 0.0625]), rtol=1e-5, atol=0)


def test_an_unknown_estimator_is_an_error():
    """The run would train with another penalty than the one asked for."""
    with pytest.raises(ValueError, match="kl_estimator=4"):
        kl_penalty(torch.zeros(1), torch.zeros(1), torch.zeros(1), estimator=4)
