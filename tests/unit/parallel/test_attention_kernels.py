"""What CUDA's attention kernels are asked for: the same as the padded call, in bf16, forwards and backwards.

On the CPU a loop over sequences stands for the kernel of variable-length attention, and FlexAttention runs uncompiled and
has no backward: this proves the arguments, and on a GPU the same tests prove the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgrpo.parallel import backend

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
HEADS, HEAD_DIM = 4, 32
LENGTHS = [300, 4, 132, 12]
"""More than one tile of a kernel, and less; multiples of 4, so that two context-parallel ranks can share them."""
BRANCHED = [[40, 130, 60], [8], [5, 3, 9, 200]]
"""Lengths of a trunk and its branches."""
TOLERANCE = 2e-2
"""Of a bf16 result, relative to the largest value."""


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> None:
    backend.install()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the test runs; on the CPU with a stand-in for the kernel that only CUDA has."""
    monkeypatch.setattr(backend, "device", lambda: torch.device(request.param))
    monkeypatch.setattr(backend, "has_cuda", lambda: request.param == "cuda")
    if request.param == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_sequence_after_another)
    backend.compiled.cache_clear()
    yield request.param
    backend.compiled.cache_clear()


def one_sequence_after_another(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    longest_q: int,
    longest_kv: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """varlen_attn by its documentation: the last query of a sequence is aligned with its last key."""
    parts = []
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
    assert longest_q == cu_seqlens_q.diff().max() and longest_kv == cu_seqlens_kv.diff().max()
    for q, k in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_kv), strict=True):
        rows, columns = torch.arange(q[1] - q[0])[:, None], torch.arange(k[1] - k[0])
        ahead = columns - (rows + len(columns) - len(rows))
        left, right = window_size
        mask = (ahead <= right) & ((ahead >= -left) if left >= 0 else True)
        rows_of, keys, values = (x[a:b].transpose(0, 1) for x, (a, b) in ((query, q), (key, k), (value, k)))
        out = F.scaled_dot_product_attention(rows_of, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def attention(**model: Any) -> Any:
    from mgrpo.parallel.packed.attention import PackedAttention

    return PackedAttention(SimpleNamespace(kv_channels=HEAD_DIM), **model)


def described(documents: list[list[int]], **context: int) -> Any:
    """Documents as lengths of a trunk and its branches."""
    from mgrpo.parallel.packed import packs

    cu_seqlens = np.append(0, np.cumsum([sum(document) for document in documents])).astype(np.int32)
    positions = [np.arange(n) + (place and document[0]) for document in documents for place, n in enumerate(document)]
    branches = [np.full(n, place) for document in documents for place, n in enumerate(document)]
    return packs.describe(cu_seqlens, np.concatenate(positions), np.concatenate(branches), **context)


def operands(tokens: int, kv_heads: int, device: str) -> list[torch.Tensor]:
    """Query, key and value whose values bf16 holds, in float32 on `device`."""
    random = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads))
    return [torch.randn(shape, generator=random).bfloat16().float().to(device) for shape in shapes]


def compare(attend: Any, reference: Any, leaves: list[torch.Tensor], *, has_backward: bool) -> None:
    """`attend` on bf16 copies of the operands against `reference` on the operands, and the gradients of both."""
    results = []
    for call, dtype in ((attend, torch.bfloat16), (reference, torch.float32)):
        own = [leaf.to(dtype).requires_grad_(has_backward) for leaf in leaves]
        out = call(*own)
        cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        results.append([out, *(torch.autograd.grad(out, own, cotangent.to(dtype)) if has_backward else ())])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).abs().max().item() <= TOLERANCE * expected.abs().max().item()


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("model", [{}, {"window": 5}, {"window": 100, "scale": 0.3}], ids=str)
def test_variable_length_attention_equals_the_padded_call(device: str, kv_heads: int, model: dict) -> None:
    """A document that reads another's tokens, or a window that is off by one, trains on what was not sampled."""
    core, pack = attention(**model), described([[length] for length in LENGTHS])
    compare(
        lambda q, k, v: core._flash(q, k, v, pack, pack.all_queries),
        lambda q, k, v: core._padded(q, k, v, pack, pack.all_queries),
        operands(sum(LENGTHS), kv_heads, device),
        has_backward=True,
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_shared", [False, True], ids=["plain", "branches"])
def test_values_may_have_fewer_dimensions_than_keys(device: str, is_shared: bool) -> None:
    """Latent attention: the kernels of variable-length attention take one number for queries, keys and values."""
    core, pack = attention(), described(BRANCHED if is_shared else [[length] for length in LENGTHS])
    query, key, value = operands(sum(map(sum, BRANCHED)) if is_shared else sum(LENGTHS), HEADS, device)
    compare(
        lambda q, k, v: (
            core._flex(q, k, v, pack.all_queries) if is_shared else core._flash(q, k, v, pack, pack.all_queries)
        ),
        lambda q, k, v: core._padded(q, k, v, pack, pack.all_queries),
        [query, key, value[..., : HEAD_DIM - 12].contiguous()],
        has_backward=device == "cuda" or not is_shared,
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("window", [None, 50])
def test_a_context_rank_reads_the_keys_of_its_stretches(device: str, rank: int, window: int | None) -> None:
    """Its late stretch must see all earlier tokens of the document and none after them."""
    core, pack = attention(window=window), described([[length] for length in LENGTHS], rank=rank, size=2)
    chosen = torch.from_numpy(pack.local_queries.tokens).to(device)
    compare(
        lambda q, k, v: core._flash(q[chosen], k, v, pack, pack.local_queries),
        lambda q, k, v: core._padded(q[chosen], k, v, pack, pack.local_queries),
        operands(sum(LENGTHS), 2, device),
        has_backward=True,
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [BRANCHED, [[length] for length in LENGTHS]], ids=["branches", "plain"])
@pytest.mark.parametrize("model", [{}, {"softcap": 3.0}, {"softcap": 3.0, "window": 50}], ids=str)
def test_flex_attention_equals_the_padded_call(device: str, documents: list[list[int]], model: dict) -> None:
    """Shared prompts and capped scores: a branch sees its trunk and itself."""
    core, pack = attention(**model), described(documents)
    compare(
        lambda q, k, v: core._flex(q, k, v, pack.all_queries),
        lambda q, k, v: core._padded(q, k, v, pack, pack.all_queries),
        operands(sum(map(sum, documents)), 2, device),
        has_backward=device == "cuda",
    )
