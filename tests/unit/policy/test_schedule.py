"""The learning rate over a run."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from mgrpo.config.schema import Optimizer
from mgrpo.policy.learning_rate import learning_rate


def rates(steps: int, **settings) -> list[float]:
    return [learning_rate(Optimizer(learning_rate=1.0, **settings), step, steps) for step in range(steps)]


def test_linear_warm_up_and_decay():
    """Worked by hand: 2 of 6 steps warm up, then down to 0 just after the last."""
    assert rates(6, warm_up_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_down_in_the_middle():
    """Half a period over the steps after the warm-up."""
    values = rates(8, lr_scheduler_type="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)


def test_constant_stays_after_the_warm_up():
    """And "constant" by itself knows no warm-up, as in transformers."""
    assert rates(5, lr_scheduler_type="constant_with_warmup", warmup_ratio=0.4) == pytest.approx([0.5, 1, 1, 1, 1])
    assert rates(5, lr_scheduler_type="constant", warmup_ratio=0.4) == [1.0] * 5


@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
)
@pytest.mark.parametrize("warm_up", [0, 3])
def test_every_schedule_is_that_of_transformers_after_the_warm_up(kind, warm_up):
    """A recipe's learning rate must be the one its author trained with."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = get_scheduler(kind, optimizer, num_warmup_steps=warm_up, num_training_steps=12)
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = rates(12, lr_scheduler_type=kind, warm_up_steps=warm_up)
    assert ours[warm_up:] == pytest.approx(expected[warm_up:], abs=1e-12)


@pytest.mark.parametrize("warm_up", [0, 3])
def test_a_cosine_with_a_minimum_is_that_of_transformers(warm_up):
    """Recipes give its end as a rate or as a share of the peak."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    arguments = {"scheduler_specific_kwargs": {"min_lr": 0.1}}
    schedule = get_scheduler("cosine_with_min_lr", optimizer, warm_up, 12, **arguments)
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = rates(12, lr_scheduler_type="cosine_with_min_lr", min_lr=0.1, warm_up_steps=warm_up)
    assert ours[warm_up:] == pytest.approx(expected[warm_up:], abs=1e-12)
    assert rates(5, min_lr=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert rates(4, lr_scheduler_type="polynomial", min_lr=0.2)[-1] == pytest.approx(0.4)


def test_ratio_wins_over_steps():
    """Open Instruct's rule."""
    assert rates(10, warmup_ratio=0.2, warm_up_steps=9)[1] == 1.0
