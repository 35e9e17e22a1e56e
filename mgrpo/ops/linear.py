"""Owns the LM head: `linear_logprobs`, which never materialises full logits, and `linear_logits`, full logits in a wider dtype than the operands'.

`linear_logprobs` takes the head's columns in chunks. To the ops a chunk is like a tensor-parallel shard, a slice of the vocabulary
that merges with the others (csrc/core/logprob.h has the formulas); the GEMMs around them are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mgrpo.ops.candidates import Columns, check_candidates, joined, picked, picked_logprobs, split_targets
from mgrpo.ops.compiled import ops_for
from mgrpo.ops.head import DTYPES, check_index, check_index_values, describe, gather, inverse_temperature, op_cotangents
from mgrpo.ops.kept_tokens import KeptSets, check_kept, check_kept_values, kept_logprobs, picked_dots
from mgrpo.ops.products import head_gradients, product

GRADIENT_COLUMNS = 16384
"""Columns of wide logits whose gradient exists in the factors' type at a time."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_cols: int | None = None,
    group: ProcessGroup | None = None,
    with_entropy: bool = False,
    logits_chunk: int,
    fp32_logits: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs(hidden @ weight.T, targets)` that computes `logits_chunk` columns of the logits at a time.

    Backward computes the logits once more, chunk by chunk: one GEMM more than with logits kept. Memory besides operands,
    gradients and results: one `[n, logits_chunk]` buffer, and in backward the fp32 sum of hidden's gradient
    `[n, hidden]` (in half precision also one product of that size). Never materialising logits is the idea of Cut Cross-Entropy
    (Wijmans et al. 2024) and of Liger Kernel (Hsu et al. 2024). Chunks are of the vocabulary and not of the tokens, so
    that each row of weight's gradient, the larger one, is written once.

    Args:
        hidden: `[n, hidden]`, fp32, bf16 or fp16 (float64 runs the reference), equal on all ranks of `group`.
        weight: `[vocab/tp, hidden]`, this rank's rows of the LM head, hidden's dtype.
        targets: `[n]` int64, global token ids, equal on all ranks of `group`; see `token_logprobs`.
        temperature: divisor of the logits, one number or `[n]`. No gradient flows to it.
        vocab_start: global id of this shard's first row.
        valid_cols: rows of weight from here on are vocabulary padding: never read, gradient zero. None: all are valid;
            0 is legal on a rank that holds only padding.
        group: the tensor-parallel group, all of which must call. None: weight holds the whole vocabulary.
        with_entropy: also compute the entropy. It is differentiable; when the loss does not use it, backward takes
            the cheaper path by itself.
        logits_chunk: at least 1. Results depend on it by rounding only; it may differ between the ranks of `group`.
        fp32_logits: as `linear_logits(..., dtype=torch.float32)`. A chunk of bf16 operands then takes three times the
            memory: itself, and its gradient in their type.
        kept: the set of tokens that each target was sampled from, see `token_logprobs`. Then only these logits are
            computed, each a dot product, and nothing in chunks: memory is that of the sets.
    Returns:
        Logprobs in the shape of targets and entropy `[n]` or None, fp32, bitwise equal on all ranks of `group`. Collective over
        `group`: as `token_logprobs`, and in backward one all-reduce of hidden's gradient in fp32, which is then
        that of the whole vocabulary, given that every rank computes the same loss.
    """
    if valid_cols is None:
        valid_cols = weight.shape[0]
    _check_operands(hidden, weight, valid_cols)
    if logits_chunk < 1:
        raise ValueError(
            f"logits_chunk={logits_chunk}, expected at least 1 column; for all columns at once use token_logprobs"
        )
    targets, candidates = split_targets(targets)
    check_index("targets", targets, hidden.shape[0], hidden)
    if kept is not None:
        check_kept(kept, targets)
    holds_vocabulary = group is None or group.size() == 1
    if holds_vocabulary and not torch.compiler.is_compiling() and hidden.device.type == "cpu":
        vocab_range = (vocab_start, vocab_start + valid_cols)
        check_index_values(hidden, targets, None, vocab_range)
        if candidates is not None:
            check_candidates(candidates, hidden, vocab_range)
        if kept is not None:
            check_kept_values(kept, targets, vocab_range)
    inv_temp = inverse_temperature(temperature, hidden.shape[0], hidden)
    group = None if holds_vocabulary else group
    dtype = dtype_of_logits(hidden, fp32_logits)
    if kept is not None:
        values = picked_dots(
            hidden, weight, kept, vocab_start=vocab_start, valid_cols=valid_cols, group=group, dtype=dtype
        )
        return kept_logprobs(values, kept, targets, candidates, inv_temp, group, with_entropy)
    logprobs, entropy, others = _LinearLogprobs.apply(
        hidden,
        weight,
        targets,
        candidates,
        inv_temp,
        vocab_start,
        valid_cols,
        group,
        with_entropy,
        logits_chunk,
        dtype,
    )
    return joined(logprobs, others), entropy


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        candidates: Tensor | None,
        inv_temp: Tensor,
        vocab_start: int,
        valid_cols: int,
        group: ProcessGroup | None,
        with_entropy: bool,
        logits_chunk: int,
        logits_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ops, parts, values, others = ops_for(hidden), [], [], None
        for columns, logits in head_chunks(hidden, weight, valid_cols, logits_chunk, logits_dtype):
            start, cols = vocab_start + columns.start, logits.shape[1]
            parts.append(ops.logprob_stats(logits, targets, None, start, cols, inv_temp, with_entropy))
            if candidates is not None:
                values.append(picked(logits, None, candidates, vocab_start=start, valid_cols=cols))
        _, _, own = ops.logprob_merge(torch.stack(parts), inv_temp)
        logprobs, entropy, merged = ops.logprob_merge(gather(own, group), inv_temp)
        if candidates is not None:
            others = picked_logprobs(torch.stack(values).amax(0), merged, inv_temp, group)
        ctx.save_for_backward(hidden, weight, targets, candidates, inv_temp, merged, logprobs, others)
        ctx.vocab_start, ctx.valid_cols, ctx.group = vocab_start, valid_cols, group
        ctx.logits_chunk, ctx.logits_dtype = logits_chunk, logits_dtype
        # An output that the loss does not use then arrives in backward as None and is skipped there.
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None, others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, g_logprobs: Tensor | None, g_entropy: Tensor | None, g_others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if g_logprobs is None and g_entropy is None and g_others is None:
            return (None,) * 11
        hidden, weight, targets, candidates, inv_temp, merged, logprobs, others = ctx.saved_tensors
        ops, of_tokens = ops_for(hidden), None
        g_logprobs, g_entropy = op_cotangents(g_logprobs, g_entropy, merged)
        if g_others is not None:
            of_tokens = Columns.of(targets, candidates, logprobs, others, g_logprobs, g_others)
            g_logprobs = of_tokens.g.sum(1)

        def gradients() -> Iterator[tuple[slice, Tensor]]:
            for columns, logits in head_chunks(hidden, weight, ctx.valid_cols, ctx.logits_chunk, ctx.logits_dtype):
                start, cols = ctx.vocab_start + columns.start, logits.shape[1]
                ops.logprob_grad_(logits, targets, None, start, cols, inv_temp, merged, g_logprobs, g_entropy)
                if of_tokens is not None:
                    place = {"vocab_start": start, "valid_cols": cols}
                    of_tokens.write_(logits, None, g_entropy=g_entropy, merged=merged, inv_temp=inv_temp, **place)
                yield columns, logits

        wanted = head_gradients(
            gradients(), hidden, weight, needs=ctx.needs_input_grad[:2], sum_dtype=merged.dtype, group=ctx.group
        )
        return (*wanted,) + (None,) * 9


def linear_logits(hidden: Tensor, weight: Tensor, *, dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
    """`hidden @ weight.T` in a type that may be wider than the operands', which is exact but for the order of its sums.

    The head in fp32 of MiniMax-M1 (arXiv 2506.13585) and ScaleRL (arXiv 2510.13786), without a copy of its weight. The
    logits' gradient is rounded to the operands' type for the two products of backward, `GRADIENT_COLUMNS` at a time.

    Args:
        hidden: `[n, hidden]`, equal on all ranks of `group`.
        weight: `[vocab/tp, hidden]`, this rank's rows of the LM head, hidden's dtype.
        group: the tensor-parallel group, all of which must call. None: weight holds the whole vocabulary.
    Returns:
        Logits `[n, vocab/tp]`. Backward does not read them. Collective over `group` in backward: one all-reduce of
        hidden's gradient in `dtype`, which is then that of the whole vocabulary.
    """
    _check_operands(hidden, weight, weight.shape[0])
    return _LinearLogits.apply(hidden, weight, dtype, None if group is None or group.size() == 1 else group)


class _LinearLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.group = group
        logits = hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=dtype)
        return product(hidden, weight.t(), out=logits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        starts = range(0, gradient.shape[1], GRADIENT_COLUMNS)
        chunks = (
            (columns, gradient[:, columns]) for columns in (slice(start, start + GRADIENT_COLUMNS) for start in starts)
        )
        wanted = head_gradients(
            chunks, hidden, weight, needs=ctx.needs_input_grad[:2], sum_dtype=gradient.dtype, group=ctx.group
        )
        return *wanted, None, None


def dtype_of_logits(hidden: Tensor, fp32_logits: bool) -> torch.dtype:
    """The type of the logits of chunks."""
    return torch.promote_types(hidden.dtype, torch.float32) if fp32_logits else hidden.dtype


def head_chunks(
    hidden: Tensor, weight: Tensor, valid_cols: int, logits_chunk: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Columns and logits `[n, columns]` of each chunk, padding left out. The next chunk overwrites the logits.

    A rank that holds only padding has one chunk without columns: it must meet the others at the gather.
    """
    n, width = hidden.shape[0], min(logits_chunk, max(valid_cols, 1))
    # Flat, so that the last chunk's logits are also contiguous: torch.compile takes no other `out`.
    buffer = hidden.new_empty(n * width, dtype=dtype)
    for start in range(0, max(valid_cols, 1), width):
        columns = slice(start, min(start + width, valid_cols))
        cols = columns.stop - columns.start
        yield columns, product(hidden, weight[columns].t(), out=buffer[: n * cols].view(n, cols))


def _check_operands(hidden: Tensor, weight: Tensor, valid_cols: int) -> None:
    if hidden.dim() != 2:
        raise ValueError(
            f"hidden is {describe(hidden)}, expected [n, hidden]; flatten the token dimensions first, "
            f"hidden.reshape(-1, hidden.shape[-1])"
        )
    if hidden.dtype not in (*DTYPES, torch.float64):
        raise ValueError(f"hidden is {hidden.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight is {describe(weight)}, expected [vocab/tp, {hidden.shape[1]}] {hidden.dtype}, as hidden is "
            f"{describe(hidden)}"
        )
    if weight.device != hidden.device:
        raise ValueError(f"weight is on {weight.device}, hidden is on {hidden.device}; move one of them")
    if not 0 <= valid_cols <= weight.shape[0]:
        raise ValueError(f"valid_cols={valid_cols} is outside [0, {weight.shape[0]}], the rows of weight")
