"""The loss ops of csrc/ in plain PyTorch: the oracle of their tests, and the fallback when they are not compiled.

Signatures as in csrc/bindings/ops.cpp, formulas as in csrc/core/policy_loss.h, gradients by autograd. Computed in the
dtype of the operands, float64 included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgrpo.ops.settings import LossSettings


class _Rho(NamedTuple):
    """`[tokens]` each: the weight of the policy term, and True where it was clamped or dropped."""

    weight: Tensor
    is_clamped: Tensor
    is_low: Tensor
    is_high: Tensor


class _Term(NamedTuple):
    """`[tokens]` each: the policy term before its factors, and True where it was clipped or bounded."""

    policy: Tensor
    is_low: Tensor
    is_high: Tensor
    is_bounded: Tensor


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
    settings: LossSettings | Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients `[n]` and `[num_seqs]`, and sums `[num_seqs, columns]`.

    Args:
        settings: as numbers like the compiled op's, or the record, whose surrogate may then be a function.
    """
    if not isinstance(settings, LossSettings):
        settings = LossSettings.of_numbers(settings)
    n, num_seqs = len(logprobs), len(cu_seqlens) - 1
    segment = per_token(torch.arange(num_seqs, device=logprobs.device), cu_seqlens, n)
    trained = weights != 0
    no = torch.zeros_like(trained)

    def known(x: Tensor) -> Tensor:
        return torch.where(trained, x, 0.0)

    # The engine's other probabilities: constants.
    old = torch.where(old_logprobs.isfinite(), old_logprobs, logprobs.detach())
    knows_rollout, mismatch = _mismatch(old, rollout_logprobs, trained)
    token_rho = mismatch.clamp(-10, 10).exp()
    rho = _rho(settings, token_rho, seq_log_rho, seq_log_rho_mask, segment)
    factor = (torch.ones_like(old) if keep is None else keep) * (rho.weight if settings.use_rho else 1.0)

    with torch.enable_grad():
        leaf = logprobs.detach().clone().requires_grad_()
        seq_leaf = leaf.new_zeros(num_seqs) if seq_log_ratio is None else seq_log_ratio.detach().clone()
        seq_leaf.requires_grad_()
        x = known(leaf)
        a = known(advantages if len(advantages) == n else advantages[segment])
        ratio = _ratio(settings, known(leaf - old if settings.ratio_level == "token" else seq_leaf[segment]), x)
        term = _term(settings, ratio, x, a)
        # Not a product: infinity that is left out must not become NaN.
        policy = torch.where(factor != 0, factor * term.policy, 0.0)
        d = torch.zeros_like(x) if ref_logprobs is None else known(leaf - ref_logprobs).clamp(-40, 40)
        kls = (d, d.square() / 2, torch.expm1(-d) + d, ratio * d)
        penalty = _penalty(settings, kls, ratio, leaf) if ref_logprobs is not None else torch.zeros_like(x)
        loss = known(weights * (policy + penalty))
        grad, seq_grad = torch.autograd.grad(loss.sum(), (leaf, seq_leaf), allow_unused=True, materialize_grads=True)

    counts, r = factor != 0, ratio.detach()
    columns = [loss, trained, policy, penalty, r, (r - 1).square(), (x - old).square() / 2]
    columns += [term.is_low & counts, term.is_high & counts, term.is_bounded & counts, *kls, *rho]
    columns += [knows_rollout, mismatch.abs(), mismatch.square(), (token_rho < 0.9) | (token_rho > 1.1)]
    columns += [no if rollout_logprobs is None else torch.where(knows_rollout, rollout_logprobs - x, 0.0)]
    table = torch.stack([known(column.detach().to(logprobs.dtype)) for column in columns], 1)
    sums = table.new_zeros(num_seqs, len(columns)).index_add_(0, segment, table)
    return grad, seq_grad, torch.cat((sums, _largest(mismatch.abs(), knows_rollout, segment, num_seqs)), 1)


def _largest(values: Tensor, chosen: Tensor, segment: Tensor, num_seqs: int) -> Tensor:
    """The largest of the chosen values `[tokens]` of each sequence, `[num_seqs, 1]`; -inf without any."""
    largest = values.new_full((num_seqs,), -torch.inf)
    return largest.scatter_reduce(0, segment[chosen], values[chosen], "amax")[:, None]


def _mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor | None, trained: Tensor) -> tuple[Tensor, Tensor]:
    """`[tokens]` each: True where the engine's logprob is finite, and the old one minus it there, else 0."""
    if rollout_logprobs is None:
        return torch.zeros_like(trained), torch.zeros_like(old_logprobs)
    is_known = trained & rollout_logprobs.isfinite()
    return is_known, torch.where(is_known, old_logprobs - rollout_logprobs, 0.0)


