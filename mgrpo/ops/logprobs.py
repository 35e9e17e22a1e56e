"""Owns `token_logprobs`: argument checks, the collective between the raw ops, and the autograd around them.

Row selection, vocabulary shards and temperature all live inside the ops: nothing of the logits' size is allocated here,
except the gradient when it is not written in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mgrpo.ops.candidates import Columns, check_candidates, joined, picked, picked_logprobs, split_targets
from mgrpo.ops.compiled import ops_for
from mgrpo.ops.head import DTYPES, check_index, check_index_values, describe, gather, inverse_temperature, op_cotangents
from mgrpo.ops.kept_tokens import KeptSets, check_kept, check_kept_values, kept_logprobs, picked_logits


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_cols: int | None = None,
    group: ProcessGroup | None = None,
    with_entropy: bool = False,
    inplace: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target token under vocabulary-sharded logits, and the entropy of its distribution.

    Args:
        logits: `[tokens, vocab/tp]`, fp32, bf16 or fp16, unit column stride.
        targets: `[n]` int64, global token ids, equal on all ranks of `group`. A target that no rank holds is a
            ValueError on one CPU rank, and logprob -inf elsewhere. `[n, 1 + k]`: each row's target and k candidates, no
            candidate twice and -1 for none, whose logprob is -inf; outside its set with `kept` it is as well.
        rows: `[n]` int64, the logits row of each target, no row twice; None: n = tokens, in order.
        temperature: divisor of the logits, one number or `[n]`. No gradient flows to it.
        vocab_start: global id of this shard's first column.
        valid_cols: columns from here on are vocabulary padding: never read, gradient zero. None: all are valid;
            0 is legal on a rank that holds only padding.
        group: the tensor-parallel group, all of which must call. None: the logits hold the whole vocabulary.
        with_entropy: also compute the entropy. It is differentiable; when the loss does not use it, backward takes
            the cheaper path by itself.
        inplace: backward overwrites the logits with their gradient and needs no second buffer. Then backward runs
            once, and the op that made the logits must not need them in its own backward (autograd reports it).
        kept: the set of tokens that each target was sampled from, equal on all ranks of `group`; logprob and entropy
            are then over that set. A target outside its set is a ValueError on one CPU rank, and logprob -inf elsewhere.
            None: over the whole vocabulary.
    Returns:
        Logprobs in the shape of targets and entropy `[n]` or None, fp32, bitwise equal on all ranks of `group`.
        Collective over `group`: one all-gather of 16 bytes per token, with candidates also one all-reduce of 4 k bytes, none
        in backward: a rank's gradient is that of its own shard, given that every rank computes the same loss.
    Raises:
        ValueError: a shape, type, device or index that does not fit; `inplace` where the logits must survive.
    """
    if valid_cols is None:
        valid_cols = logits.shape[-1]
    _check_logits(logits, valid_cols, inplace)
    targets, candidates = split_targets(targets)
    n = _check_indices(logits, targets, rows)
    if kept is not None:
        check_kept(kept, targets)
    holds_vocabulary = group is None or group.size() == 1
    if not torch.compiler.is_compiling() and logits.device.type == "cpu":
        vocab_range = (vocab_start, vocab_start + valid_cols)
        check_index_values(logits, targets, rows, vocab_range if holds_vocabulary else None)
        if candidates is not None:
            check_candidates(candidates, logits, vocab_range if holds_vocabulary else None)
        if kept is not None and holds_vocabulary:
            check_kept_values(kept, targets, vocab_range)
    inv_temp = inverse_temperature(temperature, n, logits)
    group = None if holds_vocabulary else group
    if kept is not None:
        values = picked_logits(logits, rows, kept, vocab_start=vocab_start, valid_cols=valid_cols, inplace=inplace)
        return kept_logprobs(values, kept, targets, candidates, inv_temp, group, with_entropy)
    logprobs, entropy, others = _TokenLogprobs.apply(
        logits,
        targets,
        candidates,
        None if rows is None else rows.contiguous(),
        inv_temp,
        vocab_start,
        valid_cols,
        group,
        with_entropy,
        inplace,
    )
    return joined(logprobs, others), entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        candidates: Tensor | None,
        rows: Tensor | None,
        inv_temp: Tensor,
        vocab_start: int,
        valid_cols: int,
        group: ProcessGroup | None,
        with_entropy: bool,
        inplace: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ops = ops_for(logits)
        stats = ops.logprob_stats(logits, targets, rows, vocab_start, valid_cols, inv_temp, with_entropy)
        logprobs, entropy, merged = ops.logprob_merge(gather(stats, group), inv_temp)
        others = None
        if candidates is not None:
            values = picked(logits, rows, candidates, vocab_start=vocab_start, valid_cols=valid_cols)
            others = picked_logprobs(values, merged, inv_temp, group)
        ctx.save_for_backward(logits, targets, candidates, rows, inv_temp, merged, logprobs, others)
        ctx.vocab_start, ctx.valid_cols, ctx.inplace = vocab_start, valid_cols, inplace
        ctx.is_consumed = False
        # An output that the loss does not use then arrives in backward as None and is skipped there.
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None, others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, g_logprobs: Tensor | None, g_entropy: Tensor | None, g_others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if g_logprobs is None and g_entropy is None and g_others is None:
            return (None,) * 10
        if ctx.is_consumed:
            raise RuntimeError(
                "second backward through token_logprobs(inplace=True): the first one overwrote the logits with their "
                "gradient; use inplace=False"
            )
        logits, targets, candidates, rows, inv_temp, merged, logprobs, others = ctx.saved_tensors
        ops, columns = ops_for(logits), None
        g_logprobs, g_entropy = op_cotangents(g_logprobs, g_entropy, merged)
        if g_others is not None:
            columns = Columns.of(targets, candidates, logprobs, others, g_logprobs, g_others)
            g_logprobs = columns.g.sum(1)
        inv_rows = None if rows is None else _inverse_rows(rows, logits.shape[0])
        rest = (targets, inv_rows, ctx.vocab_start, ctx.valid_cols, inv_temp, merged, g_logprobs, g_entropy)
        if ctx.inplace:
            ctx.is_consumed = True
            ops.logprob_grad_(logits, *rest)
            # Without this, an op that saved the logits for its own backward would silently read the gradient.
            torch.autograd.graph.increment_version(logits)
            grad = logits.detach()
        else:
            grad = torch.empty_like(logits)
            ops.logprob_grad_out(logits, grad, *rest)
        if columns is not None:
            place = {"vocab_start": ctx.vocab_start, "valid_cols": ctx.valid_cols}
            columns.write_(grad, rows, g_entropy=g_entropy, merged=merged, inv_temp=inv_temp, **place)
        return (grad,) + (None,) * 9


