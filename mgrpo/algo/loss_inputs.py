"""Inputs and result of a loss, named or a user's function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mgrpo import ops
from mgrpo.algo.aggregation import token_weights
from mgrpo.config.loss import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch: the response tokens of whole sequences, one sequence after the other.

    Ranks that share a micro-batch (tensor and context parallel) are given the same values. There may be no token, or
    none that trains. All floating-point tensors have the dtype of `logprobs`, float32 in a run, and only `logprobs` has
    a graph. Values of untrained tokens are arbitrary, NaN included.
    """

    logprobs: Tensor
    """`[tokens]`, log-probability of each token under the policy, of logits divided by the temperature."""
    old_logprobs: Tensor
    """`[tokens]`, under the policy before the first update on this batch; equal to `logprobs` where that is unknown."""
    ref_logprobs: Tensor | None
    """`[tokens]`, under the reference model; None without one (`beta` 0 and `log_ref_kl` off)."""
    rollout_logprobs: Tensor | None
    """`[tokens]`, as the engine reported them when it sampled; NaN where it did not."""
    advantages: Tensor
    """`[tokens]`, that of each token's sequence, or of its turn."""
    loss_mask: Tensor
    """`[tokens]` bool, which tokens are trained."""
    cu_seqlens: Tensor
    """`[num_seqs + 1]` int32, where each sequence begins and where the last one ends."""
    keep: Tensor | None
    """`[tokens]`, a factor of the policy term, from `top_entropy_quantile`; None: 1."""
    config: LossConfig
    """The loss section of the configuration."""
    denominator: float | Tensor | None
    """Denominator of the whole mini-batch over all ranks, see `mgrpo.algo.loss_denominator`; a number or `[num_seqs]`."""
    teacher_logprobs: Tensor | None = None
    """`[tokens]`, under each token's teacher; NaN without one. With `distillation_loss` sampled, `advantages` already include them;
    otherwise a divergence is added to the loss returned. None: no distillation.
    """

    @property
    def mask(self) -> Tensor:
        """`[tokens]`, `loss_mask` as 0 and 1."""
        return self.loss_mask.to(self.logprobs.dtype)

    def per_token(self, values: Tensor) -> Tensor:
        """Each sequence's value `[num_seqs]` at each of its tokens, `[tokens]`."""
        return ops.per_token(values, self.cu_seqlens, len(self.logprobs))

    def weights(self) -> Tensor:
        """`[tokens]`, factor of each token's loss under `aggregation`; 0 for untrained tokens."""
        return token_weights(self.mask, self.cu_seqlens, self.config, self.denominator)

    def total(self, token_losses: Tensor) -> Tensor:
        """The loss to return: the sum of weight x loss over the trained tokens, from `[tokens]`."""
        return (self.weights() * torch.where(self.loss_mask, token_losses, 0.0)).sum()

    def measured(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The metric that is the mean of `values` `[tokens]` over the trained tokens: their sum and their number."""
        return torch.where(self.loss_mask, values.detach(), 0.0).sum(), self.loss_mask.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The part of one micro-batch in the loss and in the step's metrics."""

    loss: Tensor
    """Scalar with a graph, already divided by the denominator."""
    metrics: dict[str, Tensor]
    """Name -> `[2]` fp32 (sum, count), detached; add them over micro-batches and ranks."""
    maxima: dict[str, Tensor]
    """Name -> scalar fp32, detached; take the maximum; -inf where nothing was measured."""


MetricPairs = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""Name -> (sum, count). Both are added over micro-batches and ranks, then divided; count 0 is not logged."""


class LossFunction(Protocol):
    """A user's own loss, `mgrpo.train(..., loss=function)` or `--policy_loss file.py:function`.

    It takes the place of surrogate, KL penalty and correction by rho. The entropy bonus is subtracted from its
    result, and `advantages`, `loss_mask`, `keep` and `denominator` are computed as for a named loss. It is called on
    every rank of the last pipeline stage, once per micro-batch, and must not use collectives or random numbers.
    """

    def __call__(self, inputs: LossInputs, /) -> Tensor | tuple[Tensor, MetricPairs]:
        """The loss, a scalar with a graph to `inputs.logprobs` and already divided (`inputs.total`), and its metrics.

        A metric `name` is logged as `custom/loss/name`.
        """
        ...
