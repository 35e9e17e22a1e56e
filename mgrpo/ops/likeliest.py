"""Owns the likeliest tokens of each row of logits, without gradients: teacher scores of a policy's tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mgrpo.ops.compiled import ops_for
from mgrpo.ops.head import gather, inverse_temperature
from mgrpo.ops.kept_tokens import KeptSets, picked_dots, picked_logits
from mgrpo.ops.linear import dtype_of_logits, head_chunks

Likeliest = tuple[Tensor, Tensor, Tensor]
"""Logprobs of the targets `[n]`, the k likeliest tokens `[n, k]` int64, the likeliest first, and their logprobs `[n, k]`, fp32.

Where a row has fewer than k tokens: -1 and NaN.
"""


def token_likeliest(
    logits: Tensor,
    targets: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_cols: int | None = None,
    group: ProcessGroup | None = None,
    kept: KeptSets | None = None,
) -> Likeliest:
    """The logprobs of `token_logprobs`, and the likeliest tokens of each row: of its set with `kept`.

    Arguments as there. Collective over `group`: one all-gather of 16 + 12 k bytes a token. All ranks get the same.
    """
    valid_cols = logits.shape[1] if valid_cols is None else valid_cols
    inv_temp, group = inverse_temperature(temperature, len(targets), logits), _several(group)
    if kept is not None:
        values = picked_logits(logits, None, kept, vocab_start=vocab_start, valid_cols=valid_cols, inplace=False)
        return _of_sets(values, kept, targets, k, inv_temp, group)
    chunks = [(slice(0, valid_cols), logits[:, :valid_cols])]
    return _of_chunks(chunks, targets, k, inv_temp, vocab_start, group)


def linear_likeliest(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_cols: int | None = None,
    group: ProcessGroup | None = None,
    logits_chunk: int,
    fp32_logits: bool = False,
    kept: KeptSets | None = None,
) -> Likeliest:
    """`token_likeliest(hidden @ weight.T, targets, k)` that computes `logits_chunk` columns of the logits at a time.

    Arguments as `linear_logprobs`.
    """
    valid_cols = weight.shape[0] if valid_cols is None else valid_cols
    inv_temp, group = inverse_temperature(temperature, len(targets), hidden), _several(group)
    dtype = dtype_of_logits(hidden, fp32_logits)
    if kept is not None:
        values = picked_dots(
            hidden, weight, kept, vocab_start=vocab_start, valid_cols=valid_cols, group=group, dtype=dtype
        )
        return _of_sets(values, kept, targets, k, inv_temp, group)
    chunks = head_chunks(hidden, weight, valid_cols, logits_chunk, dtype)
    return _of_chunks(chunks, targets, k, inv_temp, vocab_start, group)


def _several(group: ProcessGroup | None) -> ProcessGroup | None:
    return None if group is None or group.size() == 1 else group


def _of_chunks(
    chunks: Iterable[tuple[slice, Tensor]],
    targets: Tensor,
    k: int,
    inv_temp: Tensor,
    vocab_start: int,
    group: ProcessGroup | None,
) -> Likeliest:
    """Likeliest tokens from the logits of this rank's columns, some at a time: the columns of a chunk, and its logits `[n, columns]`."""
    parts, best, ids = [], inv_temp.new_empty(len(targets), 0), targets.new_empty(len(targets), 0)
    for columns, logits in chunks:
        ops, start = ops_for(logits), vocab_start + columns.start
        parts.append(ops.logprob_stats(logits, targets, None, start, logits.shape[1], inv_temp, False))
        found, places = logits.topk(min(k, logits.shape[1]))
        best, ids = _best(torch.cat((best, found.to(best)), 1), torch.cat((ids, places + start), 1), k)
    own = ops.logprob_merge(torch.stack(parts), inv_temp)[2]
    return _merged(own, best, ids, k, inv_temp, group)


def _of_sets(
    values: Tensor, kept: KeptSets, targets: Tensor, k: int, inv_temp: Tensor, group: ProcessGroup | None
) -> Likeliest:
    """Likeliest tokens from the values of the sets' entries `[m]`, -inf for those of other ranks."""
    sets, n = kept.entry_targets(), len(targets)
    order = values.argsort(descending=True, stable=True)
    order = order[sets[order].argsort(stable=True)]
    sets = sets[order]
    place = torch.arange(len(order), device=order.device) - kept.offsets[sets]
    # Tokens below the likeliest go to a column that is left out, so that no rank waits for their number.
    at = sets, place.clamp(max=k)
    best = values.new_full((n, k + 1), -torch.inf).index_put_(at, values[order])[:, :k]
    ids = targets.new_full((n, k + 1), -1).index_put_(at, kept.ids[order].long())[:, :k]
    own = ops_for(values).kept_stats(values, kept.ids, kept.offsets, targets, inv_temp, False)
    return _merged(own, best, ids, k, inv_temp, group)


def _merged(own: Tensor, best: Tensor, ids: Tensor, k: int, inv_temp: Tensor, group: ProcessGroup | None) -> Likeliest:
    """Likeliest tokens over all ranks, from the stats `[4, n]` of this one's part, and its likeliest."""
    logprobs, _, (m, s, _, _) = ops_for(own).logprob_merge(gather(own, group), inv_temp)
    # A rank may hold fewer columns than k, or none.
    missing = k - best.shape[1]
    best = torch.nn.functional.pad(best, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
    best, ids = (gather(x.t().contiguous(), group).flatten(0, 1).t() for x in (best, ids))
    best, ids = _best(best, ids, k)
    likeliest = inv_temp.expand(len(m))[:, None] * (best - m[:, None]) - s.log()[:, None]
    is_token = best > -torch.inf
    return logprobs, ids.where(is_token, -1), likeliest.where(is_token, torch.nan)


def _best(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, places = values.topk(min(k, values.shape[1]))
    return values, ids.gather(1, places)
