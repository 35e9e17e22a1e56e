"""Attention sinks by kernels without them, against the softmax that they are defined by.

torch's flash attention for CPUs, its own forward and backward kernels, stands for the kernel of variable-length attention:
what is proved is that the backward of a kernel that knows nothing of sinks makes the gradients with them.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mgrpo.parallel import backend
from tests.unit.parallel.test_attention_kernels import (
    BRANCHED,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    compare,
    described,
    operands,
)

PLAIN = [[length] for length in LENGTHS]
MODELS = [{}, {"window": 5}, {"window": 100, "scale": 0.3}]
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> None:
    backend.install()


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the test runs; on the CPU with a stand-in for the kernel that only CUDA has."""
    from mgrpo.parallel.packed import attention_sinks

    monkeypatch.setattr(backend, "device", lambda: torch.device(request.param))
    if request.param == "cpu":
        monkeypatch.setattr(attention_sinks, "varlen_forward", varlen_forward)
        monkeypatch.setattr(attention_sinks, "varlen_backward", varlen_backward)
    return request.param


def sequences(query: torch.Tensor, key: torch.Tensor, lengths: tuple, left: int) -> Any:
    """Of each sequence its rows, its keys and the mask, which is added to scores."""
    for q, k in zip(pairwise(lengths[0].tolist()), pairwise(lengths[1].tolist()), strict=True):
        ahead = torch.arange(k[1] - k[0]) - (torch.arange(q[1] - q[0])[:, None] + (k[1] - k[0]) - (q[1] - q[0]))
        is_seen = (ahead <= 0) & ((ahead >= -left) if left >= 0 else True)
        mask = torch.zeros(is_seen.shape, dtype=query.dtype).masked_fill(~is_seen, -torch.inf)
        yield slice(*q), slice(*k), mask[None, None]


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[tokens, heads or kv_heads, dim]` -> `[1, heads, tokens, dim]`."""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)[None].contiguous()


def varlen_forward(query, key, value, lengths, scale, left):
    """As `attention_sinks.varlen_forward`."""
    heads, parts = query.shape[1], []
    for rows, keys, mask in sequences(query, key, lengths, left):
        own = (by_head(x, heads) for x in (query[rows], key[keys], value[keys]))
        parts.append(flash_cpu(*own, 0.0, False, attn_mask=mask, scale=scale))
    out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
    return out, torch.cat([lse[0] for _, lse in parts], dim=1), torch.zeros(2)


def varlen_backward(dout, query, key, value, out, lse, random, lengths, scale, left):
    """As `attention_sinks.varlen_backward`."""
    heads, kv_heads = query.shape[1], key.shape[1]
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys, mask in sequences(query, key, lengths, left):
        own = [by_head(x, heads) for x in (dout[rows], query[rows], key[keys], value[keys], out[rows])]
        gradients = flash_cpu_backward(*own, lse[None, :, rows].contiguous(), 0.0, False, attn_mask=mask, scale=scale)
        q, k, v = (gradient[0].transpose(0, 1) for gradient in gradients)
        dq[rows] = q
        dk[keys] += k.unflatten(1, (kv_heads, -1)).sum(2)
        dv[keys] += v.unflatten(1, (kv_heads, -1)).sum(2)
    return dq, dk, dv


def attention(*, window: int | None = None, scale: float | None = None) -> Any:
    from mgrpo.parallel.packed.attention import PackedAttention

    config = SimpleNamespace(kv_channels=HEAD_DIM, params_dtype=torch.float32)
    return PackedAttention(config, sinks=HEADS, window=window, scale=scale)


def leaves_of(documents: list[list[int]], device: str) -> list[torch.Tensor]:
    """Query, key, value, and sinks of about the size of a document's scores."""
    random = torch.Generator().manual_seed(1)
    sinks = (3 * torch.randn(HEADS, generator=random)).bfloat16().float()
    return [*operands(sum(map(sum, documents)), 2, device), sinks.to(device)]


def defined(documents: list[list[int]], *, window: int | None = None, scale: float = HEAD_DIM**-0.5) -> Any:
    """Attention of a document's trunk and branches as the paper of the model writes it: one more logit, which is dropped."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
        out, begin = torch.zeros_like(query), 0
        for trunk, *branches in documents:
            seen, starts = [*range(begin, begin + trunk)], begin + trunk
            for own in (
                seen,
                *([*seen, *range(s, s + n)] for s, n in zip(_starts(starts, branches), branches, strict=True)),
            ):
                rows = torch.tensor(own, device=query.device)
                ahead = torch.arange(len(own)) - torch.arange(len(own))[:, None]
                is_seen = ((ahead <= 0) & ((ahead > -window) if window else True)).to(query.device)
                scores = torch.einsum("qhd,khd->hqk", query[rows], key[rows]) * scale
                logits = sinks[:, None, None].expand(-1, len(own), 1)
                shares = torch.cat((scores.masked_fill(~is_seen, -torch.inf), logits), -1).softmax(-1)[..., :-1]
                out = out.index_copy(0, rows, torch.einsum("hqk,khd->qhd", shares, value[rows]))
            begin += trunk + sum(branches)
        return out

    return attend


def _starts(first: int, lengths: list[int]) -> list[int]:
    return [first + sum(lengths[:number]) for number in range(len(lengths))]


def compare_exactly(attend: Any, reference: Any, leaves: list[torch.Tensor], *, has_backward: bool = True) -> None:
    """In float32, the gradients included."""
    results = []
    for call in (attend, reference):
        own = [leaf.clone().requires_grad_(has_backward) for leaf in leaves]
        out = call(*own)
        cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        results.append([out, *(torch.autograd.grad(out, own, cotangent) if has_backward else ())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("documents", [BRANCHED, PLAIN], ids=["branches", "plain"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_padded_call_has_sinks(documents: list[list[int]], model: dict) -> None:
    """A sink that is off by the scale, or seen by the padding, is another attention; all that a run on CPUs computes."""
    core, pack = attention(**model), described(documents)
    compare_exactly(
        lambda q, k, v, s: core._padded(q, k, v, pack, pack.all_queries, s),
        defined(documents, **model),
        leaves_of(documents, "cpu"),
    )


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_kernel_without_sinks_makes_their_gradients(device: str, model: dict) -> None:
    """Its backward knows the softmax by lse alone: with the lse of keys without sink every gradient is wrong, none is missing."""
    core, pack, leaves = attention(**model), described(PLAIN), leaves_of(PLAIN, device)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return core._flash(q, k, v, pack, pack.all_queries, s)

    compare(flash, defined(PLAIN, **model), leaves, has_backward=True)
    if device == "cpu":
        compare_exactly(flash, defined(PLAIN, **model), leaves)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_rank_has_the_sinks_of_its_queries(device: str, rank: int) -> None:
    """Its queries come from two stretches of each document; all their shares go into the same sinks' gradient."""
    core, pack = attention(window=50), described(PLAIN, rank=rank, size=2)
    chosen = torch.from_numpy(pack.local_queries.tokens).to(device)
    whole = defined(PLAIN, window=50)
    compare(
        lambda q, k, v, s: core._flash(q[chosen], k, v, pack, pack.local_queries, s),
        lambda q, k, v, s: whole(q, k, v, s)[chosen],
        leaves_of(PLAIN, device),
        has_backward=True,
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [BRANCHED, PLAIN], ids=["branches", "plain"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_flex_attention_has_sinks(device: str, documents: list[list[int]], model: dict) -> None:
    """Shared prompts on CUDA. FlexAttention has no backward on the CPU."""
    core, pack = attention(**model), described(documents)
    compare(
        lambda q, k, v, s: core._flex(q, k, v, pack.all_queries, s),
        defined(documents, **model),
        leaves_of(documents, device),
        has_backward=device == "cuda",
    )


def test_the_kernels_of_variable_length_attention_take_these_arguments() -> None:
    """They are not public; torch checks types and number, and what comes back must fit."""
    from mgrpo.parallel.packed.attention_sinks import flash_with_sinks

    with FakeTensorMode():
        shapes = ((9, HEADS, 64), (9, 2, 64), (9, 2, 64), (HEADS,))
        leaves = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        cu_seqlens = torch.empty(3, dtype=torch.int32)
        query, key, value, sinks = leaves
        out = flash_with_sinks(query, key, value, sinks, (cu_seqlens, cu_seqlens, 5, 5), scale=0.125, window=4)
        gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert out.shape == shapes[0] and out.dtype == torch.bfloat16
    assert [tuple(gradient.shape) for gradient in gradients] == list(shapes)