def _ratio(settings: LossSettings, log_ratio: Tensor, logprobs: Tensor) -> Tensor:
    """The ratio `[tokens]`; at level "sequence_token" with the gradient of each token's logprob."""
    ratio = log_ratio.clamp(-40, 40).exp()
    return ratio.detach() * (logprobs - logprobs.detach()).exp() if settings.ratio_level == "sequence_token" else ratio


def _rho(
    settings: LossSettings,
    token_rho: Tensor,
    seq_log_rho: Tensor | None,
    seq_log_rho_mask: Tensor | None,
    segment: Tensor,
) -> _Rho:
    """Rho from the logs of the rho that multiplies and of the one that the mask bounds apply to; all 0 without rho."""
    no = torch.zeros_like(token_rho, dtype=torch.bool)
    if not settings.use_rho:
        return _Rho(no.to(token_rho.dtype), no, no, no)
    free, judged = (
        token_rho if x is None else x.clamp(-10, 10).exp()[segment] for x in (seq_log_rho, seq_log_rho_mask)
    )
    is_low = judged < settings.rho_mask_low if settings.rho_mask_low > 0 else no
    is_high = judged > settings.rho_mask_high if settings.rho_mask_high > 0 else no
    held = free.clamp(settings.rho_clamp_low, settings.rho_clamp_high if settings.rho_clamp_high > 0 else torch.inf)
    return _Rho(torch.where(is_low | is_high, 0.0, held), held != free, is_low, is_high)


def _penalty(settings: LossSettings, kls: Sequence[Tensor], ratio: Tensor, logprobs: Tensor) -> Tensor:
    """The weighted KL estimate `[tokens]`; 0 with beta 0, whatever the estimates."""
    if settings.beta == 0:
        return torch.zeros_like(ratio)
    kl = kls[settings.kl_estimator]
    if not settings.kl_bias_correction:
        return settings.beta * kl
    if settings.kl_estimator != 2 or settings.ratio_level == "sequence":
        return settings.beta * kl * ratio
    # As in the kernel: the e^-d of the two terms cancel and leave d r, which fp32 would lose when e^-d is large.
    d = kls[0]
    d_ratio, d_d = (torch.autograd.grad(y.sum(), logprobs, retain_graph=True)[0] for y in (ratio, d))
    slope = torch.expm1(-d) * (d_ratio - d_d * ratio) + d * d_ratio
    return settings.beta * _WithSlope.apply(logprobs, kl * ratio, slope)


class _WithSlope(torch.autograd.Function):
    """A value whose derivative in x is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope.detach())
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return g * slope, None, None


def _term(settings: LossSettings, ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> _Term:
    """The surrogate of each token, with a graph; all arguments `[tokens]`."""
    a, r = advantages, ratio.detach()
    no = torch.zeros_like(r, dtype=torch.bool)
    if callable(settings.surrogate):
        return _Term(settings.surrogate(ratio, logprobs, a), no, no, no)
    if settings.surrogate == "reinforce":
        return _Term(-a * logprobs, no, no, no)
    if settings.surrogate == "cispo":
        weight = r.clamp(settings.ratio_low, settings.ratio_high)
        return _Term(-a * weight * logprobs, r < settings.ratio_low, r > settings.ratio_high, no)
    unclipped = (ratio.clamp(max=settings.delta) if settings.delta > 0 else ratio) * a
    clipped = ratio.clamp(settings.ratio_low, settings.ratio_high) * a
    policy, is_clipped, is_bounded = -torch.minimum(unclipped, clipped), clipped < unclipped, no
    if settings.delta > 0:
        is_bounded = (clipped >= unclipped) & (r > settings.delta) & (a != 0)
    if settings.dual_clip > 0:
        worst = -a * settings.dual_clip
        is_bounded = is_bounded | ((a < 0) & (policy > worst))
        policy = torch.where(a < 0, torch.minimum(policy, worst), policy)
    return _Term(policy, is_clipped & (r < settings.ratio_low), is_clipped & (r > settings.ratio_high), is_bounded)


def segment_sums(x: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of weights x, and of weights, of each sequence: `[2, num_seqs]`."""
    num_seqs = len(cu_seqlens) - 1
    segment = per_token(torch.arange(num_seqs, device=x.device), cu_seqlens, len(x))
    rows = torch.stack((torch.where(weights != 0, weights * x, 0.0), weights))
    return rows.new_zeros(2, num_seqs).index_add_(1, segment, rows)


def per_token(values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Each sequence's value `[num_seqs]` at each of its tokens, `[tokens]`."""
    # Without output_size the host would read the sum of the lengths from a GPU.
    return torch.repeat_interleave(values, cu_seqlens.diff(), output_size=num_tokens)
