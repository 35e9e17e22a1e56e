"""The policy loss of GRPO and its relatives, as a sum over tokens divided by a denominator that the caller passes.

The denominator covers the whole optimizer mini-batch on all ranks, so micro-batches and ranks simply add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.algo.distillation import TeacherSignal
from mgrpo.algo.kl import at_least_fp32
from mgrpo.algo.loss_inputs import LossFunction, LossInputs, PolicyLoss
from mgrpo.algo.losses import NAMED
from mgrpo.algo.losses.own import own_loss
from mgrpo.config.loss import LossConfig


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
    function: LossFunction | None = None,
    signal: TeacherSignal | None = None,
    candidates: Tensor | None = None,
) -> PolicyLoss:
    """The loss that `config` names, over the response tokens of some sequences, and its metrics.

    The policy term of a token is the surrogate in `mgrpo.algo.losses` of r = exp(logprob - old_logprob), the token's or
    its sequence's (`ratio_level`; GSPO, arXiv 2507.18071), times rho (`mgrpo.algo.correction`) and `keep`. To it is
    added beta x KL (`mgrpo.algo.kl`), times r if `kl_bias_correction`. Gradients flow through `logprobs` only. A token
    outside `loss_mask` adds exactly 0 to loss, gradient and metrics, whatever its values, inf and NaN included. A
    trained token whose old logprob is not finite counts as on-policy (ratio 1), one without a finite rollout logprob
    has rho 1. Zero tokens give 0 with a graph. No collective; no device synchronisation except in SAPO.

    Args:
        logprobs: `[tokens]`; computed in fp32 or better.
        old_logprobs: `[tokens]`, those of the policy the ratio refers to; `logprobs.detach()` for a first pass.
        advantages: `[tokens]` or `[num_seqs]`.
        loss_mask: `[tokens]`, bool or 0/1.
        cu_seqlens: `[num_seqs + 1]` int32 over the tokens, whole sequences.
        ref_logprobs: `[tokens]`, required when beta is not 0; with beta 0 it only feeds metrics.
        rollout_logprobs: `[tokens]`, the engine's, required by corrections; otherwise for metrics.
        config: names and bounds of the loss, the loss section of the configuration.
        keep: `[tokens]`, a factor of the policy term, not of the KL penalty; None: 1.
        denominator: `loss_denominator` of the whole mini-batch, a number or `[num_seqs]`; None: of these sequences alone.
        function: a user's loss in place of the named one; the formulas above are then its own.
        signal: teacher scores, see `mgrpo.algo.distillation`; `loss_mask` is then the result of `TeacherSignal.trained`.
        candidates: `[tokens, 1 + k]`, see `TeacherSignal.added`.
    Returns:
        The scalar loss with a graph to `logprobs`, and metrics as sums with their counts.
    Raises:
        ValueError: `config` names an unknown loss, or one that needs log-probabilities that are not given.
    """
    logprobs = at_least_fp32(logprobs)

    def constant(x: Tensor) -> Tensor:
        return x.detach().to(logprobs.dtype)

    old, advantages, cu_seqlens = constant(old_logprobs), constant(advantages), cu_seqlens.to(torch.int32)
    if len(advantages) != len(logprobs):
        advantages = ops.per_token(advantages, cu_seqlens, len(logprobs))
    old = torch.where(old.isfinite(), old, logprobs.detach())
    if signal is not None:
        advantages = signal.advantages(advantages, old)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=None if ref_logprobs is None else constant(ref_logprobs),
        rollout_logprobs=None if rollout_logprobs is None else constant(rollout_logprobs),
        advantages=advantages,
        loss_mask=loss_mask.bool(),
        cu_seqlens=cu_seqlens,
        keep=None if keep is None else constant(keep),
        config=config,
        denominator=denominator,
        teacher_logprobs=None if signal is None else constant(signal.logprobs),
    )
    if function is None and config.policy_loss not in NAMED:
        raise ValueError(f"policy_loss={config.policy_loss!r} is unknown; choose one of {', '.join(NAMED)}")
    result = own_loss(function, inputs) if function is not None else NAMED[config.policy_loss].loss(inputs)
    return result if signal is None else signal.added(result, inputs, candidates)