def _inverse_rows(rows: Tensor, tokens: int) -> Tensor:
    """Entry of each logits row `[tokens]` int32, -1 for rows without one."""
    entries = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return torch.full((tokens,), -1, dtype=torch.int32, device=rows.device).index_copy_(0, rows, entries)


def _check_logits(logits: Tensor, valid_cols: int, inplace: bool) -> None:
    if logits.dim() != 2:
        raise ValueError(
            f"logits is {describe(logits)}, expected [tokens, vocab/tp]; flatten the token dimensions first, "
            f"logits.reshape(-1, logits.shape[-1])"
        )
    if logits.dtype not in DTYPES:
        raise ValueError(f"logits is {logits.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(
            f"logits has column stride {logits.stride(1)}, expected 1: its rows are scattered in memory (a transposed "
            f"view?); pass logits.contiguous()"
        )
    if not 0 <= valid_cols <= logits.shape[1]:
        raise ValueError(f"valid_cols={valid_cols} is outside [0, {logits.shape[1]}], the columns of logits")
    if not inplace or not logits.requires_grad:
        return
    if torch.compiler.is_compiling():
        raise ValueError("inplace=True inside torch.compile would be turned into a copy; use inplace=False there")
    if logits.is_leaf:
        raise ValueError(
            "inplace=True would overwrite a leaf tensor (a parameter or an input) with its gradient; it is for logits "
            "that an LM head just made; use inplace=False"
        )
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(
            f"inplace=True needs rows of their own, but logits has row stride {logits.stride(0)} for "
            f"{logits.shape[1]} columns (an expanded view?); use inplace=False"
        )


def _check_indices(logits: Tensor, targets: Tensor, rows: Tensor | None) -> int:
    """Dtypes, shapes and devices of targets and rows. Returns n."""
    n = logits.shape[0] if rows is None else rows.numel()
    if rows is not None:
        check_index("rows", rows, n, logits)
    check_index(
        "targets", targets, n, logits, "; pass rows to score only some of the logits' rows" if rows is None else ""
    )
    return n
