"""The ops of csrc/ in plain PyTorch: the oracle of their tests, and the fallback when they are not compiled.

The raw ops have the signatures and contracts of csrc/bindings/ops.cpp and the formulas of csrc/core/logprob.h; those of
the loss are in `reference_loss`. They compute in float32, or in float64 when the logits are float64. `token_logprobs`
is a second implementation, by log_softmax and autograd, that shares no line with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgrpo.ops.reference_loss import policy_loss, segment_sums

__all__ = [
    "kept_grad",
    "kept_stats",
    "logprob_grad_",
    "logprob_grad_out",
    "logprob_merge",
    "logprob_stats",
    "policy_loss",
    "segment_sums",
    "token_logprobs",
]


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    valid_cols: int | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, from whole rows `[tokens, vocab]`.

    Differentiable by autograd. Targets and the ids of kept sets index columns; there are no shards here.
    """
    x = logits if rows is None else logits[rows]
    x = x[:, :valid_cols].to(_compute_dtype(logits))
    if kept is not None:
        is_kept = torch.zeros_like(x, dtype=torch.bool)
        row = torch.arange(x.shape[0], device=x.device).repeat_interleave(kept[1].diff())
        is_kept[row, kept[0].long()] = True
        x = x.masked_fill(~is_kept, -torch.inf)
    temperature = torch.as_tensor(temperature, dtype=x.dtype, device=x.device).reshape(-1, 1)
    logp = torch.log_softmax(x / temperature, dim=1)
    p = logp.exp()
    # p log p is 0 at p = 0, and so is its gradient; log p itself is -inf there.
    entropy = -(p * torch.where(p > 0, logp, 0.0)).sum(1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def logprob_stats(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    vocab_start: int,
    valid_cols: int,
    inv_temp: Tensor,
    entropy: bool,
) -> Tensor:
    """m, s, w, t `[4, n]` of one vocabulary slice."""
    x = (logits if rows is None else logits[rows])[:, :valid_cols].to(_compute_dtype(logits))
    n = targets.shape[0]
    lowest = x.new_full((n,), -torch.inf)
    if valid_cols == 0:
        return torch.stack([lowest, torch.zeros_like(lowest), torch.zeros_like(lowest), lowest])
    m = x.amax(1)
    d = (x - torch.where(m > -torch.inf, m, 0.0)[:, None]) * inv_temp[:, None]
    e = d.exp()
    s = e.sum(1)
    w = (e * torch.where(e > 0, d, 0.0)).sum(1) if entropy else torch.zeros_like(s)
    column = targets - vocab_start
    is_owned = (column >= 0) & (column < valid_cols)
    t = torch.where(is_owned, x.gather(1, column.clamp(0, valid_cols - 1)[:, None])[:, 0], lowest)
    return torch.stack([m, s, w, t])


def logprob_merge(stats: Tensor, inv_temp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob `[n]`, entropy `[n]` and merged stats `[4, n]` from the stats `[parts, 4, n]` of all slices."""
    part_m, part_s, part_w, part_t = stats.unbind(1)
    m, t = part_m.amax(0), part_t.amax(0)
    d = torch.where(part_m > -torch.inf, (part_m - m) * inv_temp, 0.0)
    k = d.exp()
    s = (k * part_s).sum(0)
    w = torch.where(k > 0, k * (part_w + d * part_s), 0.0).sum(0)
    log_s = s.log()
    return inv_temp * (t - m) - log_s, log_s - w / s, torch.stack([m, s, w, t])


def logprob_grad_out(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    inv_rows: Tensor | None,
    vocab_start: int,
    valid_cols: int,
    inv_temp: Tensor,
    stats: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
) -> None:
    """Writes d sum(g_logprob * logprob + g_entropy * entropy) / d logits into `out`, which may be the logits."""
    has_cotangent = g_logprob != 0 if g_entropy is None else (g_logprob != 0) | (g_entropy != 0)
    entry = torch.arange(logits.shape[0], device=logits.device) if inv_rows is None else inv_rows.long()
    is_live = entry >= 0
    if targets.shape[0]:
        is_live &= has_cotangent[entry.clamp(min=0)]
    live = is_live.nonzero()[:, 0]
    i = entry[live]

    inv_temp = inv_temp.expand(targets.shape[0])[i, None]
    m, s, w, _ = (stat[i, None] for stat in stats)
    d = (logits[live, :valid_cols].to(stats.dtype) - m) * inv_temp
    e = d.exp()
    p = e / s
    g = g_logprob[i, None]
    dx = -p * g
    if g_entropy is not None:
        dx -= p * g_entropy[i, None] * (torch.where(e > 0, d, 0.0) - w / s)
    column = targets[i] - vocab_start
    is_owned = (column >= 0) & (column < valid_cols)
    if valid_cols:
        dx.scatter_add_(1, column.clamp(0, valid_cols - 1)[:, None], torch.where(is_owned[:, None], g, 0.0))
    out.zero_()
    out[:, :valid_cols].index_copy_(0, live, (inv_temp * dx).to(out.dtype))


def logprob_grad_(
    logits: Tensor,
    targets: Tensor,
    inv_rows: Tensor | None,
    vocab_start: int,
    valid_cols: int,
    inv_temp: Tensor,
    stats: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
) -> None:
    """`logprob_grad_out` over the logits themselves."""
    logprob_grad_out(logits, logits, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob, g_entropy)


def kept_stats(
    values: Tensor, ids: Tensor, offsets: Tensor, targets: Tensor, inv_temp: Tensor, entropy: bool
) -> Tensor:
    """m, s, w, t `[4, n]` of one shard's part of kept sets."""
    n = targets.shape[0]
    row = torch.arange(n, device=values.device).repeat_interleave(offsets.diff(), output_size=values.shape[0])
    lowest = values.new_full((n,), -torch.inf)
    # A NaN is not a maximum; s shows it.
    m = lowest.scatter_reduce(0, row, values.masked_fill(values.isnan(), -torch.inf), "amax")
    e, d = _kept_terms(values, row, m, inv_temp)
    s = torch.zeros_like(m).index_add(0, row, e)
    w = torch.zeros_like(m).index_add(0, row, e * d) if entropy else torch.zeros_like(m)
    t = lowest.scatter_reduce(0, row, values.masked_fill(ids != targets[row], -torch.inf), "amax")
    return torch.stack([m, s, w, t])


def kept_grad(
    values: Tensor,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    inv_temp: Tensor,
    stats: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
) -> Tensor:
    """d sum(g_logprob * logprob + g_entropy * entropy) / d values `[m]`."""
    n = targets.shape[0]
    row = torch.arange(n, device=values.device).repeat_interleave(offsets.diff(), output_size=values.shape[0])
    m, s, w, _ = stats
    e, d = _kept_terms(values, row, m, inv_temp)
    p, g = e / s[row], g_logprob[row]
    is_live = g != 0
    dv = g * ((ids == targets[row]).to(p.dtype) - p)
    if g_entropy is not None:
        is_live |= g_entropy[row] != 0
        dv -= g_entropy[row] * p * (d - (w / s)[row])
    return torch.where(is_live, inv_temp.expand(n)[row] * dv, 0.0)


def _kept_terms(values: Tensor, row: Tensor, m: Tensor, inv_temp: Tensor) -> tuple[Tensor, Tensor]:
    """e^d and d = b (v - m) of each value, d being 0 where e^d is."""
    d = inv_temp.expand(m.shape[0])[row] * (values - torch.where(m > -torch.inf, m, 0.0)[row])
    e = d.exp()
    return e, torch.where(e == 0, 0.0, d)


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
