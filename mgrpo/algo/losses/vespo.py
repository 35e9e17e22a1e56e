"""VESPO, arXiv 2602.10693: the logprob l weighted by a gate of the whole sequence's ratio, without gradient.

    -A phi(w) l, phi(w) = w^k exp(lambda (1 - w))

w is the product of the sequence's ratios and rhos; k and lambda go by the sign of A.

This is REINFORCE with the advantage A phi(w). w has rho already, so rho does not multiply the term a second time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.algo.correction import correction
from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.surrogate import surrogate_loss

REMARK = "its weight is computed in PyTorch, the extension has no kernel for it"
_LOG_MIN, _LOG_MAX = math.log(1e-8), 20.0


def loss(inputs: LossInputs) -> PolicyLoss:
    config = inputs.config
    if config.use_rho_correction and config.rho_level != "token":
        raise ValueError(
            f"vespo multiplies the rhos of the tokens itself, got rho_level={config.rho_level!r}; use 'token'"
        )
    factors = correction(inputs, leaves_rho_to_op=False)
    weighted = replace(inputs, advantages=inputs.advantages * _gate(inputs, factors.rho))
    return surrogate_loss(weighted, "reinforce", factors=replace(factors, rho=None))


def _gate(inputs: LossInputs, rho: Tensor | None) -> Tensor:
    """phi of each token's sequence, `[tokens]`. A token that rho's mask drops shrinks w for its whole sequence."""
    config = inputs.config

    def by_sign(positive: float, negative: float) -> Tensor:
        # Tensors of the right type: torch.where would make float32 of two numbers.
        return torch.where(inputs.advantages >= 0, log_w.new_full((), positive), log_w.new_full((), negative))

    log_ratio = (inputs.logprobs.detach() - inputs.old_logprobs).clamp(-_LOG_MAX, _LOG_MAX)
    if rho is not None:
        log_ratio = log_ratio + rho.log().clamp(min=_LOG_MIN)
    log_w = ops.segment_sums(log_ratio, inputs.mask, inputs.cu_seqlens)[0].clamp(_LOG_MIN, _LOG_MAX)
    log_w = inputs.per_token(log_w)
    k = by_sign(config.vespo_k_pos, config.vespo_k_neg)
    decay = by_sign(config.vespo_lambda_pos, config.vespo_lambda_neg)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
