"""Stand-ins for the private functions of `torch.nn.attention.varlen`, with the signatures of torch 2.11 and of torch 2.13.

torch's flash attention for CPUs, its own forward and backward kernels, computes each sequence. As on CUDA, key and value may
have fewer heads than query.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> Outputs:
    """`_varlen_attn` of torch 2.11."""
    heads, parts = query.shape[1], []
    for rows, keys, mask in sequences(query, cu_seq_q, cu_seq_k, is_causal, window_size):
        own = (by_head(x, heads) for x in (query[rows], key[keys], value[keys]))
        parts.append(flash_cpu(*own, 0.0, False, attn_mask=mask, scale=scale))
    out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
    return out, torch.cat([lse[0] for _, lse in parts], dim=1), torch.zeros(2, dtype=torch.uint64)


def forward_2_13(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Outputs:
    """`_varlen_attn` of torch 2.13."""
    assert cu_seq_k is not None and enable_gqa == (query.shape[1] != key.shape[1])
    return forward_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> Outputs:
    """`_varlen_attn_backward` of torch 2.11, and of torch 2.13."""
    heads, kv_heads = query.shape[1], key.shape[1]
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys, mask in sequences(query, cu_seq_q, cu_seq_k, is_causal, window_size):
        own = [by_head(x, heads) for x in (grad_out[rows], query[rows], key[keys], value[keys], out[rows])]
        gradients = flash_cpu_backward(*own, lse[None, :, rows].contiguous(), 0.0, False, attn_mask=mask, scale=scale)
        q, k, v = (gradient[0].transpose(0, 1) for gradient in gradients)
        dq[rows] = q
        dk[keys] += k.unflatten(1, (kv_heads, -1)).sum(2)
        dv[keys] += v.unflatten(1, (kv_heads, -1)).sum(2)
    return dq, dk, dv


def sequences(
    query: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, is_causal: bool, window: list[int] | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, keys and additive mask of each sequence, whose last query is aligned with its last key."""
    left, right = window or (-1, -1)
    assert is_causal == (left < 0) and right == 0, "mgrpo's calls are causal, with a window or without"
    for q, k in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        ahead = torch.arange(k[1] - k[0]) - (torch.arange(q[1] - q[0])[:, None] + (k[1] - k[0]) - (q[1] - q[0]))
        is_seen = (ahead <= 0) & ((ahead >= -left) if left >= 0 else True)
        mask = torch.zeros(is_seen.shape, dtype=query.dtype).masked_fill(~is_seen, -torch.inf)
        yield slice(*q), slice(*k), mask[None, None]


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[tokens, heads or kv_heads, dim]` -> `[1, heads, tokens, dim]`."""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)[None].contiguous()
