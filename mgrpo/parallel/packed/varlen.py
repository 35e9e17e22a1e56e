"""Calls of torch's variable-length flash attention, with and without the log-sum-exp of each query.

The functions that return lse and take it are private, and arguments differ between versions of torch: their operands go by
keyword, and `can_attend` compares the installed signatures with the calls made here.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch

_NUM_OPERANDS = 7
"""Positional arguments of the public function: query, key, value and `lengths`."""
_SETTINGS = ("scale", "window_size", "enable_gqa")
_LENGTHS = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
_FORWARD = ("query", "key", "value", *_LENGTHS, "is_causal", *_SETTINGS)
_BACKWARD = (
    *("grad_out", "query", "key", "value", "out", "lse", *_LENGTHS),
    *("is_causal", "rng_state", "scale", "window_size"),
)


def can_attend(*, with_lse: bool) -> bool:
    """True if the installed torch accepts the calls of `attend` or, `with_lse`, of `forward` and `backward`; warns once if not."""
    from torch.nn.attention import varlen

    names = ("_varlen_attn", "_varlen_attn_backward") if with_lse else ("varlen_attn",)
    return _take_calls(tuple((name, getattr(varlen, name, None)) for name in names))


@functools.cache
def _take_calls(functions: tuple[tuple[str, Any], ...]) -> bool:
    calls = {
        "varlen_attn": (_NUM_OPERANDS, _SETTINGS),
        "_varlen_attn": (0, _FORWARD),
        "_varlen_attn_backward": (0, _BACKWARD),
    }
    differences = []
    for name, function in functions:
        num_operands, keywords = calls[name]
        try:
            # A custom op takes any argument; its function has the signature.
            signature = inspect.signature(getattr(function, "_init_fn", function))
            signature.bind(*(None,) * num_operands, **dict.fromkeys(keywords))
        except TypeError as err:
            differences.append(f"{name}: {err}")
    if differences:
        logging.getLogger(__name__).warning(
            "attention: one padded call for all documents of a pack, slower and with more memory; the flash attention of "
            "torch %s differs from that of torch 2.13 in torch.nn.attention.varlen (%s)",
            torch.__version__,
            "; ".join(differences),
        )
    return not differences


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[Any],
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of each sequence.

    Args:
        query: `[queries, heads, dim]` bfloat16 or float16.
        key, value: `[keys, kv_heads, dim]`.
        lengths: `cu_seqlens_q`, `cu_seqlens_kv` (int32), the longest sequence of queries and of keys.
        window: keys that a query attends to, its own included; None: all up to its own.
    Returns:
        `[queries, heads, dim]`.
    """
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        *lengths,
        scale=scale,
        window_size=(_left(window), 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)  # A tuple only where auxiliary outputs are requested.
    return out


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[Any],
    *,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend` without gradients: the output, lse `[heads, queries]` float32, and the state of a dropout of 0."""
    from torch.nn.attention import varlen

    return varlen._varlen_attn(
        query=query,
        key=key,
        value=value,
        **dict(zip(_LENGTHS, lengths, strict=True)),
        is_causal=window is None,
        scale=scale,
        window_size=[_left(window), 0],
        enable_gqa=query.shape[1] != key.shape[1],
    )


def backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    random: torch.Tensor,
    lengths: Sequence[Any],
    *,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value by the kernel of `forward`, for this output and lse."""
    from torch.nn.attention import varlen

    return varlen._varlen_attn_backward(
        grad_out=dout,
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        **dict(zip(_LENGTHS, lengths, strict=True)),
        is_causal=window is None,
        rng_state=random,
        scale=scale,
        window_size=[_left(window), 0],
    )


def _left(window: int | None) -> int:
    """torch's left window: keys before the query's own, -1 for all."""
    return -1 if window is None else window - 1
