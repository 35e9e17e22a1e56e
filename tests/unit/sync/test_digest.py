"""The digest adds up over any cut and notices what a plain sum does not."""

from __future__ import annotations

import pytest
import torch

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.sending import digest as module
from mgrpo.sync.sending.digest import digest, digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_add_up_to_the_whole(dtype, monkeypatch):
    """Trainer and engine cut tensors differently: their sums must still be equal."""
    monkeypatch.setattr(module, "_CHUNK", 64)
    whole = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    everything = digest(Box("w", (0, 0), (37, 50)), whole, (37, 50))
    parts = 0
    for rows in (slice(0, 5), slice(5, 37)):
        for columns in (slice(0, 49), slice(49, 50)):
            view = whole[rows, columns]
            parts += digest(Box("w", (rows.start, columns.start), tuple(view.shape)), view, (37, 50))
    assert parts == everything


@pytest.mark.parametrize("chunk", [4, 64, 1 << 20])
def test_matrices_of_all_experts_have_one_digest_however_they_lie(chunk, monkeypatch):
    """The learner has an expert's rows, the engine the same transposed: both count places in the checkpoint's tensor."""
    monkeypatch.setattr(module, "_CHUNK", chunk)
    shape = (3, 4, 6)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    everything = digest(Box("w", (0, 0, 0), shape), whole, shape)
    assert digest(Box("w", (0, 0), (12, 6)), whole.view(12, 6), (12, 6)) == everything
    transposed = whole.transpose(1, 2).contiguous()
    assert digest(Box("w", (0, 0, 0), shape), transposed.transpose(1, 2), shape) == everything
    parts = 0
    for expert in range(3):
        for columns in (slice(0, 2), slice(2, 6)):
            view = whole[expert, None, :, columns]
            parts += digest(Box("w", (expert, 0, columns.start), tuple(view.shape)), view, shape)
    assert parts == everything
    assert digest(Box("w", (0, 0, 0), shape), transposed.view(shape), shape) != everything


def test_swapped_rows_and_single_bits_are_noticed():
    """What goes wrong in a sync is mostly order: a sum without places would not see it."""
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    box = Box("w", (0, 0), (8, 4))
    truth = digest(box, whole, (8, 4))
    assert digest(box, whole.flip(0), (8, 4)) != truth
    assert digest(box, whole.view(4, 8).T.contiguous().view(8, 4), (8, 4)) != truth
    changed = whole.clone()
    changed.view(torch.int32)[3, 2] ^= 1
    assert digest(box, changed, (8, 4)) != truth


def test_vectors_have_digests_too():
    """Norms and biases are one-dimensional."""
    whole = torch.randn(10)
    parts = digest(Box("b", (0,), (4,)), whole[:4], (10,)) + digest(Box("b", (4,), (6,)), whole[4:], (10,))
    assert parts == digest(Box("b", (0,), (10,)), whole, (10,))


def test_slices_of_one_tensor_are_added():
    """A rank sends a tensor in several slices; what it does not hold counts as nothing."""
    whole = torch.randn(4, 3)
    slices = [(Box("w", (row, 0), (1, 3)), whole[row : row + 1]) for row in range(4)]
    shapes = {"other": (2, 2), "w": (4, 3)}
    assert digests(slices, shapes).tolist() == [0, int(digest(Box("w", (0, 0), (4, 3)), whole, (4, 3)))]
    assert digests([], shapes).tolist() == [0, 0]
