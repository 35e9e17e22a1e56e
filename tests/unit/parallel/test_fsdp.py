"""The places of tensors in a bucket of Megatron-FSDP."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from mgrpo.parallel import backend

backend.install()

from mgrpo.parallel.fsdp import _index, index_of_whole_rows  # noqa: E402

SHARDED = SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")


def cut_rows(shapes, places, bucket, ranks) -> list[torch.Size]:
    """The tensors of which a rank has a part of a row; asserts that no two overlap and that all are inside."""
    assert sorted(places) == list(range(len(shapes))) and bucket.size % ranks == 0
    found, taken = [], 0
    for place in sorted(places.values(), key=lambda place: place.global_data_index):
        start, end, row = place.global_data_index, place.global_data_index + place.size, place.shape[1:].numel()
        assert taken <= start and end <= bucket.size and place.shape == shapes[place.item_id]
        taken = end
        cuts = range(0, bucket.size, bucket.size // ranks)
        found += [place.shape for cut in cuts if start < cut < end and (cut - start) % row]
    return found


def places_of(index, shapes, ranks, unit):
    return index(shapes, 1, ranks, True, SHARDED, chunk_size_factor=unit)


def test_latent_attention_is_cut_between_rows():
    """Rows of 24 beside rows of 64: the run would end when it makes the shards."""
    shapes = [torch.Size(shape) for shape in ((2, 64), (7, 24))]
    places, bucket, _ = places_of(_index, shapes, 4, 192)
    assert cut_rows(shapes, places, bucket, 4), "Megatron has mended it: index_of_whole_rows may go"
    places, bucket, shard = places_of(index_of_whole_rows, shapes, 4, 192)
    assert not cut_rows(shapes, places, bucket, 4)
    assert [places[number].global_data_index for number in (0, 1)] == [0, 192]
    assert shard.size * 4 == bucket.size and shard.bucket_data_index == shard.size


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_rank_has_whole_rows(ranks):
    """And where Megatron gives it whole rows, nothing moves."""
    draw = random.Random(ranks)
    for _ in range(300):
        rows = draw.sample((8, 12, 16, 24), draw.randrange(1, 4))
        shapes = [torch.Size((draw.randrange(1, 40), draw.choice(rows))) for _ in range(draw.randrange(1, 9))]
        shapes += [torch.Size((draw.choice(rows),)) for _ in range(draw.randrange(3))]
        before = places_of(_index, shapes, ranks, 48)
        after = places_of(index_of_whole_rows, shapes, ranks, 48)
        assert not cut_rows(shapes, *after[:2], ranks)
        if not cut_rows(shapes, *before[:2], ranks):
            assert after[0] == before[0] or after[1].size >= before[1].size
