"""Copies in memory that is used again: equal to the tensors at that moment, and never to those of another save."""

from __future__ import annotations

import itertools

import torch

from mgrpo.checkpoint.saving.host_copies import BLOCK_BYTES, HostCopies, pack
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box


class Memory:
    """Counts the blocks that are made, and writes down when the device was waited for."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.waits = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.made.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.waits += 1


def parts(seed: int) -> list[Part]:
    """Of several types and sizes, among them views, an empty one and a single number."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(30, 20, generator=generator)
    tensors = [
        whole[3:9, 5:9],
        whole.t(),
        whole.bfloat16()[1:],
        torch.empty(0, 4),
        torch.tensor(3.0 + seed),
        whole.to(torch.uint8),
    ]
    return [
        Part("master", Box(f"w{index}", (0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        for index, tensor in enumerate(tensors)
    ]


def test_copies_are_the_tensors_and_their_memory_is_used_again():
    """New page-locked memory at each save would delay training for longer than the copy itself."""
    memory = Memory()
    snapshot = HostCopies(memory.allocate, synchronize=memory.synchronize)
    for seed in (1, 2):
        given = parts(seed)
        copies = snapshot.take(given)
        assert memory.waits == seed
        expected = parts(seed)
        for part in given:
            part.tensor.zero_()
        for copy, part in zip(copies, expected, strict=True):
            assert (copy.kind, copy.box, copy.tensor.dtype) == (part.kind, part.box, part.tensor.dtype)
            assert torch.equal(copy.tensor, part.tensor)
    assert len(memory.made) == 1 and snapshot.num_bytes == memory.made[0]
    snapshot.take(parts(3)[:2])
    assert len(memory.made) == 2


def test_blocks_are_powers_of_two_and_nearly_full():
    """torch would round each of them up, a state of 22 GB to 32."""
    sizes = [3 << 20, 100 << 20, 1, 0, 700 << 20, 5 << 20, *([40 << 20] * 30), 200 << 20]
    places, lengths = pack(sizes)
    taken = sorted((block, start, start + size) for (block, start), size in zip(places, sizes, strict=True))
    for (block, _, end), (other, start, _) in itertools.pairwise(taken):
        assert block != other or end <= start
    assert all(end <= lengths[block] for block, _, end in taken)
    assert all(length & (length - 1) == 0 for length in lengths)
    assert sum(lengths) < sum(sizes) + BLOCK_BYTES
    assert pack([]) == ([], [])


def test_without_a_device_every_copy_is_new():
    """A laptop would keep the memory of a state for the whole run."""
    snapshot, given = HostCopies(), parts(1)
    first, second = snapshot.take(given), snapshot.take(given)
    assert snapshot.num_bytes == 0
    assert {part.tensor.data_ptr() for part in first if part.tensor.numel()}.isdisjoint(
        part.tensor.data_ptr() for part in second
    )
