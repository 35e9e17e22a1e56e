"""The norm and the clipping of gradients where neither Transformer Engine nor apex is installed."""

from __future__ import annotations

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

REBOUND: tuple[tuple[str, str, str], ...] = (
    # (module under megatron.core, name, why)
    ("optimizer.clip_grads", "l2_norm_impl", "waits for the device once for every tensor"),
    ("optimizer.clip_grads", "multi_tensor_scale_impl", "launches two kernels and makes a copy for every tensor"),
)


def install() -> None:
    """Replace Megatron's norm and scale if they are its own stand-ins. May be called again."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def _norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors, `[1]` float32 on their device, which the host does not wait for."""
    norm = torch.nn.utils.get_total_norm([tensor for tensors in lists for tensor in tensors])
    return norm.float().view(1), None


def _scale(chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> None:
    """The second list <- factor x the first, which may be the same tensors."""
    source, target = lists
    if source is not target:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor)
