"""Attention over documents with branches, by the padded call and by FlexAttention."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgrpo.parallel import backend


@pytest.fixture(scope="module")
def attention():
    """The module under test; the stand-in must be there before Megatron is imported, also for the tests that follow."""
    backend.install()
    from mgrpo.parallel import attention

    return attention


def pack() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three documents: a prompt with three completions, one with one, and a prompt alone."""
    documents = [[(0, 5), (1, 3), (2, 7), (3, 1)], [(0, 2), (1, 4)], [(0, 6)]]
    branches = np.concatenate([np.full(n, place) for segments in documents for place, n in segments])
    lengths = [sum(n for _, n in segments) for segments in documents]
    trunks = [segments[0][1] for segments in documents]
    positions = np.concatenate(
        [
            np.arange(n) + (0 if place == 0 else trunk)
            for segments, trunk in zip(documents, trunks, strict=True)
            for place, n in segments
        ]
    )
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), positions, branches


def both(attention, kv_heads: int, device: str) -> tuple:
    """The attention, its operands, and the pack with a dense and with a block mask."""
    torch.manual_seed(0)
    cu_seqlens, positions, branches = pack()
    packed = attention.describe(cu_seqlens, positions, branches)
    document = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    flexible = dataclasses.replace(
        packed, block_mask=attention.branch_block_mask(document, branches, torch.device(device))
    )
    operands = tuple(torch.randn(len(branches), heads, 16, device=device) for heads in (4, kv_heads, kv_heads))
    return attention.PackedAttention(SimpleNamespace(kv_channels=16)), operands, [packed, flexible]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flex_attention_equals_the_padded_call(attention, kv_heads: int) -> None:
    """On CUDA a completion would read its siblings' tokens, and train on what it never saw when it was sampled."""
    attend, operands, packs = both(attention, kv_heads, "cpu")
    dense, flexible = (attend(*operands, packed_seq_params=packed) for packed in packs)
    torch.testing.assert_close(flexible, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; FlexAttention has no backward on the CPU")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_of_flex_attention_equal_the_padded_call(attention, kv_heads: int) -> None:
    """The backward of the compiled kernel, with the same mask as the dense one."""
    core, operands, (packed, flexible) = both(attention, kv_heads, "cuda")
    dense = dataclasses.replace(
        packed,
        block_mask=None,
        mask=torch.from_numpy(
            attention._branch_mask(packed.padded_rows.cpu().numpy(), pack()[2], 3, packed.max_seqlen_q)
        ).cuda(),
    )
    leaves = [operand.requires_grad_() for operand in operands]
    results = []
    for attend, described in ((core._padded, dense), (core._flex, flexible)):
        out = attend(*leaves, described)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_a_branch_does_not_see_its_siblings(attention) -> None:
    """The mask itself, by hand: the second completion's first token sees the prompt and itself."""
    cu_seqlens, positions, branches = pack()
    mask = attention.describe(cu_seqlens, positions, branches).mask
    assert mask[0, 0, 8].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 8]
    assert mask[1, 0, 3].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
