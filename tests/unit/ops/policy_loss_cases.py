"""Operands and settings for policy_loss, and how its tests call it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mgrpo.ops import LossSettings, policy_loss
from mgrpo.ops.settings import SETTINGS

LEVELS = ("token", "sequence", "sequence_token")
LENGTHS = (5, 0, 37, 300, 1, 8, 64)
EXTREME, UNTRAINED = 0, 5  # sequences with log ratios of +-50, and without any trained token

OFF = {
    "surrogate": "ppo_clip",
    "ratio_level": "token",
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "delta": 0.0,
    "dual_clip": 0.0,
    "beta": 0.0,
    "kl_estimator": 2,
    "kl_bias_correction": False,
    "use_rho": False,
    "rho_clamp_low": 0.0,
    "rho_clamp_high": 0.0,
    "rho_mask_low": 0.0,
    "rho_mask_high": 0.0,
}
"""Settings that a case does not name: the plain clipped loss."""
BY_TOKEN = {"use_rho": True}
BY_SEQUENCE = {"use_rho": True, "by_sequence": True}
CLAMP = {"rho_clamp_low": 0.75, "rho_clamp_high": 1.25}
MASK = {"rho_mask_low": 0.7, "rho_mask_high": 1.4}
# Every part of the loss at once: clip, delta and dual clip, a KL penalty with the ratio in it, rho clamped and masked.
EVERYTHING = {
    "beta": 0.1,
    "kl_estimator": 3,
    "kl_bias_correction": True,
    "delta": 1.6,
    "dual_clip": 1.5,
    "use_rho": True,
    **CLAMP,
    **MASK,
}
RHO = [{}] + [by | bounds for by in (BY_TOKEN, BY_SEQUENCE) for bounds in ({}, CLAMP, MASK, CLAMP | MASK)]


class Result(NamedTuple):
    """What policy_loss gives; seq_grad is zeros where the ratio is each token's own."""

    loss: Tensor
    grad: Tensor
    seq_grad: Tensor
    sums: Tensor


def make_operands(lengths: tuple[int, ...] = LENGTHS, *, smooth: bool = False) -> dict[str, Tensor]:
    """Every tensor that policy_loss takes, by name. The ratio level and the corrections decide which a call gets.

    Unless smooth: a fifth of the tokens has weight 0 over values that are not finite, some trained tokens have no finite
    old or rollout logprob, and sequences EXTREME and UNTRAINED are what their names say.
    """
    n, num_seqs = sum(lengths), len(lengths)
    logprobs = -3 * torch.rand(n) - 0.01
    old = logprobs + 0.4 * torch.randn(n)
    operands = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "ref_logprobs": logprobs + 0.5 * torch.randn(n),
        "rollout_logprobs": old + 0.3 * torch.randn(n),
        "advantages": torch.randn(n),
        "weights": torch.rand(n) + 0.1,
        "keep": torch.tensor([0.0, 0.5, 1.0, 1.0])[torch.randint(4, (n,))],
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "seq_log_ratio": 0.3 * torch.randn(num_seqs),
        "seq_log_rho": 0.3 * torch.randn(num_seqs),
        "seq_log_rho_mask": 0.3 * torch.randn(num_seqs),
    }
    if not smooth:
        _spoil(operands)
    return operands


def _spoil(operands: dict[str, Tensor]) -> None:
    cu_seqlens = operands["cu_seqlens"].tolist()
    token = torch.arange(cu_seqlens[-1])
    not_finite = torch.tensor([torch.nan, torch.inf, -torch.inf])[token % 3]
    start = cu_seqlens[EXTREME]
    operands["old_logprobs"][start : start + 5] += torch.tensor([50.0, -50.0, 0, 0, 0])
    operands["ref_logprobs"][start : start + 5] += torch.tensor([0.0, 0.0, 50, -50, 0])
    operands["rollout_logprobs"][start : start + 5] += torch.tensor([0.0, 0.0, 0, 15, -15])
    operands["seq_log_ratio"][EXTREME] = 45.0
    for name, every in (("old_logprobs", 7), ("rollout_logprobs", 5)):
        operands[name] = torch.where(token % every == every - 1, not_finite, operands[name])
    is_untrained = torch.rand(len(token)) < 0.2
    is_untrained[:5] = False
    is_untrained[cu_seqlens[UNTRAINED] : cu_seqlens[UNTRAINED + 1]] = True
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "keep"):
        operands[name] = torch.where(is_untrained, not_finite, operands[name])
    operands["weights"][is_untrained] = 0.0
    is_empty = operands["cu_seqlens"].diff() == 0
    is_empty[UNTRAINED] = True
    for name in ("seq_log_ratio", "seq_log_rho", "seq_log_rho_mask"):
        operands[name][is_empty] = torch.nan


