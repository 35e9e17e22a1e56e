"""The common part of all named losses: the surrogate's operands, correction, KL penalty, weights of tokens, and metrics.

The per-token arithmetic is in `mgrpo.ops.policy_loss`; here a `LossConfig` becomes its settings and operands.
"""

from __future__ import annotations

import math

from torch import Tensor

from mgrpo import ops
from mgrpo.algo.correction import Correction, correction
from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.algo.loss_metrics import KL, RHO, summarise


def surrogate_loss(
    inputs: LossInputs,
    surrogate: str | ops.SurrogateFunction,
    *,
    ratio_low: float = 0.0,
    ratio_high: float = math.inf,
    delta: float | None = None,
    dual_clip: float | None = None,
    factors: Correction | None = None,
) -> PolicyLoss:
    """The surrogate times rho and `keep`, plus the KL penalty, summed with the weights of `aggregation`.

    Args:
        surrogate: one of `mgrpo.ops.settings.SURROGATES`, or a function in PyTorch.
        ratio_low, ratio_high: bounds of the ratio; ratio_low 0 is off.
        delta, dual_clip: as in `LossConfig`.
        factors: the corrections, where the caller has them; None: those that the settings select.
    """
    config, mask = inputs.config, inputs.mask
    if config.beta != 0.0 and inputs.ref_logprobs is None:
        raise ValueError(f"beta={config.beta} needs ref_logprobs; load the reference model or set beta=0")
    factors = factors or correction(inputs)
    keep = product(inputs.keep, factors.keep)
    seq_log_ratio = None
    if config.ratio_level != "token":
        seq_log_ratio = ops.segment_mean(inputs.logprobs - inputs.old_logprobs, mask, inputs.cu_seqlens)
    loss, sums = ops.policy_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.weights(),
        inputs.cu_seqlens,
        settings=ops.LossSettings(
            surrogate=surrogate,
            ratio_level=config.ratio_level,
            ratio_low=ratio_low,
            ratio_high=ratio_high,
            delta=delta or 0.0,
            dual_clip=dual_clip or 0.0,
            beta=config.beta,
            kl_estimator=config.kl_estimator,
            kl_bias_correction=config.kl_bias_correction,
            use_rho=factors.rho_is_left_to_op,
            rho_clamp_low=config.rho_clamp_lower_bound,
            rho_clamp_high=config.rho_clamp_upper_bound,
            rho_mask_low=config.rho_mask_lower_bound,
            rho_mask_high=config.rho_mask_upper_bound,
        ),
        ref_logprobs=inputs.ref_logprobs,
        rollout_logprobs=inputs.rollout_logprobs,
        keep=product(keep, factors.rho),
        seq_log_ratio=seq_log_ratio,
        seq_log_rho=factors.seq_log_rho,
        seq_log_rho_mask=factors.seq_log_rho_mask,
    )
    unmeasured = frozenset() if inputs.ref_logprobs is not None else KL
    unmeasured |= frozenset() if config.use_rho_correction else RHO
    metrics, maxima = summarise(sums, unmeasured=unmeasured, rho_sums=factors.rho_sums, keep=keep, mask=mask)
    return PolicyLoss(loss=loss, metrics=metrics, maxima=maxima)


def product(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Product of two factors; None is 1."""
    return x if y is None else y if x is None else x * y
