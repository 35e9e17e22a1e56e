"""Owns the common parts of `token_logprobs` and `linear_logprobs`: checks of their shared arguments, and the collective
between the raw ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the logits that the compiled ops take."""

# torch 2.13 renamed it, and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(stats: Tensor, group: ProcessGroup | None) -> Tensor:
    """Stats `[4, n]`, or other rows, of every rank, in rank order: `[tp, 4, n]`."""
    if group is None:
        return stats[None]
    # gloo and NCCL both take the ranks' tensors concatenated, not stacked.
    gathered = stats.new_empty((group.size() * stats.shape[0], stats.shape[1]))
    _all_gather(gathered, stats, group=group)
    return gathered.view(group.size(), *stats.shape)


def op_cotangents(g_logprobs: Tensor | None, g_entropy: Tensor | None, merged: Tensor) -> tuple[Tensor, Tensor | None]:
    """The cotangents that autograd passes to backward, in the form the ops take; the entropy's may be None, which is cheaper."""
    g_logprobs = torch.zeros_like(merged[0]) if g_logprobs is None else g_logprobs.contiguous()
    return g_logprobs, None if g_entropy is None else g_entropy.contiguous()


def inverse_temperature(temperature: float | Tensor, n: int, logits: Tensor) -> Tensor:
    """1 / temperature on the logits' device, `[1]` or `[n]`."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature={temperature}, expected a finite number > 0")
        return torch.full((1,), 1.0 / temperature, dtype=dtype, device=logits.device)
    if temperature.shape != (n,) or not temperature.is_floating_point():
        raise ValueError(
            f"temperature is {describe(temperature)}, expected a number or a floating-point tensor of shape [{n}], "
            f"one value for each target"
        )
    if temperature.requires_grad:
        raise ValueError("temperature requires grad, but no gradient flows to it; pass temperature.detach()")
    if temperature.device != logits.device:
        raise ValueError(f"temperature is on {temperature.device}, logits are on {logits.device}; move one of them")
    if not torch.compiler.is_compiling() and temperature.device.type == "cpu" and not bool((temperature > 0).all()):
        raise ValueError(f"temperature holds {float(temperature.min())}, expected values > 0")
    return temperature.to(dtype).reciprocal().contiguous()


def check_index(name: str, index: Tensor, n: int, logits: Tensor, hint: str = "") -> None:
    if index.dtype != torch.int64 or index.shape != (n,):
        raise ValueError(f"{name} is {describe(index)}, expected [{n}] torch.int64{hint}")
    if index.device != logits.device:
        raise ValueError(f"{name} is on {index.device}, logits are on {logits.device}; move one of them")


def check_index_values(
    logits: Tensor, targets: Tensor, rows: Tensor | None, vocab_range: tuple[int, int] | None
) -> None:
    """Ranges of targets and rows, on the CPU only: elsewhere, reading them would synchronise with the device."""
    if targets.numel() == 0:
        return
    if vocab_range is not None:
        low, high = int(targets.min()), int(targets.max())
        if low < vocab_range[0] or high >= vocab_range[1]:
            raise ValueError(
                f"targets reach from {low} to {high}, expected ids in [{vocab_range[0]}, {vocab_range[1]}); leave "
                f"ignored tokens out (with rows, or before the call), and pass group when the vocabulary is sharded"
            )
    if rows is not None:
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= logits.shape[0]:
            raise ValueError(f"rows reach from {low} to {high}, expected rows of logits, [0, {logits.shape[0]})")
        if torch.bincount(rows, minlength=logits.shape[0]).max() > 1:
            raise ValueError("rows names a row of logits twice, but a row can have only one target")


def describe(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"