def to(operands: dict[str, Tensor | None], *target: torch.dtype | torch.device | str) -> dict[str, Tensor | None]:
    """The operands in another dtype or on another device; cu_seqlens stays int32."""

    def moved(name: str, x: Tensor) -> Tensor:
        return x.to(*(t for t in target if name != "cu_seqlens" or not isinstance(t, torch.dtype)))

    return {name: None if x is None else moved(name, x) for name, x in operands.items()}


def chosen(operands: dict[str, Tensor], settings: dict) -> tuple[dict[str, Tensor], dict]:
    """The operands that these settings go with, and all settings by name (`by_sequence` is about the operands)."""
    settings = OFF | settings
    left_out = set() if settings.pop("by_sequence", False) else {"seq_log_rho", "seq_log_rho_mask"}
    if settings["ratio_level"] == "token":
        left_out.add("seq_log_ratio")
    return {name: x for name, x in operands.items() if name not in left_out}, settings


def run(operands: dict[str, Tensor], settings: dict, call=policy_loss) -> Result:
    """Loss, gradients and sums; `operands` may hold more than the settings want."""
    operands, settings = chosen(operands, settings)
    leaves = [operands["logprobs"].detach().clone().requires_grad_()]
    if "seq_log_ratio" in operands:
        leaves.append(operands["seq_log_ratio"].detach().clone().requires_grad_())
        operands["seq_log_ratio"] = leaves[1]
    loss, sums = call(**operands | {"logprobs": leaves[0]}, settings=LossSettings(**settings))
    grads = torch.autograd.grad(loss, leaves)
    seq_grad = grads[1] if len(grads) > 1 else torch.zeros(sums.shape[0], dtype=sums.dtype, device=sums.device)
    return Result(loss.detach(), grads[0], seq_grad, sums)


def raw_arguments(operands: dict[str, Tensor | None], **changes: object) -> list:
    """Arguments of torch.ops.mgrpo.policy_loss in their order; `changes` replaces operands and settings, or leaves an
    operand out (None)."""
    names = (
        "logprobs old_logprobs ref_logprobs rollout_logprobs advantages weights keep cu_seqlens seq_log_ratio "
        "seq_log_rho seq_log_rho_mask"
    )
    settings = LossSettings(**OFF | EVERYTHING | {"kl_estimator": 2, "delta": 4.0, "dual_clip": 3.0}).numbers()
    numbers = dict(zip(SETTINGS, settings, strict=True)) | {k: x for k, x in changes.items() if k in SETTINGS}
    tensors = {**operands, "seq_log_ratio": operands["seq_log_ratio"] if numbers["ratio_level"] else None, **changes}
    return [*(tensors[name] for name in names.split()), [float(x) for x in numbers.values()]]


def all_settings(surrogate: str, ratio_level: str, kl_estimator: int) -> Iterator[dict]:
    """Every combination of the settings that these three leave open."""
    for is_corrected, rho, delta, dual_clip in itertools.product((False, True), RHO, (0.0, 1.6), (0.0, 1.5)):
        yield {
            "surrogate": surrogate,
            "ratio_level": ratio_level,
            "kl_estimator": kl_estimator,
            "kl_bias_correction": is_corrected,
            "ratio_low": 0.8,
            "ratio_high": 1.3,
            "beta": 0.1,
            "delta": delta,
            "dual_clip": dual_clip,
        } | rho


def check_close(got: Result, expected: Result, what: object, *, sums_tolerance: float = 2e-5) -> None:
    """fp32 against float64: e^x errs by x roundings, and x is a few units; a sum by roundings of its largest terms."""
    for name, a, b in zip(Result._fields, got, expected, strict=True):
        rtol, atol = (sums_tolerance, sums_tolerance) if name in ("sums", "loss") else (5e-6, 1e-6)
        message = f"{name}, {what}: "
        torch.testing.assert_close(
            a.double().cpu(), b.double().cpu(), rtol=rtol, atol=atol, msg=lambda text, message=message: message + text
        )
