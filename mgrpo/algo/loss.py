"""The policy loss of GRPO and its relatives, as a sum over tokens divided by a denominator the caller knows.

The denominator covers the whole optimizer mini-batch on all ranks, so micro-batches and ranks simply add up. The token's
arithmetic is the extension's (`mgrpo.ops.policy_loss`); here a `LossConfig` becomes its operands.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.algo.correction import Correction, correction
from mgrpo.algo.kl import NUM_ESTIMATORS, at_least_fp32
from mgrpo.algo.metrics import summarise
from mgrpo.config.loss import Aggregation, LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """What one micro-batch adds to the loss and to the step's metrics."""

    loss: Tensor
    """Scalar with a graph: (sum of policy loss + beta x KL over the trained tokens) / denominator."""
    metrics: dict[str, Tensor]
    """Name -> `[2]` fp32 (sum, count), detached; names and order as `metric_names`; add them over micro-batches and ranks."""
    maxima: dict[str, Tensor]
    """Name -> scalar fp32, detached; take the maximum; -inf where nothing was measured."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    config: LossConfig,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    keep: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> PolicyLoss:
    """The loss that `config` names, over the response tokens of some sequences, and what it reports.

    With r = exp(logprob - old_logprob) of a token, or of its sequence (`ratio_level`; GSPO, arXiv 2507.18071), A the
    advantage and l the logprob, the policy term of a token is, to be minimised,

        ppo_clip    -min(min(r, delta) A, clip(r, 1 - clip_lower, 1 + clip_higher) A), at most dual_clip |A| for A < 0
                    (arXiv 1707.06347; delta: 2505.07291; dual clip: 1912.09729)
        cispo       -A min(r, 1 + clip_higher) l, r without gradient (arXiv 2506.13585)
        sapo        -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A (arXiv 2511.20347)
        vespo       -A phi(w) l, phi(w) = w^k exp(lambda (1 - w)), no gradient, w the product of the sequence's ratios
                    and rhos, k and lambda by the sign of A (arXiv 2602.10693)
        reinforce   -A l

    times rho (`mgrpo.algo.correction`; VESPO's w has it already) and `keep`; plus beta x KL (`mgrpo.algo.kl`), times r if
    `kl_bias_correction`.
    Gradients flow through `logprobs` only. A token outside `loss_mask` adds exactly 0 to loss, gradient and metrics,
    whatever its values, inf and NaN included. A trained token whose old logprob is not finite counts as on-policy
    (ratio 1), one without a finite rollout logprob has rho 1. Zero tokens give 0 with a graph. No collective, and,
    SAPO apart, no wait for a GPU.

    Args:
        logprobs: `[tokens]`; computed in fp32 or better.
        old_logprobs: `[tokens]`, those of the policy the ratio refers to; `logprobs.detach()` for a first pass.
        advantages: `[tokens]` or `[num_seqs]`.
        loss_mask: `[tokens]`, bool or 0/1.
        cu_seqlens: `[num_seqs + 1]` int32 over the tokens, whole sequences.
        ref_logprobs: `[tokens]`, required when beta is not 0; with beta 0 it only feeds metrics.
        rollout_logprobs: `[tokens]`, the engine's, required by corrections; otherwise for metrics.
        keep: `[tokens]`, a factor of the policy term, not of the KL penalty; None: 1.
        denominator: of the whole mini-batch over all ranks, see `loss_denominator`, a number or `[num_seqs]`; None: that
            of these sequences alone, except under dr_grpo, which needs it.
    """
    _check(config)
    _check_operands(config, ref_logprobs, rollout_logprobs)
    logprobs = at_least_fp32(logprobs)

    def like_logprobs(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(logprobs.dtype)

    cu_seqlens = cu_seqlens.to(torch.int32)
    mask = loss_mask.to(logprobs.dtype)
    old, ref, rollout = like_logprobs(old_logprobs), like_logprobs(ref_logprobs), like_logprobs(rollout_logprobs)
    advantages, keep = like_logprobs(advantages), like_logprobs(keep)
    old = torch.where(old.isfinite(), old, logprobs.detach())

    factors, surrogate = Correction(), config.policy_loss
    if _corrects(config):
        advantages = _at_tokens(advantages, cu_seqlens, len(mask))
        factors = correction(logprobs, old, rollout, advantages, mask, cu_seqlens, config)
    if surrogate == "vespo":
        surrogate, advantages = "reinforce", _at_tokens(advantages, cu_seqlens, len(mask))
        advantages = advantages * _vespo_weight(logprobs, old, factors.rho, advantages, mask, cu_seqlens, config)
    keep = _product(keep, factors.keep)
    seq_log_ratio = None
    if config.ratio_level != "token":
        seq_log_ratio = ops.segment_mean(logprobs - old, mask, cu_seqlens)

    loss, sums = ops.policy_loss(
        logprobs,
        old,
        advantages,
        token_weights(mask, cu_seqlens, config, denominator),
        cu_seqlens,
        ref_logprobs=ref,
        rollout_logprobs=rollout,
        keep=keep if config.policy_loss == "vespo" else _product(keep, factors.rho),
        seq_log_ratio=seq_log_ratio,
        seq_log_rho=factors.seq_log_rho,
        seq_log_rho_mask=factors.seq_log_rho_mask,
        surrogate=surrogate,
        ratio_level=config.ratio_level,
        clip_low=1.0 - config.clip_lower,
        clip_high=1.0 + config.clip_higher,
        delta=config.delta,
        dual_clip=config.dual_clip,
        beta=config.beta,
        kl_estimator=config.kl_estimator,
        kl_bias_correction=config.kl_bias_correction,
        use_rho=config.use_rho_correction and factors.rho is None,
        rho_bounds=config.rho_bounds,
        sapo_temperatures=(config.sapo_temperature_pos, config.sapo_temperature_neg),
    )
    metrics, maxima = summarise(
        sums,
        has_reference=ref is not None,
        use_rho=config.use_rho_correction,
        rho_sums=factors.rho_sums,
        keep=keep,
        mask=mask,
    )
    return PolicyLoss(loss=loss, metrics=metrics, maxima=maxima)


def token_weights(
    loss_mask: Tensor, cu_seqlens: Tensor, config: LossConfig, denominator: float | Tensor | None = None
) -> Tensor:
    """What each token's loss is multiplied by: the mask times the normaliser of `config.aggregation`, `[tokens]`.

    Arguments as `policy_loss`; the sum of weight x loss over all micro-batches and ranks is the aggregated loss.
    """
    num_seqs, num_tokens = len(cu_seqlens) - 1, len(loss_mask)
    if denominator is None:
        denominator = loss_denominator(loss_mask.sum().clamp(min=1), config, num_seqs=num_seqs)
    if isinstance(denominator, Tensor) and denominator.ndim == 1:
        denominator = ops.per_token(denominator.to(loss_mask.dtype), cu_seqlens, num_tokens)
    weights = loss_mask / denominator
    if config.effective_aggregation == "seq_mean":
        lengths = ops.segment_sums(loss_mask, loss_mask, cu_seqlens)[1]
        weights = weights / ops.per_token(lengths.clamp(min=1), cu_seqlens, num_tokens)
    return weights


def loss_denominator(
    num_trained_tokens: float | Tensor,
    config: LossConfig,
    *,
    num_seqs: int | None = None,
    response_length: float | None = None,
) -> float | Tensor:
    """The denominator of a mini-batch, from its trained tokens and sequences over all data-parallel ranks; never 0.

        token         trained tokens: every token weighs the same (DAPO, arXiv 2503.14476)
        constant      the number in `config.loss_denominator` (Dr. GRPO, arXiv 2503.20783)
        dr_grpo       sequences x `response_length`, the most tokens of a completion
        seq_mean      sequences, whose own token means are taken first (GRPO, arXiv 2402.03300)
        luspo         sequences, whose token sums are taken: length x mean (arXiv 2602.05261)
        local_token   as token, but of one micro-batch: call `policy_loss` with each micro-batch's own count times the
                      number of micro-batches (TRL's bnpo)

    Sequences without a trained token count, too.
    """
    aggregation = config.effective_aggregation
    if aggregation == "constant":
        if not config.constant:
            raise ValueError(f"aggregation 'constant' needs a number, got loss_denominator={config.loss_denominator}")
        return config.constant
    if aggregation in ("token", "local_token"):
        is_tensor = isinstance(num_trained_tokens, Tensor)
        return num_trained_tokens.clamp(min=1) if is_tensor else float(max(num_trained_tokens, 1))
    if num_seqs is None:
        raise ValueError(f"aggregation {aggregation!r} divides by the number of sequences; pass num_seqs")
    if aggregation != "dr_grpo":
        return float(max(num_seqs, 1))
    if response_length is None:
        raise ValueError("aggregation 'dr_grpo' divides by sequences x response_length; pass response_length")
    return float(max(num_seqs, 1)) * response_length


def _vespo_weight(
    logprobs: Tensor,
    old: Tensor,
    rho: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    config: LossConfig,
) -> Tensor:
    """phi of each token's sequence, `[tokens]`. A token that rho's mask drops takes its whole sequence along."""

    def by_sign(positive: float, negative: float) -> Tensor:
        # Tensors of the right type: torch.where would make float32 of two numbers.
        return torch.where(advantages >= 0, log_w.new_full((), positive), log_w.new_full((), negative))

    log_ratio = (logprobs.detach() - old).clamp(-_VESPO_LOG_MAX, _VESPO_LOG_MAX)
    if rho is not None:
        log_ratio = log_ratio + rho.log().clamp(min=_VESPO_LOG_MIN)
    log_w = ops.segment_sums(log_ratio, mask, cu_seqlens)[0].clamp(_VESPO_LOG_MIN, _VESPO_LOG_MAX)
    log_w = ops.per_token(log_w, cu_seqlens, len(mask))
    k = by_sign(config.vespo_k_pos, config.vespo_k_neg)
    decay = by_sign(config.vespo_lambda_pos, config.vespo_lambda_neg)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


_VESPO_LOG_MIN, _VESPO_LOG_MAX = math.log(1e-8), 20.0


def _product(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """None is 1."""
    return x if y is None else y if x is None else x * y


def _at_tokens(advantages: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """`[tokens]`. As many advantages as tokens are taken as one a token."""
    return advantages if len(advantages) == num_tokens else ops.per_token(advantages, cu_seqlens, num_tokens)


def _corrects(config: LossConfig) -> bool:
    return config.use_rho_correction or config.off_policy_mask_threshold is not None


@cache
def _check(config: LossConfig) -> None:
    choices = typing.get_type_hints(LossConfig) | {"aggregation": Aggregation}
    for name in ("policy_loss", "ratio_level", "aggregation", "rho_level", "rho_mask_level"):
        allowed = typing.get_args(choices[name])
        value = config.effective_aggregation if name == "aggregation" else getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
    if config.kl_estimator not in range(NUM_ESTIMATORS):
        raise ValueError(f"kl_estimator={config.kl_estimator!r} is unknown; choose 0, 1, 2 or 3")
    if not config.use_rho_correction:
        return
    if config.rho_mask_tv_divergence and not config.rho_mask_upper_bound > 0:
        raise ValueError(
            f"rho_mask_tv_divergence needs a bound above 0, got rho_mask_upper_bound={config.rho_mask_upper_bound}"
        )
    if config.policy_loss == "vespo" and config.rho_level != "token":
        raise ValueError(
            f"vespo multiplies the rhos of the tokens itself, got rho_level={config.rho_level!r}; use 'token'"
        )


def _check_operands(config: LossConfig, ref_logprobs: Tensor | None, rollout_logprobs: Tensor | None) -> None:
    if config.beta != 0.0 and ref_logprobs is None:
        raise ValueError(f"beta={config.beta} needs ref_logprobs; load the reference model or set beta=0")
    if _corrects(config) and rollout_logprobs is None:
        raise ValueError("a correction for the engine's probabilities needs rollout_logprobs")
