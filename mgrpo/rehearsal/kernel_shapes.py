"""Stand-ins for kernels of a device: functions of the same shapes that keep the same tensors for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex


class _Norm(torch.autograd.Function):
    """Root-mean-square norm: keeps its input and one factor a row. Without a kernel torch takes it to pieces."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Flex(torch.autograd.Function):
    """FlexAttention: keeps its operands, its output, and one logarithm a row and head. Compiling it needs a device."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(operand) for operand in ctx.saved_tensors[:3])


_BIAS_MULTIPLE = 16
"""Elements: rows of a bias are padded to a multiple of them."""


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The numbers that are added for a mask of booleans, for all heads."""
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    padded = F.pad(bias, (0, -bias.shape[-1] % _BIAS_MULTIPLE))[..., : bias.shape[-1]]
    return padded.expand(*query.shape[:-1], key.shape[-2])


def install() -> None:
    """Rebind the functions. Call before their names are imported elsewhere."""
    norm, functional, attention = F.rms_norm, vars(F), vars(flex)
    one_call, efficient = F.scaled_dot_product_attention, torch.ops.aten._scaled_dot_product_efficient_attention

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        # A CPU build does not know CUDA's kernels and would choose the one that keeps all scores. CUDA chooses so only where
        # keys have fewer heads than queries.
        if not query.is_cuda or query.shape[1] != key.shape[1]:
            return one_call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return efficient(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

    def rms_norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        return _Norm.apply(x, weight) if x.is_cuda and weight is not None else norm(x, shape, weight, eps)

    def flex_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        return_aux: flex.AuxRequest | None = None,
        **options: Any,
    ) -> Any:
        out, lse = _Flex.apply(query, key, value)
        return out if return_aux is None else (out, flex.AuxOutput(lse=lse))

    functional["rms_norm"] = rms_norm
    functional["scaled_dot_product_attention"] = scaled_dot_product_attention
    attention["flex_attention"] = flex_attention
