"""Owns kept sets: log-probabilities over the tokens that top-k, top-p or min-p left to sample from.

The logits of the sets' entries are picked out of whole rows (`picked_logits`) or computed alone, a dot product for each
(`picked_dots`); from there on everything is of the sets' size (`kept_logprobs`). Training over the sets that sampling
kept is Keep Sampling Mask of DeepSeek-V3.2 (2025), section 3.1: both policies of a ratio are then normalised over the
same tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mgrpo.ops.candidates import joined, picked_logprobs
from mgrpo.ops.compiled import ops_for
from mgrpo.ops.head import describe, gather, op_cotangents

WIDE_ENTRIES = 4096
"""Entries whose factors exist in fp32 at a time, where their products are wider than these."""


class KeptSets(NamedTuple):
    """Sampling mask: for each of n targets the set of tokens that it was sampled from, itself among them, no token twice (CSR)."""

    ids: Tensor
    """`[m]` int32, global token ids, those of a target together, in any order."""
    offsets: Tensor
    """`[n + 1]` int32 from 0 to m: entries `offsets[i]` to `offsets[i + 1]` are the set of target i."""

    def entry_targets(self) -> Tensor:
        """The target that each entry belongs to, `[m]` int64."""
        each = torch.arange(self.offsets.shape[0] - 1, device=self.offsets.device)
        return each.repeat_interleave(self.offsets.diff(), output_size=self.ids.shape[0])

    def entries(self, tokens: Tensor) -> Tensor:
        """The entry of each of the tokens `[n, j]` in its target's set, `[n, j]` int64; -1 where it is not in it."""
        keys, order = ((self.entry_targets() << 32) + self.ids).sort()
        wanted = (torch.arange(len(tokens), device=tokens.device)[:, None] << 32) + tokens
        place = torch.searchsorted(keys, wanted).clamp(max=max(len(keys) - 1, 0))
        return order[place].where(keys[place] == wanted, -1)


