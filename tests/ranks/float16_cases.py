"""What the ranks of `test_float16.py` run: cases in float16 with another loss scale, or with an overflow on one rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.ranks import cases, run_cases
from tests.ranks.update_cases import followed_updates


def learn(initial: float, growth_interval: int, **arguments: Any) -> dict[str, Any]:
    """`run_cases.learn` from another loss scale, which grows sooner."""
    from mgrpo.policy import loss_scale

    with _begins_with(initial), patch.object(loss_scale, "GROWTH_INTERVAL", growth_interval):
        return run_cases.learn(**arguments)


def trained(initial: float, **arguments: Any) -> dict[str, Any]:
    """`cases.train_steps` from another loss scale, all steps at one learning rate, and by how much each update is wrong."""
    from mgrpo.policy import optimizer

    with (
        _begins_with(initial),
        patch.object(optimizer, "learning_rate", lambda *schedule: 1e-2),
        followed_updates() as errors,
    ):
        return cases.train_steps(**arguments) | {"errors": errors}


def trained_with_an_overflow(rank: int, number: int, step: int, **arguments: Any) -> dict[str, Any]:
    """`trained` in float16, where in one step a gradient of one rank alone is infinite.

    Args:
        number: of the rank's parameter, in the order of their names.
    """
    from mgrpo.policy.loss_scale import LossScale

    steps, unscale = iter(range(arguments["steps"])), LossScale.unscale

    def with_an_overflow(scale: LossScale, gradients: list[torch.Tensor]) -> bool:
        if next(steps) == step and dist.get_rank() == rank:
            gradients[number][0] = torch.inf
        return unscale(scale, gradients)

    with patch.object(LossScale, "unscale", with_an_overflow):
        return trained(2.0**16, dtype="float16", **arguments)


def without_unscaling(**arguments: Any) -> dict[str, Any]:
    """Sabotage: gradients in units of the scale."""
    from mgrpo.policy.loss_scale import LossScale

    with patch.object(LossScale, "unscale", lambda scale, gradients: False):
        return cases.gradients(**arguments)


def _begins_with(initial: float) -> Any:
    from mgrpo.policy.loss_scale import LossScale

    make = LossScale.of

    def of(*args: Any) -> LossScale:
        scale = make(*args)
        scale.value = initial
        return scale

    return patch.object(LossScale, "of", of)
