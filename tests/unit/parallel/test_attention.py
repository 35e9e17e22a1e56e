"""Attention over documents with branches, by the padded call and by FlexAttention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from mgrpo.parallel import backend


@pytest.fixture(scope="module")
def attention():
    """The module under test; the stand-in must be there before Megatron is imported, also for the tests that follow."""
    backend.install()
    from mgrpo.parallel.packed import attention

    return attention


def describe(*pack: np.ndarray, **context: Any) -> Any:
    """The pack as the model sees it."""
    from mgrpo.parallel.packed import packs

    return packs.describe(*pack, **context)


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


def operands(kv_heads: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(len(pack()[1]), heads, 16, device=device) for heads in (4, kv_heads, kv_heads))


MODELS = [{}, {"window": 4}, {"softcap": 0.7}, {"window": 4, "softcap": 0.7, "scale": 0.4}]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_flex_attention_equals_the_padded_call(attention, kv_heads: int, model: dict) -> None:
    """On CUDA a completion would read its siblings' tokens, and train on what it never saw when it was sampled."""
    core = attention.PackedAttention(SimpleNamespace(kv_channels=16), **model)
    packed = describe(*pack())
    flexible = core._flex(*operands(kv_heads, "cpu"), packed.all_queries)
    padded = core(*operands(kv_heads, "cpu"), packed_seq_params=packed)
    torch.testing.assert_close(flexible.flatten(1), padded, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; FlexAttention has no backward on the CPU")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_gradients_of_flex_attention_equal_the_padded_call(attention, kv_heads: int, model: dict) -> None:
    """The backward of the compiled kernel, with the same mask as the dense one."""
    core = attention.PackedAttention(SimpleNamespace(kv_channels=16), **model)
    packed = describe(*pack())
    leaves = [operand.requires_grad_() for operand in operands(kv_heads, "cuda")]
    results = []
    for out in (core._padded(*leaves, packed, packed.all_queries), core._flex(*leaves, packed.all_queries)):
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def described(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents as lengths of a trunk and its branches: cu_seqlens, positions, branches."""
    cu_seqlens = np.append(0, np.cumsum([sum(document) for document in documents])).astype(np.int32)
    positions = [np.arange(n) + (place and document[0]) for document in documents for place, n in enumerate(document)]
    branches = [np.full(n, place) for document in documents for place, n in enumerate(document)]
    return cu_seqlens, np.concatenate(positions), np.concatenate(branches)


def chosen(counts: torch.Tensor | None, numbers: torch.Tensor | None) -> torch.Tensor:
    """`[query blocks, key blocks]` bool, from a block mask's ordered form."""
    assert counts is not None and numbers is not None
    is_listed = torch.arange(numbers.shape[-1]) < counts[0, 0][:, None]
    return torch.zeros_like(is_listed).scatter(1, numbers[0, 0].long(), is_listed)


BLOCKED = {
    "one document": [[1000]],
    "whole blocks": [[512], [256]],
    "shared blocks": [[300], [5], [200, 7], [450], [90, 3]],
    "branches": [[10, 500, 200], [150, 200, 10, 300], [300, 100, 150], [20]],
}


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize(
    ("name", "context"),
    [(name, {}) for name in BLOCKED] + [(name, {"rank": 1, "size": 2}) for name in ("one document", "whole blocks")],
)
def test_blocks_of_flex_attention_hold_every_visible_pair(attention, name: str, context, window: int | None) -> None:
    """Only CUDA reads blocks: without one of them, or with one called full in error, it attends to other tokens."""
    queries = describe(*described(BLOCKED[name]), **context).local_queries
    got = queries.block_mask(window)
    num_queries, num_keys = got.seq_lengths
    exact = create_block_mask(got.mask_mod, None, None, num_queries, num_keys, device="cpu")
    partial, full = chosen(got.kv_num_blocks, got.kv_indices), chosen(got.full_kv_num_blocks, got.full_kv_indices)
    expected_full = chosen(exact.full_kv_num_blocks, exact.full_kv_indices)
    expected = chosen(exact.kv_num_blocks, exact.kv_indices) | expected_full
    assert not (partial & full).any(), "attended to twice"
    assert not (expected & ~(partial | full)).any(), "visible pairs are skipped"
    assert not (full & ~expected_full).any(), "hidden pairs are not masked"
    if window is None and name != "branches":
        assert torch.equal(partial | full, expected)
        assert torch.equal(full, expected_full)


def test_capped_scores_by_hand(attention) -> None:
    """Three tokens, one head: tanh before the mask and the softmax."""
    cu_seqlens, positions = np.array([0, 3], dtype=np.int32), np.arange(3)
    query, key, value = (torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    core = attention.PackedAttention(SimpleNamespace(kv_channels=16), window=2, softcap=0.5)
    got = core(query, key, value, packed_seq_params=describe(cu_seqlens, positions, np.zeros(3, dtype=int)))
    for row in range(3):
        seen = slice(max(row - 1, 0), row + 1)
        scores = 0.5 * torch.tanh((key[seen, 0] @ query[row, 0]) / 4 / 0.5)
        torch.testing.assert_close(got[row], scores.softmax(0) @ value[seen, 0])


def test_a_branch_does_not_see_its_siblings(attention) -> None:
    """The mask itself, by hand: the second completion's first token sees the prompt and itself."""
    cu_seqlens, positions, branches = pack()
    mask = describe(cu_seqlens, positions, branches).all_queries.mask(None)
    assert mask[0, 0, 8].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 8]
    assert mask[1, 0, 3].nonzero()[:, 0].tolist() == [0, 1, 2, 3]


def test_context_ranks_hold_an_early_and_a_late_stretch_of_every_document(attention) -> None:
    """By hand, two ranks: with other tokens or keys than these, variable-length attention on CUDA reads the future."""
    packed = describe(np.array([0, 8, 12], dtype=np.int32), np.arange(12) % 8, np.zeros(12, dtype=int), rank=0, size=2)
    assert packed.local_queries.tokens.tolist() == [0, 1, 6, 7, 8, 11]
    assert packed.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert packed.gathered_rows.tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]
    keys, cu_seqlens_q, cu_seqlens_kv, longest_q, longest_kv = packed.stretches
    assert keys.tolist() == [0, 1, *range(8), 8, *range(8, 12)]
    assert (cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()) == ([0, 2, 4, 5, 6], [0, 2, 10, 11, 15])
    assert (longest_q, longest_kv) == (2, 8)