def kept_logprobs(
    values: Tensor,
    kept: KeptSets,
    targets: Tensor,
    candidates: Tensor | None,
    inv_temp: Tensor,
    group: ProcessGroup | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Logprob of each target `[n]`, and of its candidates `[n, k]`, over its set, and entropy, from the entries' values `[m]`.

    Collective as `token_logprobs`.
    """
    kept = KeptSets(*(part.contiguous() for part in kept))
    entries = None if candidates is None else kept.entries(joined(targets, candidates))
    logprobs, entropy, others = _KeptLogprobs.apply(values, *kept, targets, entries, inv_temp, group, with_entropy)
    return joined(logprobs, others), entropy


class _KeptLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        ids: Tensor,
        offsets: Tensor,
        targets: Tensor,
        entries: Tensor | None,
        inv_temp: Tensor,
        group: ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ops, others = ops_for(values), None
        stats = ops.kept_stats(values, ids, offsets, targets, inv_temp, with_entropy)
        logprobs, entropy, merged = ops.logprob_merge(gather(stats, group), inv_temp)
        if entries is not None:
            found = values[entries[:, 1:]].where(entries[:, 1:] >= 0, -torch.inf)
            others = picked_logprobs(found, merged, inv_temp, group)
        ctx.save_for_backward(values, ids, offsets, targets, inv_temp, merged, entries)
        # An output that the loss does not use then arrives in backward as None and is skipped there.
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None, others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, g_logprobs: Tensor | None, g_entropy: Tensor | None, g_others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if g_logprobs is None and g_entropy is None and g_others is None:
            return (None,) * 8
        values, ids, offsets, targets, inv_temp, merged, entries = ctx.saved_tensors
        ops = ops_for(merged)
        g_logprobs, g_entropy = op_cotangents(g_logprobs, g_entropy, merged)
        if g_others is None:
            grad = ops.kept_grad(values, ids, offsets, targets, inv_temp, merged, g_logprobs, g_entropy)
            return (grad,) + (None,) * 7
        g = joined(g_logprobs, g_others).where(entries >= 0, 0.0)
        none = torch.full_like(targets, -1)
        grad = ops.kept_grad(values, ids, offsets, none, inv_temp, merged, g.sum(1), g_entropy)
        grad.index_put_((entries,), inv_temp.expand(len(g))[:, None] * g, accumulate=True)
        return (grad,) + (None,) * 7


def picked_logits(
    logits: Tensor, rows: Tensor | None, kept: KeptSets, *, vocab_start: int, valid_cols: int, inplace: bool
) -> Tensor:
    """Logits of the entries `[m]`, float32 or wider, from this shard's columns; -inf for entries of other shards.

    Backward fills the logits, or a new buffer, with zeros and writes the entries; see `token_logprobs` for `inplace`.
    """
    entry_rows = kept.entry_targets() if rows is None else rows[kept.entry_targets()]
    columns, is_own = _columns(kept, vocab_start, valid_cols)
    return _widened(_PickedLogits.apply(logits, entry_rows, columns, inplace), is_own)


class _PickedLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, columns: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(logits, rows, columns)
        ctx.inplace, ctx.is_consumed = inplace, False
        return logits[rows, columns]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_picked: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_consumed:
            raise RuntimeError(
                "second backward through token_logprobs(inplace=True): the first one overwrote the logits with their "
                "gradient; use inplace=False"
            )
        logits, rows, columns = ctx.saved_tensors
        ctx.is_consumed = ctx.inplace
        grad = logits.detach().zero_() if ctx.inplace else torch.zeros_like(logits)
        # Accumulated, since entries of other shards also have a column here, to which they add zero.
        return grad.index_put_((rows, columns), g_picked, accumulate=True), None, None, None


def picked_dots(
    hidden: Tensor,
    weight: Tensor,
    kept: KeptSets,
    *,
    vocab_start: int,
    valid_cols: int,
    group: ProcessGroup | None,
    dtype: torch.dtype,
) -> Tensor:
    """The same as `picked_logits(hidden @ weight.T)`, without any other of these products.

    hidden is `[n, hidden]`, weight `[vocab/tp, hidden]`; each product is rounded to dtype, theirs or a wider one. Backward
    all-reduces the gradient of hidden over group, in fp32.
    """
    columns, is_own = _columns(kept, vocab_start, valid_cols)
    dots = _PickedDots.apply(
        hidden, weight, kept.offsets.long(), kept.entry_targets(), columns, valid_cols, group, dtype
    )
    return _widened(dots, is_own)


class _PickedDots(torch.autograd.Function):
    """The three products of a sparse matrix in CSR form with dense ones.

    In torch they are those of an embedding bag, a weighted sum of rows for each segment: the dot products are the gradient
    in its weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        offsets: Tensor,
        rows: Tensor,
        columns: Tensor,
        valid_cols: int,
        group: ProcessGroup | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, offsets, rows, columns)
        ctx.valid_cols, ctx.group = valid_cols, group
        if dtype != hidden.dtype:
            pieces = zip(rows.split(WIDE_ENTRIES), columns.split(WIDE_ENTRIES), strict=True)
            return torch.cat([(hidden[i].to(dtype) * weight[j].to(dtype)).sum(1) for i, j in pieces])
        sum_mode = 0
        return torch.ops.aten._embedding_bag_per_sample_weights_backward(
            hidden, weight, columns, offsets, rows, sum_mode
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_dots: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, offsets, rows, columns = ctx.saved_tensors
        g_dots = g_dots.to(hidden.dtype)
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            # Without valid columns the entries point to padding, and zero times that need not be zero.
            d_hidden = _weighted_sums(g_dots, weight, columns, offsets) if ctx.valid_cols else torch.zeros_like(hidden)
            if ctx.group is not None:
                total = d_hidden.to(torch.promote_types(d_hidden.dtype, torch.float32))
                dist.all_reduce(total, group=ctx.group)
                d_hidden = total.to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            # The same sums of the transposed matrix, each in the order of the entries: the same bits in every run.
            columns, order = columns.sort(stable=True)
            each = torch.arange(weight.shape[0] + 1, device=weight.device)
            d_weight = _weighted_sums(g_dots[order], hidden, rows[order], torch.searchsorted(columns, each))
        return (d_hidden, d_weight) + (None,) * 6


def _weighted_sums(factors: Tensor, x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The sum of `factors * x[rows]` over each segment of offsets `[segments + 1]`: `[segments, hidden]`."""
    return torch.nn.functional.embedding_bag(
        rows, x, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True
    )


def _columns(kept: KeptSets, vocab_start: int, valid_cols: int) -> tuple[Tensor, Tensor]:
    """Local column `[m]` int64 of each entry, and True where it is this shard's; elsewhere the column is an arbitrary one of this shard.

    Such columns are spread: work on one column is done entry by entry.
    """
    columns = kept.ids.long() - vocab_start
    return columns.remainder(max(valid_cols, 1)), (columns >= 0) & (columns < valid_cols)


def _widened(picked: Tensor, is_own: Tensor) -> Tensor:
    """Values for the raw ops. Those of other shards' entries are -inf, and their gradient is zero."""
    return torch.where(is_own, picked.to(torch.promote_types(picked.dtype, torch.float32)), -torch.inf)


def check_kept(kept: KeptSets, targets: Tensor) -> None:
    """Dtypes, shapes and devices; on the CPU also that the offsets are some."""
    n = targets.shape[0]
    if kept.offsets.dtype != torch.int32 or kept.offsets.shape != (n + 1,):
        raise ValueError(
            f"kept.offsets is {describe(kept.offsets)}, expected [{n + 1}] torch.int32, one more than targets"
        )
    if kept.ids.dtype != torch.int32 or kept.ids.dim() != 1:
        raise ValueError(f"kept.ids is {describe(kept.ids)}, expected [m] torch.int32, the ids of all sets")
    for name, part in zip(kept._fields, kept, strict=True):
        if part.device != targets.device:
            raise ValueError(f"kept.{name} is on {part.device}, targets are on {targets.device}; move one of them")
    if torch.compiler.is_compiling() or targets.device.type != "cpu":
        return
    sizes = kept.offsets.diff()
    if kept.offsets[0] != 0 or kept.offsets[-1] != kept.ids.shape[0] or bool((sizes < 0).any()):
        raise ValueError(
            f"kept.offsets reach from {int(kept.offsets[0])} to {int(kept.offsets[-1])}, expected numbers that never "
            f"decrease, from 0 to {kept.ids.shape[0]}, the number of kept.ids"
        )


def check_kept_values(kept: KeptSets, targets: Tensor, vocab_range: tuple[int, int]) -> None:
    """Check the members of each set, where one CPU rank holds the whole vocabulary: elsewhere no rank has all of them in time."""
    low, high = vocab_range
    entry_targets = kept.entry_targets()
    outside = ((kept.ids < low) | (kept.ids >= high)).nonzero()
    if len(outside):
        entry = int(outside[0])
        raise ValueError(
            f"kept set {int(entry_targets[entry])} holds token {int(kept.ids[entry])}, expected ids in [{low}, {high}); "
            f"pass group when the vocabulary is sharded"
        )
    pairs, counts = (entry_targets * high + kept.ids).unique(return_counts=True)
    if len(pairs) < len(kept.ids):
        twice = int(pairs[counts > 1][0])
        raise ValueError(f"kept set {twice // high} holds token {twice % high} twice, expected each token once")
    has_target = torch.zeros_like(targets, dtype=torch.bool)
    has_target[entry_targets[kept.ids == targets[entry_targets]]] = True
    if not bool(has_target.all()):
        row = int(has_target.logical_not().nonzero()[0])
        raise ValueError(
            f"kept set {row} does not hold target {int(targets[row])}, though it was sampled from that set; take the "
            f"set of the same token"
        )
