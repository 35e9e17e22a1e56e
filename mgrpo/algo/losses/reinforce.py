"""REINFORCE, whose surrogate has no ratio: -A l, with l the logprob."""

from __future__ import annotations

from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.surrogate import surrogate_loss

REMARK = ""


def loss(inputs: LossInputs) -> PolicyLoss:
    return surrogate_loss(inputs, "reinforce")
