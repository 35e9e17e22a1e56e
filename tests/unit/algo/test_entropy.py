"""The entropy bonus, its controller, and the tokens of high entropy."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mgrpo.algo import AdaptiveEntropy, entropy_bonus, entropy_threshold, top_entropy_keep

NAN = float("nan")


def test_the_bonus_is_coef_times_the_mean_of_the_trained_tokens():
    """0.5 x (1 + 2 + 3) / 3 = 1; its gradient is 0.5 / 3 for trained tokens and 0 for the others."""
    entropy = torch.tensor([1.0, NAN, 2.0, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    got = entropy_bonus(entropy, mask, coef=0.5, num_trained_tokens=3)
    got.backward()
    assert got.item() == pytest.approx(1.0)
    assert entropy.grad.tolist() == pytest.approx([0.5 / 3, 0.0, 0.5 / 3, 0.5 / 3])


@pytest.mark.parametrize("count", [5, torch.tensor(5)])
def test_parts_of_a_batch_add_up_to_the_bonus_of_the_whole(count):
    """Ranks with longer completions would pull the entropy harder."""
    entropy = torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1])
    whole = entropy_bonus(entropy, mask, coef=0.1, num_trained_tokens=count)
    parts = [entropy_bonus(entropy[a:b], mask[a:b], coef=0.1, num_trained_tokens=count) for a, b in ((0, 3), (3, 8))]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_nothing_trained_is_a_zero_with_a_graph(count):
    """0 / 0 would put NaN into every parameter."""
    entropy = torch.ones(2, requires_grad=True)
    got = entropy_bonus(entropy, torch.zeros(2, dtype=torch.bool), coef=0.1, num_trained_tokens=count)
    got.backward()
    assert got.item() == 0.0 and torch.equal(entropy.grad, torch.zeros(2))


def controller(**changes) -> AdaptiveEntropy:
    return AdaptiveEntropy(**{"coef": 0.01, "target": 0.2, "delta": 0.005, "coef_min": 0.0, "coef_max": 0.02} | changes)


def test_the_controller_follows_the_hand_worked_steps():
    """Entropy would be pushed up where it is high already, and the policy would never become sure of anything."""
    control = controller()
    assert control.applied == 0.0  # nothing measured yet
    steps = [
        # mean entropy, coef after, applied next
        (0.3, 0.005, 0.0),
        (0.1, 0.010, 0.010),
        (0.2, 0.015, 0.015),  # at the target counts as low
        (0.1, 0.020, 0.020),
        (0.1, 0.020, 0.020),  # no higher than coef_max
        (0.5, 0.015, 0.0),
    ]
    for entropy, coef, applied in steps:
        control = control.after(entropy)
        assert control.coef == pytest.approx(coef) and control.applied == pytest.approx(applied)
    for _ in range(9):
        control = control.after(0.9)
    assert control.coef == 0.0  # no lower than coef_min


def test_a_step_that_measured_nothing_changes_nothing():
    """NaN compares as not low: a skipped step would turn the bonus down."""
    control = controller().after(0.1)
    assert control.after(NAN) == control == control.after(math.inf)


def test_the_controller_goes_on_from_a_checkpoint():
    """A resumed run would apply no bonus in its first step, and start from the first weight."""
    control = controller().after(0.1).after(0.15)
    for state in (controller().state(), control.state()):
        assert json.loads(json.dumps(state)) == state
    assert controller(coef=0.7).with_state(control.state()) == control
    assert controller().with_state(controller().state()) == controller()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("tokens", [1, 2, 5, 101])
def test_the_threshold_is_the_quantile(tokens, share):
    """Another share of the tokens would be trained than the one asked for."""
    entropies = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)
    want = torch.quantile(entropies, 1 - share)
    got = entropy_threshold(entropies, top_entropy_quantile=share)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_tokens_kept_follow_the_hand_worked_case():
    """0.4 of five tokens: the quantile at 0.6 of 1, 2, 3, 4, 5 is 3.4, so 4 and 5 stay."""
    entropies = torch.tensor([3.0, 5.0, 1.0, 4.0, 2.0], requires_grad=True)
    threshold = entropy_threshold(entropies, top_entropy_quantile=0.4)
    assert threshold.item() == pytest.approx(3.4)
    keep = top_entropy_keep(entropies, threshold)
    assert keep.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0] and not keep.requires_grad
    assert top_entropy_keep(torch.tensor([NAN]), threshold).tolist() == [0.0]
    everything = entropy_threshold(entropies, top_entropy_quantile=1.0)
    assert top_entropy_keep(entropies, everything).tolist() == [1.0] * 5


def test_no_tokens_have_the_lowest_threshold():
    """A step of empty packs would crash in a quantile of nothing."""
    assert entropy_threshold(torch.zeros(0), top_entropy_quantile=0.2).item() == -math.inf


def test_a_share_that_is_none_is_an_error():
    """0 would train nothing, 20 (meant as a percentage) everything."""
    for share in (0.0, -0.1, 20.0):
        with pytest.raises(ValueError, match=f"top_entropy_quantile={share}"):
            entropy_threshold(torch.ones(3), top_entropy_quantile=share)
