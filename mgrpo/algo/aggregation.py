"""The way from the losses of tokens to one number: a weight for each token, and the denominator of a mini-batch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mgrpo import ops
from mgrpo.config.loss import LossConfig


def token_weights(
    loss_mask: Tensor, cu_seqlens: Tensor, config: LossConfig, denominator: float | Tensor | None = None
) -> Tensor:
    """The factor of each token's loss: the mask times the normaliser of `config.aggregation`, `[tokens]`.

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

    Sequences without a trained token also count; the branches of one completion count as one, see `denominators`.
    """
    aggregation = config.effective_aggregation
    if aggregation == "constant":
        if not config.constant:
            raise ValueError(f"aggregation 'constant' needs a number, got loss_denominator={config.loss_denominator}")
        return config.constant
    if aggregation in ("token", "local_token"):
        if isinstance(num_trained_tokens, Tensor):
            return num_trained_tokens.clamp(min=1)
        return float(max(num_trained_tokens, 1))
    if num_seqs is None:
        raise ValueError(f"aggregation {aggregation!r} divides by the number of sequences; pass num_seqs")
    if aggregation != "dr_grpo":
        return float(max(num_seqs, 1))
    if response_length is None:
        raise ValueError("aggregation 'dr_grpo' divides by sequences x response_length; pass response_length")
    return float(max(num_seqs, 1)) * response_length


def denominators(
    samples: np.ndarray,
    completions: np.ndarray,
    trained_tokens: np.ndarray,
    *,
    config: LossConfig,
    response_length: float,
) -> float | np.ndarray:
    """The denominator of a mini-batch as `policy_loss` takes it, or each sample's, `[largest sample + 1]` float32.

    The branches of a completion, each a sequence, weigh together as much as the same tokens in one sequence: aggregations that
    count sequences count completions, and seq_mean, whose weights already divide by the trained tokens of a branch, multiplies
    its denominator by the completion's trained tokens over the branch's. Ratios, rhos and masks of a sequence remain those of
    the branch, whose context is its own.

    Args:
        samples, completions, trained_tokens: `[sequences]` int32, of the sequences of all ranks in any order; a completion's
            number is that of all its branches.
    """
    _, place = np.unique(completions, return_inverse=True)
    num_completions = int(place.max(initial=-1)) + 1
    if config.effective_aggregation == "local_token":
        return _by_sample(samples, _local(place, trained_tokens, config.local_batch_size))
    whole = float(
        loss_denominator(int(trained_tokens.sum()), config, num_seqs=num_completions, response_length=response_length)
    )
    if config.effective_aggregation != "seq_mean" or num_completions == len(samples):
        return whole
    totals = np.bincount(place, trained_tokens)
    return _by_sample(samples, whole * totals[place] / np.maximum(trained_tokens, 1))


def _local(place: np.ndarray, trained_tokens: np.ndarray, batch_size: int) -> np.ndarray:
    """Denominators of aggregation local_token, `[sequences]`.

    A micro-batch in TRL is `batch_size` completions in the order in which they were drawn, however they are packed here;
    the loss is the mean over micro-batches of their means over tokens.
    """
    part = place // batch_size
    totals = np.bincount(part, trained_tokens)
    return np.maximum(totals[part], 1) * len(totals)


def _by_sample(samples: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.ones(int(samples.max(initial=-1)) + 1, np.float32)
    found[samples] = np.maximum(values, 1)
    return found
