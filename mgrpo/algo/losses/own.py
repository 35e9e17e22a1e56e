"""A user's own loss: found by its name, checked before a run, and called in place of a named one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mgrpo.algo.loss_inputs import LossFunction, LossInputs, PolicyLoss
from mgrpo.algo.loss_metrics import OF_THE_SURROGATE
from mgrpo.algo.losses import NAMED
from mgrpo.algo.surrogate import surrogate_loss
from mgrpo.config.loss import LossConfig
from mgrpo.config.user_functions import check_one_argument, short_name, user_function

PREFIX = "custom/loss/"
"""Prefix of the names of its metrics."""
_SIGNATURE = "it is called as function(inputs), see mgrpo.algo.LossFunction"


def load_loss(config: LossConfig) -> LossFunction | None:
    """The function that `policy_loss` names; None where it names a built-in loss.

    Raises:
        ValueError: the function cannot be imported or called, in one sentence about `policy_loss`.
    """
    if not config.is_own_function:
        return None
    module, _, name = config.policy_loss.rpartition(":")
    function = user_function("policy_loss", config.policy_loss, module, name)
    check_one_argument(function, f"policy_loss={config.policy_loss}", _SIGNATURE)
    return function


def loss_problems(config: LossConfig, function: object = None) -> list[str]:
    """Problems with the user's loss, `function` or the one that `policy_loss` names; none without such a loss."""
    try:
        if function is None:
            load_loss(config)
        else:
            check_one_argument(function, f"policy_loss: loss={short_name(function)}", _SIGNATURE)
    except ValueError as err:
        return [str(err)]
    return []


def loss_remarks(config: LossConfig, function: LossFunction | None) -> list[str]:
    """Remarks for the user on the computation of the loss."""
    if function is not None:
        return [
            f"policy_loss {short_name(function)}: your own function, computed in PyTorch; its metrics are {PREFIX}*"
        ]
    remark = NAMED[config.policy_loss].REMARK
    return [f"policy_loss {config.policy_loss}: {remark}"] if remark else []


def own_loss(function: LossFunction, inputs: LossInputs) -> PolicyLoss:
    """Loss and metrics of the function, and the metrics that do not depend on it."""
    returned: Any = function(inputs)
    loss, own = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise ValueError(
            f"policy_loss: {short_name(function)} returned {_described(loss)} as its loss, expected a scalar tensor "
            "computed from inputs.logprobs: inputs.total(token_losses)"
        )
    if not isinstance(own, Mapping):
        raise ValueError(
            f"policy_loss: {short_name(function)} returned its metrics as {_described(own)}, expected a mapping of names to "
            "(sum, count)"
        )
    custom = {f"{PREFIX}{name}": _pair(function, name, pair, loss.device) for name, pair in own.items()}
    measured = _measured(inputs)
    return replace(measured, loss=loss, metrics=measured.metrics | custom)


@torch.no_grad()
def _measured(inputs: LossInputs) -> PolicyLoss:
    """The metrics of ratio, reference and engine, which are the same under any surrogate."""
    neutral = replace(inputs, config=LossConfig(beta=0.0), keep=None, denominator=1.0)
    found = surrogate_loss(neutral, "reinforce")
    metrics = {name: pair for name, pair in found.metrics.items() if name not in OF_THE_SURROGATE}
    return replace(found, metrics=metrics)


def _pair(function: Callable, name: object, pair: object, device: torch.device) -> Tensor:
    """A metric as `[2]` fp32; its sum and count may be numbers, or on different devices."""
    if not isinstance(name, str) or not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"policy_loss: {short_name(function)} returned the metric {name!r} as {_described(pair)}, expected name -> "
            "(sum, count): inputs.measured(values)"
        )
    return torch.stack([torch.as_tensor(x, dtype=torch.float32, device=device).detach().reshape(()) for x in pair])


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        graph = "a gradient" if value.requires_grad else "no gradient"
        return f"a tensor of shape {list(value.shape)} with {graph}"
    return type(value).__name__
