"""The ops of csrc/ in plain PyTorch: the oracle of their tests, and what runs when they are not compiled.

The raw ops have the signatures and contracts of csrc/bindings/ops.cpp and the formulas of csrc/core/logprob.h. They
compute in float32, or in float64 when the logits are float64. `token_logprobs` is the same mathematics a second time,
by log_softmax and autograd, and shares no line with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = (
    "loss",
    "count",
    "policy",
    "penalty",
    "ratio",
    "ratio_deviation",
    "approx_kl",
    "clipped_low",
    "clipped_high",
    "bounded",
    "kl0",
    "kl1",
    "kl2",
    "kl3",
    "rho",
    "rho_clamped",
    "rho_dropped_low",
    "rho_dropped_high",
    "known_rollout",
    "mismatch",
    "mismatch_square",
    "mismatch_tail",
    "rollout_kl",
    "mismatch_max",
)
"""What `policy_loss` adds up for each sequence; order and meaning as `Column` in csrc/core/policy_loss.h."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    valid_cols: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, from whole rows `[tokens, vocab]`.

    Differentiable by autograd. Targets index columns; there are no shards here.
    """
    x = logits if rows is None else logits[rows]
    x = x[:, :valid_cols].to(_compute_dtype(logits))
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


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    keep: Tensor | None,
    cu_seqlens: Tensor,
    seq_log_ratio: Tensor | None,
    seq_log_rho: Tensor | None,
    seq_log_rho_mask: Tensor | None,
    surrogate: int,
    ratio_level: int,
    clip_low: float,
    clip_high: float,
    delta: float,
    dual_clip: float,
    beta: float,
    kl_estimator: int,
    kl_bias_correction: bool,
    use_rho: bool,
    rho_clamp_low: float,
    rho_clamp_high: float,
    rho_mask_low: float,
    rho_mask_high: float,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients `[n]` and `[num_seqs]`, by autograd, and sums `[num_seqs, columns]` of core/policy_loss.h's loss.

    Surrogate 3, which only exists here, is SAPO (arXiv 2511.20347): -A sigmoid(tau (r - 1)) 4 / tau.
    """
    n, num_seqs = len(logprobs), len(cu_seqlens) - 1
    segment = per_token(torch.arange(num_seqs, device=logprobs.device), cu_seqlens, n)
    trained = weights != 0
    no = torch.zeros_like(trained)

    def known(x: Tensor) -> Tensor:
        return torch.where(trained, x, 0.0)

    # The engine's other probabilities: constants.
    old = torch.where(old_logprobs.isfinite(), old_logprobs, logprobs.detach())
    knows_rollout, mismatch = no, torch.zeros_like(logprobs)
    if rollout_logprobs is not None:
        knows_rollout = trained & rollout_logprobs.isfinite()
        mismatch = torch.where(knows_rollout, old - rollout_logprobs, 0.0)
    token_rho = mismatch.clamp(-10, 10).exp()
    rho, rho_clamped, too_low, too_high = no.to(old.dtype), no, no, no
    factor = torch.ones_like(old) if keep is None else keep
    if use_rho:
        free = token_rho if seq_log_rho is None else seq_log_rho.clamp(-10, 10).exp()[segment]
        judged = token_rho if seq_log_rho_mask is None else seq_log_rho_mask.clamp(-10, 10).exp()[segment]
        too_low = judged < rho_mask_low if rho_mask_low > 0 else no
        too_high = judged > rho_mask_high if rho_mask_high > 0 else no
        held = free.clamp(rho_clamp_low, rho_clamp_high if rho_clamp_high > 0 else torch.inf)
        rho_clamped = held != free
        rho = torch.where(too_low | too_high, 0.0, held)
        factor = factor * rho

    with torch.enable_grad():
        leaf = logprobs.detach().clone().requires_grad_()
        seq_leaf = (
            leaf.new_zeros(num_seqs) if seq_log_ratio is None else seq_log_ratio.detach().clone()
        ).requires_grad_()
        x = known(leaf)
        a = known(advantages if len(advantages) == n else advantages[segment])
        log_ratio = known(leaf - old if ratio_level == 0 else seq_leaf[segment])
        ratio = log_ratio.clamp(-40, 40).exp()
        if ratio_level == 2:
            ratio = ratio.detach() * (x - x.detach()).exp()
        r = ratio.detach()

        low, high, bounded = no, no, no
        if surrogate == 2:
            policy = -a * x
        elif surrogate == 3:
            tau = torch.where(a > 0, a.new_tensor(sapo_temperature_pos), a.new_tensor(sapo_temperature_neg))
            policy = -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        elif surrogate == 1:
            policy = -a * r.clamp(max=clip_high) * x
            high = r > clip_high
        else:
            unclipped = (ratio.clamp(max=delta) if delta > 0 else ratio) * a
            clipped = ratio.clamp(clip_low, clip_high) * a
            policy = -torch.minimum(unclipped, clipped)
            low, high = (clipped < unclipped) & (r < clip_low), (clipped < unclipped) & (r > clip_high)
            if delta > 0:
                bounded = (clipped >= unclipped) & (r > delta) & (a != 0)
            if dual_clip > 0:
                worst = -a * dual_clip
                bounded = bounded | ((a < 0) & (policy > worst))
                policy = torch.where(a < 0, torch.minimum(policy, worst), policy)
        # Not a product: infinity that is left out must not become NaN.
        policy = torch.where(factor != 0, factor * policy, 0.0)

        d = torch.zeros_like(x) if ref_logprobs is None else known(leaf - ref_logprobs).clamp(-40, 40)
        kls = (d, d.square() / 2, torch.expm1(-d) + d, ratio * d)
        penalty = beta * kls[kl_estimator] * (ratio if kl_bias_correction else 1.0)
        penalty = penalty if ref_logprobs is not None and beta != 0 else torch.zeros_like(x)
        loss = known(weights * (policy + penalty))
        grad, seq_grad = torch.autograd.grad(loss.sum(), (leaf, seq_leaf), allow_unused=True, materialize_grads=True)

    counts = factor != 0
    rows = [loss, trained, policy, penalty, r, (r - 1).square(), (x - old).square() / 2]
    rows += [low & counts, high & counts, bounded & counts, *kls, rho, rho_clamped, too_low, too_high]
    rows += [knows_rollout, mismatch.abs(), mismatch.square(), (token_rho < 0.9) | (token_rho > 1.1)]
    rows += [no if rollout_logprobs is None else torch.where(knows_rollout, rollout_logprobs - x, 0.0)]
    table = torch.stack([known(row.detach().to(logprobs.dtype)) for row in rows], 1)
    sums = table.new_zeros(num_seqs, len(rows)).index_add_(0, segment, table)
    largest = table.new_full((num_seqs,), -torch.inf)
    largest = largest.scatter_reduce(0, segment[knows_rollout], mismatch.abs()[knows_rollout], "amax")
    return grad, seq_grad, torch.cat((sums, largest[:, None]), 1)


def segment_sums(x: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of weights x, and of weights, of each sequence: `[2, num_seqs]`."""
    num_seqs = len(cu_seqlens) - 1
    segment = per_token(torch.arange(num_seqs, device=x.device), cu_seqlens, len(x))
    rows = torch.stack((torch.where(weights != 0, weights * x, 0.0), weights))
    return rows.new_zeros(2, num_seqs).index_add_(1, segment, rows)


def per_token(values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Each sequence's value `[num_seqs]` at each of its tokens, `[tokens]`."""
    # Without output_size a GPU would have to tell the host the sum of the lengths.
    return torch.repeat_interleave(values, cu_seqlens.diff(), output_size=num_tokens)


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
