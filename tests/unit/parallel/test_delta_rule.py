"""The gated delta rule on packs against transformers' functions on each document alone, and against its definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgrpo.parallel.packed.delta_rule import Chunks, causal_convolution, chunked_delta_rule

LENGTHS = (1, 150, 3, 64, 65, 2, 128, 129)
HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 3, 16, 24, 10, 4


def boundaries() -> np.ndarray:
    return np.concatenate(([0], np.cumsum(LENGTHS)))


def chunks_of_pack() -> Chunks:
    return Chunks.of(boundaries(), np.ones(sum(LENGTHS)))


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys, values, decays as strong as a trained model's, and betas."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key = (torch.randn(tokens, HEADS, KEY_DIM) for _ in range(2))
    value, beta = torch.randn(tokens, HEADS, VALUE_DIM), torch.rand(tokens, HEADS)
    decay = -F.softplus(torch.randn(tokens, HEADS)) * torch.tensor([0.05, 1.0, 16.0])
    return [x.to(dtype).requires_grad_() for x in (query, key, value, decay, beta)]


def by_document(rule: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    cuts = pairwise(boundaries().tolist())
    return torch.cat([rule(*(x[start:stop] for x in tensors)) for start, stop in cuts])


def transformers_rule(*tensors: torch.Tensor) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = (x[None] for x in tensors)
    out, _ = torch_chunk_gated_delta_rule.__wrapped__(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
    )
    return out[0]


def definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One token after the other, as in the paper."""
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state, outputs = value.new_zeros(HEADS, KEY_DIM, VALUE_DIM), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        forgets = torch.eye(KEY_DIM, dtype=k.dtype) - b[:, None, None] * k[:, :, None] * k[:, None]
        state = g.exp()[:, None, None] * forgets @ state + b[:, None, None] * k[:, :, None] * v[:, None]
        outputs.append((q[:, None] @ state)[:, 0] * KEY_DIM**-0.5)
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("oracle", "dtype", "its_dtype", "limit"),
    [
        (transformers_rule, torch.float32, torch.float32, 2e-5),
        (definition, torch.float64, torch.float64, 1e-12),
        # Also where decays are strong; from differences of sums over a chunk it would be 1.2e-6.
        (definition, torch.float32, torch.float64, 7e-7),
    ],
)
def test_packed_documents_equal_each_alone(oracle, dtype, its_dtype, limit):
    """A state that passes from a document to the next, or a chunk that holds two, trains on what was never sampled."""
    mine, alone = operands(dtype), operands(its_dtype)
    out = chunked_delta_rule(*mine, chunks_of_pack())
    expected = by_document(oracle, alone)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for got, want in [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, alone, strict=True))]:
        assert (got - want).abs().max() <= limit * want.abs().max()


def test_packed_convolution_equals_each_document_alone():
    """The first tokens of a document would see the last ones of the document before."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(sum(LENGTHS), CHANNELS, requires_grad=True),
        torch.randn(CHANNELS, WIDTH, requires_grad=True),
    )

    def convolved(part: torch.Tensor) -> torch.Tensor:
        padded = F.pad(part.T, (WIDTH - 1, 0))
        return F.silu(F.conv1d(padded[None], weight[:, None], groups=CHANNELS))[0].T

    results = []
    for out in (causal_convolution(x, weight, chunks_of_pack().offsets), by_document(convolved, [x])):
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_chunks_of_a_step_lie_together():
    """Worked by hand: three documents of 2, 1 and 3 chunks: first chunks of the third, first and second, then the others."""
    chunks = Chunks.of(np.array([0, 65, 68, 68 + 129]), np.zeros(197))
    assert chunks.alive == (3, 2, 1)
    firsts = chunks.rows[[0, 64, 65, 68, 68 + 64, 68 + 128]] // 64
    assert firsts.tolist() == [1, 4, 2, 0, 3, 5]
    assert (chunks.rows % 64)[[64, 65, 67, 68]].tolist() == [0, 0, 2, 0]


def test_a_branch_comes_behind_its_trunk():
    """Worked by hand: a trunk of two tokens with branches of one and two, and a document without branches."""
    chunks = Chunks.of(np.array([0, 5, 7]), np.array([0, 0, 1, 2, 2, 0, 0]))
    assert chunks.cu_seqlens.tolist() == [0, 3, 7, 9]
    assert chunks.copied is not None and chunks.copied.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert chunks.firsts is not None and chunks.firsts.tolist() == [0, 1, 2, 5, 6, 7, 8]
