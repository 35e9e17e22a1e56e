"""Attention sinks: a learned logit of each head that takes a share of the softmax and adds no value (gpt-oss).

With `lse` the logarithm of a query's sum of exponentials over its keys, attention with a sink is attention without one times
`sigmoid(lse - sink)`. So kernels without sinks serve, if they return `lse`, or take one more key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mgrpo.parallel.packed import varlen

_MORE = 8
"""Additional dimensions of a head: one is needed, CUDA's kernels need a multiple of 8."""


def kept_share(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Share of attention left by sinks: lse `[..., heads, queries]` and sinks `[heads]` -> `[..., heads, queries]` float32."""
    return torch.sigmoid(lse - sinks.float()[:, None])


def with_sink_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with a key at the end that scores the sink and has value 0; attention to it ends in `[..., :dim]`.

    Args:
        query: `[documents, heads, queries, dim]`.
        key, value: `[documents, heads, keys, dim]`.
        mask: `[documents, 1, queries, keys]` bool; None: causal, with as many queries as keys.
        sinks: `[heads]`.
    Returns:
        Query, key and value with `dim + 8`, and a mask of `keys + 1`.
    """
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    # In an additional dimension every query has sink / scale, the sink's key has 1, and all others have 0.
    logits = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    query = torch.cat((query, F.pad(logits, (0, _MORE - 1))), dim=-1)
    own = key.new_zeros(*key.shape[:2], 1, key.shape[3] + _MORE)
    own[..., key.shape[3]] = 1
    key = torch.cat((F.pad(key, (0, _MORE)), own), dim=2)
    return query, key, F.pad(value, (0, _MORE, 0, 1)), F.pad(mask, (0, 1), value=True)


def flash_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    lengths: Sequence[Any],
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """`varlen.attend` with sinks `[heads]`, by kernels without them."""
    return _FlashWithSinks.apply(query, key, value, sinks, tuple(lengths), scale, window)


class _FlashWithSinks(torch.autograd.Function):
    """With s = sigmoid(lse - sink), out' = s out. The gradients of attention to real keys depend on the softmax
    over keys and sink together, whose sum of exponentials is lse' = log(exp(lse) + exp(sink)), and on the sum of dout out':
    so the kernel's own backward makes them of out' and lse'. The sink's share is 1 - s and its value 0:
        dsink = -sum over queries of (1 - s) (dout . out')
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        lengths: tuple[Any, ...],
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out, lse, random = varlen.forward(query, key, value, lengths, scale=scale, window=window)
        share = kept_share(lse, sinks)
        out = (out * share.T[:, :, None]).to(out.dtype)
        with_sink = torch.logaddexp(lse, sinks.float()[:, None].expand_as(lse))
        ctx.save_for_backward(query, key, value, sinks, out, with_sink, share, random)
        ctx.lengths, ctx.scale, ctx.window = lengths, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse, share, random = ctx.saved_tensors
        dout = gradients[0].contiguous()
        dq, dk, dv = varlen.backward(
            dout, query, key, value, out, lse.contiguous(), random, ctx.lengths, scale=ctx.scale, window=ctx.window
        )
        products = torch.linalg.vecdot(dout.float(), out.float())
        dsinks = -((1 - share) * products.T).sum(1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None
