"""The gated delta rule and the convolution before it, over packs of documents.

Each head has a state S `[key_dim, value_dim]`, zero before a document's first token, which reads (arXiv:2412.06464, equation 10)
    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t
On CUDA the kernels of flash-linear-attention compute it where they are installed. Otherwise a document is cut into chunks:
within a chunk the rule is a triangular system (section 3.3), between chunks a scan over states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mgrpo.parallel import backend

CHUNK = 64
_EPS = 1e-6
"""Epsilon of the norm of queries and keys."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Places of a pack's tokens when every document is padded to whole chunks, so that none holds two documents.

    The first chunks of all documents come first, those of longer documents before others, then all second chunks, and so on:
    a step of the scan reads contiguous rows, and documents that have ended are at the end.

    A state cannot be masked: in place of a document with branches there is one for each branch, with a copy of the trunk.
    """

    rows: torch.Tensor
    """`[tokens]` int64, each token's row in `[chunks * CHUNK]`."""
    alive: tuple[int, ...]
    """Number of documents with a first chunk, a second chunk, and so on."""
    offsets: torch.Tensor
    """`[tokens]` int64, number of tokens of its document before each."""
    cu_seqlens: torch.Tensor
    """`[documents + 1]` int64."""
    copied: torch.Tensor | None
    """`[tokens]` int64, the token of the pack that each copies; None: no branches."""
    firsts: torch.Tensor | None
    """`[tokens of the pack]` int64, the first copy of each."""

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, branches: np.ndarray) -> Chunks:
        """Chunks from the bounds of documents, `[documents + 1]`, and each token's branch, as in `packs.describe`.

        Both are on the host, and nothing waits for the device.
        """
        copied = None
        if branches.max() > 1:
            sequences = [*_sequences(cu_seqlens, branches)]
            copied, cu_seqlens = np.concatenate(sequences), np.cumsum([0, *map(len, sequences)])
        lengths = np.diff(cu_seqlens)
        counts = -(-lengths // CHUNK)
        rank = np.empty_like(counts)
        rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        alive = (counts[:, None] > np.arange(counts.max())).sum(0)
        begin = np.cumsum(alive) - alive
        offsets = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
        step, place = np.divmod(offsets, CHUNK)
        return cls(
            rows=backend.to_device((begin[step] + np.repeat(rank, lengths)) * CHUNK + place, np.int64),
            alive=tuple(alive.tolist()),
            offsets=backend.to_device(offsets, np.int64),
            cu_seqlens=backend.to_device(cu_seqlens, np.int64),
            copied=None if copied is None else backend.to_device(copied, np.int64),
            firsts=None if copied is None else backend.to_device(np.unique(copied, return_index=True)[1], np.int64),
        )


def _sequences(cu_seqlens: np.ndarray, branches: np.ndarray) -> Iterator[np.ndarray]:
    """The tokens of each branch of each document, behind those of its trunk."""
    for start, stop in pairwise(cu_seqlens.tolist()):
        own = branches[start:stop]
        trunk = int((own == 0).sum())
        assert not own[:trunk].any()
        for branch in range(1, max(int(own.max()), 1) + 1):
            yield start + np.flatnonzero((own == 0) | (own == branch))


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """SiLU of each channel's own convolution over the last tokens of the same document; sums are float32.

    Args:
        x: `[tokens, channels]`.
        weight: `[channels, width]`; the last column multiplies the token itself.
        offsets: as in `Chunks`.
    """
    wide = x.to(_accumulated(x.dtype))
    total = wide * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(x)]
        total = total + torch.where((offsets >= back)[:, None], earlier, 0) * weight[:, -1 - back]
    return F.silu(total).to(x.dtype)


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """The outputs o_t, of the shape and dtype of `value`. Queries and keys are made unit vectors.

    Args:
        query, key: `[tokens, heads, key_dim]`.
        value: `[tokens, heads, value_dim]`.
        decay: `[tokens, heads]` float32, the logarithm of a_t.
        beta: `[tokens, heads]`, b_t.
    """
    kernel = backend.delta_rule_kernel(query.dtype)
    rule = chunked_delta_rule if kernel is None else _fused(kernel)
    return rule(query, key, value, decay, beta, chunks)


def delta_rule_remarks(dtype: torch.dtype) -> list[str]:
    """Remarks on the kernel of gated delta nets, where a user has a choice: on CUDA."""
    if not backend.has_cuda():
        return []
    kind = str(dtype).removeprefix("torch.")
    plain = (
        "plain torch, slower; flash-linear-attention takes bfloat16 or float16 and is in the package fla-core, not for "
        f"{kind} or not installed here"
    )
    return [f"gated delta nets: {'flash-linear-attention' if backend.delta_rule_kernel(dtype) else plain}"]


def _fused(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def rule(*operands: Any) -> torch.Tensor:
        query, key, value, decay, beta, chunks = operands
        out, _ = kernel(
            *(x[None] for x in (query, key, value, decay, beta)),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=chunks.cu_seqlens,
        )
        return out[0]

    return rule


def chunked_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """`gated_delta_rule` in plain torch: float32 throughout, as many steps of a scan as the longest document has chunks."""
    wide = _accumulated(value.dtype)
    num_chunks = sum(chunks.alive)

    def padded(x: torch.Tensor) -> torch.Tensor:
        flat = x.new_zeros(num_chunks * CHUNK, *x.shape[1:]).index_copy(0, chunks.rows, x)
        return flat.unflatten(0, (num_chunks, CHUNK)).transpose(1, 2)

    q, k = (padded(_unit(x.to(wide))) for x in (query, key))
    v, b = padded(value.to(wide)), padded(beta.to(wide)[..., None])
    q = q * query.shape[-1] ** -0.5
    log_decay = padded(decay.to(wide)[..., None])[..., 0]
    # Each pair's decays are summed by themselves: a difference of two sums from the chunk's start would lose the digits of the
    # small one of two large numbers.
    before, after = log_decay.cumsum(-1), F.pad(log_decay.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
    pairs = log_decay[..., None].expand(*log_decay.shape, CHUNK).tril(-1).cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = pairs.masked_fill(later, -torch.inf).exp()
    # A token writes its value less the state's read at its key, also from earlier tokens of the chunk.
    system = (k * b) @ k.mT * between
    known = torch.cat((v * b, k * b * before.exp()[..., None]), -1)
    own, read = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    within = q @ k.mT * between
    q, k = q * before.exp()[..., None], k * after.exp()[..., None]
    kept = before[..., -1].exp()[..., None, None]

    state = q.new_zeros(chunks.alive[0], q.shape[1], k.shape[-1], v.shape[-1])
    outputs = []
    for own_, read_, q_, within_, k_, kept_ in zip(
        *(x.split(chunks.alive) for x in (own, read, q, within, k, kept)), strict=True
    ):
        state = state[: len(q_)]
        written = own_ - read_ @ state
        outputs.append(q_ @ state + within_ @ written)
        state = state * kept_ + k_.mT @ written
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return out.index_select(0, chunks.rows).to(value.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
