"""All packs of one training step."""

from __future__ import annotations

from collections.abc import Sequence

from mgrpo.packing.bins import balance, token_limit
from mgrpo.packing.document import assemble, document_length, documents
from mgrpo.types import PackedBatch, TrainSample


def pack_step(
    samples: Sequence[TrainSample],
    *,
    pack_length: int,
    dp: int,
    num_mini_batches: int,
    multiple_of: int,
    share_prompts: bool,
) -> list[list[list[PackedBatch]]]:
    """Packs as [mini-batch][data-parallel rank][micro-batch]; every sample is in exactly one, see `balance`.

    Args:
        multiple_of: the number of tokens of a pack divides by this (the tensor-parallel size under sequence parallelism).
    """
    grouped = documents(samples, share_prompts=share_prompts, pack_length=token_limit(pack_length, multiple_of))
    lengths = [document_length(samples, members) for members in grouped]
    plan = balance(lengths, pack_length, dp=dp, num_mini_batches=num_mini_batches, multiple_of=multiple_of)
    return [
        [
            [
                assemble(samples, [grouped[index] for index in chosen], multiple_of=multiple_of)
                for chosen in micro_batches
            ]
            for micro_batches in ranks
        ]
        for ranks in plan
    ]
