"""A step's packs as a few flat arrays and back, so that they travel without pickling.

The arrays carry their own structure: `num_micro_batches [mini-batches]`, `dp [1]` and `sizes [packs, 4]` (tokens,
documents, responses, sequences), packs in the order mini-batch, rank, micro-batch. `num_trained_tokens` and
`num_sequences`, both `[mini-batches]`, count over all ranks, so that each knows the loss's denominator without reading
the others' packs.
"""

from __future__ import annotations

import numpy as np

from mgrpo.types import PackedBatch

# Field of PackedBatch -> (type, column of `sizes` that gives its length, how much longer it is).
_TOKENS, _DOCUMENTS, _RESPONSES, _SEQUENCES = range(4)
_FIELDS: dict[str, tuple[type, int, int]] = {
    "tokens": (np.int32, _TOKENS, 0),
    "positions": (np.int32, _TOKENS, 0),
    "branches": (np.int32, _TOKENS, 0),
    "cu_seqlens": (np.int32, _DOCUMENTS, 1),
    "rows": (np.int32, _RESPONSES, 0),
    "targets": (np.int32, _RESPONSES, 0),
    "response_cu_seqlens": (np.int32, _SEQUENCES, 1),
    "loss_mask": (np.bool_, _RESPONSES, 0),
    "rollout_logprobs": (np.float32, _RESPONSES, 0),
    "advantages": (np.float32, _SEQUENCES, 0),
    "samples": (np.int32, _SEQUENCES, 0),
}


def to_arrays(packs: list[list[list[PackedBatch]]]) -> dict[str, np.ndarray]:
    """Flat arrays of [mini-batch][data-parallel rank][micro-batch] packs; int32, float32 and bool, headers int64."""
    assert packs, "a step has at least one mini-batch"
    dp = len(packs[0])
    for ranks in packs:
        counts = [len(micro_batches) for micro_batches in ranks]
        assert len(counts) == dp and len(set(counts)) == 1, f"ranks with unequal numbers of micro-batches: {counts}"
    flat = [pack for ranks in packs for micro_batches in ranks for pack in micro_batches]
    trained = [sum(int(np.count_nonzero(pack.loss_mask)) for row in ranks for pack in row) for ranks in packs]
    sequences = [sum(len(pack.samples) for row in ranks for pack in row) for ranks in packs]
    sizes = [[len(p.tokens), len(p.cu_seqlens) - 1, len(p.rows), len(p.response_cu_seqlens) - 1] for p in flat]
    arrays = {
        "dp": np.array([dp], dtype=np.int64),
        "num_micro_batches": np.array([len(ranks[0]) for ranks in packs], dtype=np.int64),
        "num_trained_tokens": np.array(trained, dtype=np.int64),
        "num_sequences": np.array(sequences, dtype=np.int64),
        "sizes": np.array(sizes, dtype=np.int64).reshape(len(flat), 4),
    }
    for name, (dtype, _, _) in _FIELDS.items():
        arrays[name] = np.concatenate([np.zeros(0, dtype), *(getattr(pack, name) for pack in flat)], dtype=dtype)
    return arrays


def from_arrays(arrays: dict[str, np.ndarray], dp_rank: int) -> list[list[PackedBatch]]:
    """The packs of one data-parallel rank as [mini-batch][micro-batch]: views, not copies."""
    dp = int(arrays["dp"][0])
    assert 0 <= dp_rank < dp, f"dp_rank={dp_rank} is not one of {dp} ranks"
    starts = {}
    for name, (_, column, extra) in _FIELDS.items():
        lengths = arrays["sizes"][:, column] + extra
        starts[name] = np.concatenate([[0], np.cumsum(lengths)])
        assert starts[name][-1] == len(arrays[name]), f"{name} has {len(arrays[name])} values, not {starts[name][-1]}"

    first = 0
    mini_batches = []
    for count in arrays["num_micro_batches"].tolist():
        own = range(first + dp_rank * count, first + (dp_rank + 1) * count)
        mini_batches.append(
            [
                PackedBatch(**{name: arrays[name][cut[number] : cut[number + 1]] for name, cut in starts.items()})
                for number in own
            ]
        )
        first += dp * count
    return mini_batches
