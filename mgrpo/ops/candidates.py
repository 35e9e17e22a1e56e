"""Owns candidates: further tokens of a row whose log-probabilities are computed with its target's, in the same passes.

With the row's statistics (csrc/core/logprob.h) the logprob of any token is b (x - m) - log s, and its gradient is that of the target
with another column: the ops write the common part, -p for the sum of all cotangents, and the columns of the tokens are then
written here, in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mgrpo.ops.head import check_index, describe


def split_targets(targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """The target of each row `[n]`, and its candidates `[n, k]` where targets is `[n, 1 + k]`."""
    if targets.dim() != 2 or not targets.shape[1]:
        return targets.contiguous(), None
    return targets[:, 0].contiguous(), targets[:, 1:].contiguous()


def joined(logprobs: Tensor, candidate_logprobs: Tensor | None) -> Tensor:
    """Targets' and candidates' values in the shape of the targets."""
    return logprobs if candidate_logprobs is None else torch.cat((logprobs[:, None], candidate_logprobs), 1)


def picked(logits: Tensor, rows: Tensor | None, tokens: Tensor, *, vocab_start: int, valid_cols: int) -> Tensor:
    """Logits of the tokens `[n, k]` of each row, in fp32 or wider; -inf for those of other slices of the vocabulary."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    columns, is_own = _columns(tokens, vocab_start, valid_cols)
    if not valid_cols:
        return torch.full_like(tokens, -torch.inf, dtype=dtype)
    return logits[_each(rows, tokens), columns].to(dtype).where(is_own, -torch.inf)


def picked_logprobs(values: Tensor, merged: Tensor, inv_temp: Tensor, group: ProcessGroup | None) -> Tensor:
    """Logprobs of tokens `[n, k]`, from this rank's `picked` logits and the merged stats `[4, n]`; -inf for no token.

    Collective over group: one all-reduce of 4 k bytes a row.
    """
    if group is not None:
        values = values.contiguous()
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    m, s, _, _ = merged
    return inv_temp.expand(len(m))[:, None] * (values - m[:, None]) - s.log()[:, None]


class Columns(NamedTuple):
    """The columns of targets and candidates in the gradient of the logits; `[n, 1 + k]` each."""

    tokens: Tensor
    logprobs: Tensor
    g: Tensor
    """The cotangents of logprobs."""

    @classmethod
    def of(
        cls,
        targets: Tensor,
        candidates: Tensor,
        logprobs: Tensor,
        others: Tensor,
        g_logprobs: Tensor,
        g_others: Tensor,
    ) -> Columns:
        """From targets `[n]` and candidates `[n, k]`, their logprobs and the cotangents of these; 0 where a candidate is -1."""
        logprobs = joined(logprobs, others)
        g = joined(g_logprobs, g_others).where(logprobs > -torch.inf, 0.0)
        return cls(joined(targets, candidates), logprobs, g)

    def write_(
        self,
        gradient: Tensor,
        rows: Tensor | None,
        *,
        g_entropy: Tensor | None,
        merged: Tensor,
        inv_temp: Tensor,
        vocab_start: int,
        valid_cols: int,
    ) -> None:
        """Write them into the gradient of a slice of the logits, `[rows, columns]`; merged are the stats `[4, n]`."""
        if not valid_cols:
            return
        tokens, logprobs, g = self
        is_twice = tokens == tokens[:, :1]
        is_twice[:, 0] = False
        own = g.where(~is_twice, 0.0)
        own[:, 0] += g.where(is_twice, 0.0).sum(1)
        p = logprobs.exp()
        slope = own - p * g.sum(1, keepdim=True)
        is_live = (g != 0).any(1, keepdim=True)
        if g_entropy is not None:
            _, s, w, _ = merged[:, :, None]
            # p log p is 0 at p = 0.
            slope = slope - g_entropy[:, None] * p * (logprobs.where(p > 0, 0.0) + s.log() - w / s)
            is_live |= g_entropy[:, None] != 0
        values = (inv_temp.expand(len(tokens))[:, None] * slope).where(is_live, 0.0).to(gradient.dtype)
        columns, is_own = _columns(tokens.where(~is_twice, -1), vocab_start, valid_cols)
        # Tokens of other slices repeat one of this slice, or, without any, the first column: so no rank waits for their
        # number, and no column is written two different values.
        first = is_own.to(torch.int32).argmax(1, keepdim=True)
        has_own, each = is_own.any(1, keepdim=True), _each(rows, tokens)
        columns = columns.where(is_own, columns.gather(1, first).where(has_own, 0))
        values = values.where(is_own, values.gather(1, first).where(has_own, gradient[each, 0]))
        gradient.index_put_((each.expand_as(columns), columns), values)


def _each(rows: Tensor | None, tokens: Tensor) -> Tensor:
    """The row of logits of each row of tokens, `[n, 1]`."""
    return (torch.arange(len(tokens), device=tokens.device) if rows is None else rows)[:, None]


def _columns(tokens: Tensor, vocab_start: int, valid_cols: int) -> tuple[Tensor, Tensor]:
    """Column of each token in this slice, and True where it is in it; elsewhere the column is arbitrary."""
    columns = tokens - vocab_start
    is_own = (tokens >= 0) & (columns >= 0) & (columns < valid_cols)
    return columns.clamp(0, max(valid_cols - 1, 0)), is_own


def check_candidates(candidates: Tensor, logits: Tensor, vocab_range: tuple[int, int] | None) -> None:
    """Type and device; on the CPU, with a range, also that they are in it, or -1."""
    check_index("targets", candidates[:, 0], len(candidates), logits)
    if vocab_range is None or not candidates.numel():
        return
    low, high = int(candidates.min()), int(candidates.max())
    if low < -1 or high >= vocab_range[1]:
        raise ValueError(
            f"the candidates among targets ({describe(candidates)}) reach from {low} to {high}, expected ids below "
            f"{vocab_range[1]}, or -1 for none"
        )
