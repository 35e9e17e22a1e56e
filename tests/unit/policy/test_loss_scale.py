"""The loss scale: what it does to numbers, when it moves, and that it goes on where it was."""

from __future__ import annotations

import json

import pytest
import torch

from mgrpo.parallel import backend

backend.install()

from mgrpo.policy.loss_scale import GROWTH_INTERVAL, LossScale  # noqa: E402  after the CPU stand-in


def test_scaling_keeps_small_gradients_and_rounds_nothing():
    """Without it the gradients of most weights are 0 in float16."""
    scale = LossScale()
    factors = torch.tensor([1e-8, 3e-7, 0.125], dtype=torch.float32)
    gradients = {}
    for name, apply in (("scaled", scale.scaled), ("plain", lambda loss: loss)):
        weight = torch.ones(3, dtype=torch.float16, requires_grad=True)
        apply((weight.float() * factors).sum()).backward()
        gradients[name] = weight.grad.float()
    assert gradients["plain"][0] == 0
    torch.testing.assert_close(gradients["scaled"] / scale.value, factors, rtol=2**-11, atol=0)


def test_it_halves_after_each_overflow_and_doubles_after_a_long_time_without():
    """Never falling, it skips every step; never rising, one bad batch costs the small gradients for good."""
    scale = LossScale(value=8.0)
    assert [scale.follow(is_finite=False) for _ in range(4)] == [True, True, True, False]
    assert scale.value == 1.0
    for _ in range(GROWTH_INTERVAL - 1):
        assert not scale.follow(is_finite=True)
    assert scale.value == 1.0
    scale.follow(is_finite=True)
    assert (scale.value, scale.num_finite) == (2.0, 0)
    # An overflow begins the count anew.
    for is_finite in (*[True] * (GROWTH_INTERVAL - 1), False, *[True] * (GROWTH_INTERVAL - 1)):
        scale.follow(is_finite=is_finite)
    assert scale.value == 1.0


@pytest.mark.parametrize("is_finite", [True, False])
def test_it_goes_on_where_it_was_saved(is_finite):
    """A count that begins again at each resume never reaches the next doubling."""
    scale, other = LossScale(value=4.0, num_finite=GROWTH_INTERVAL - 1), LossScale()
    other.restore(json.loads(json.dumps(scale.state())))
    for own in (scale, other):
        own.follow(is_finite=is_finite)
    assert other == scale
    assert scale.value == (8.0 if is_finite else 2.0)
