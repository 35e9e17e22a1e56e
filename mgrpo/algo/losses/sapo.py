"""SAPO, arXiv 2511.20347: a sigmoid of the ratio in place of the clip, with the slope of the plain gradient at r = 1.

-A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.surrogate import surrogate_loss
from mgrpo.ops import SurrogateFunction

REMARK = "computed in PyTorch, the extension has no kernel for it"


def loss(inputs: LossInputs) -> PolicyLoss:
    config = inputs.config
    return surrogate_loss(inputs, soft_gate(config.sapo_temperature_pos, config.sapo_temperature_neg))


def soft_gate(temperature_pos: float, temperature_neg: float) -> SurrogateFunction:
    """The surrogate with these temperatures for advantages above 0 and for the others."""

    def surrogate(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        a = advantages
        tau = torch.where(a > 0, a.new_tensor(temperature_pos), a.new_tensor(temperature_neg))
        return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau

    return surrogate
