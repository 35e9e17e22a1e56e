"""A step's packs on their way to the learners: an index for every rank, and a slice of bytes for each data-parallel rank.

A slice holds the samples that its rank trains on, 9 bytes for a response token and 4 for a prompt token or one between
turns; where the sampling was cut, 4 more for a response token and for each token of its set; and which of them form a
document, which documents a pack. All else is a function of lengths: the receiver lays its packs out itself.

The index: `multiples [2]` (of packs, of documents), `num_micro_batches`, `num_trained_tokens` and `num_sequences`, all
`[mini-batches]`, the last two over all ranks, so that each knows the loss's denominator without the others' packs; and
`samples`, `completions` and `trained_tokens` `[sequences]`, of the sequences of all ranks, mini-batch after mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from mgrpo.packing.document import assemble
from mgrpo.packing.lengths import Documents, completion_numbers, cumulative
from mgrpo.packing.step import StepPlan
from mgrpo.types import KeptTokens, PackedBatch, TrainSample

_COUNTS = (
    "samples",
    "tokens",
    "responses",
    "token_advantages",
    "mask_bytes",
    "sets",
    "kept",
    "prompts",
    "prompt_tokens",
    "packs",
    "documents",
    "sequences",
)
# A slice begins with its counts, int64. Then, without gaps, name -> (type, the count that is its length).
_SECTIONS: dict[str, tuple[type, str]] = {
    "numbers": (np.int32, "samples"),
    "prompt_of": (np.int32, "samples"),
    "lengths": (np.int32, "samples"),
    "advantages": (np.float32, "samples"),
    "prompt_lengths": (np.int32, "prompts"),
    "num_documents": (np.int32, "packs"),
    "num_branches": (np.int32, "documents"),
    "order": (np.int32, "sequences"),
    "prompt_tokens": (np.int32, "prompt_tokens"),
    "tokens": (np.int32, "tokens"),
    "rollout_logprobs": (np.float32, "responses"),
    # Of the responses; none where sequences have one advantage.
    "token_advantages": (np.float32, "token_advantages"),
    # Of the responses; none where the sampling was not cut.
    "kept_sizes": (np.int32, "sets"),
    "kept_ids": (np.int32, "kept"),
    "flags": (np.uint8, "responses"),
    # A bit for each token; none where all tokens are predicted.
    "is_predicted": (np.uint8, "mask_bytes"),
}
_TRAINED = 1
"""Bit 0 of a token's flags is its loss mask; the other seven are its age in policy versions."""


class Slice:
    """What one data-parallel rank receives; its bytes are filled in where they are wanted."""

    def __init__(self, samples: Sequence[TrainSample], packs: Sequence[Documents]) -> None:
        """
        Args:
            packs: of one or several passes over `samples`; each of their samples is sent once.
        """
        self.num_documents = [len(own) for own in packs]
        documents = list(chain.from_iterable(packs))
        self.num_branches = [len(members) for members in documents]
        self.order = list(chain.from_iterable(documents))
        self.numbers = sorted(set(self.order))
        self.samples = [samples[number] for number in self.numbers]
        # Samples of a group hold the same array.
        self.prompts = {id(sample.prompt_tokens): sample.prompt_tokens for sample in self.samples}
        num_tokens = sum(len(sample.tokens) for sample in self.samples)
        num_responses = sum(sample.num_predicted for sample in self.samples)
        self.sets = [sample.kept for sample in self.samples if sample.kept is not None]
        self.counts = {
            "samples": len(self.samples),
            "tokens": num_tokens,
            "responses": num_responses,
            "token_advantages": num_responses if any(s.token_advantages is not None for s in self.samples) else 0,
            "mask_bytes": -(-num_tokens // 8) if num_responses < num_tokens else 0,
            "sets": num_responses if self.sets else 0,
            "kept": sum(len(kept.ids) for kept in self.sets),
            "prompts": len(self.prompts),
            "prompt_tokens": sum(map(len, self.prompts.values())),
            "packs": len(packs),
            "documents": len(documents),
            "sequences": len(self.order),
        }
        self.num_bytes = _num_bytes(self.counts)

    def fill(self, data: np.ndarray) -> None:
        """Write the slice into `data`, `[num_bytes]` uint8."""
        _counts(data)[:] = [self.counts[name] for name in _COUNTS]
        part, samples, prompts = _sections(data), self.samples, list(self.prompts.values())
        place = {key: number for number, key in enumerate(self.prompts)}
        part["numbers"][:] = self.numbers
        part["prompt_of"][:] = [place[id(sample.prompt_tokens)] for sample in samples]
        part["lengths"][:] = [len(sample.tokens) for sample in samples]
        part["advantages"][:] = [sample.advantage for sample in samples]
        part["prompt_lengths"][:] = [len(prompt) for prompt in prompts]
        part["num_documents"][:] = self.num_documents
        part["num_branches"][:] = self.num_branches
        part["order"][:] = self.order
        if not samples:
            return
        each: list[tuple[TrainSample, np.ndarray | slice]] = [(sample, slice(None)) for sample in samples]
        if self.counts["mask_bytes"]:
            each = [(sample, sample.is_predicted) for sample in samples]
            part["is_predicted"][:] = np.packbits(np.concatenate([sample.is_predicted for sample in samples]))
        np.concatenate(prompts, out=part["prompt_tokens"])
        np.concatenate([sample.tokens for sample in samples], out=part["tokens"])
        np.concatenate([sample.rollout_logprobs[own] for sample, own in each], out=part["rollout_logprobs"])
        if self.counts["token_advantages"]:
            by_token = [(sample.token_advantages, own) for sample, own in each if sample.token_advantages is not None]
            np.concatenate([values[own] for values, own in by_token], out=part["token_advantages"])
        if self.sets:
            # What is not predicted has an empty set.
            np.concatenate([kept.ids for kept in self.sets], out=part["kept_ids"])
            by_set = zip(self.sets, each, strict=True)
            np.concatenate([kept.sizes[own] for kept, (_, own) in by_set], out=part["kept_sizes"])
        np.concatenate([sample.loss_mask[own] for sample, own in each], out=part["flags"].view(np.bool_))
        ends = np.cumsum([sample.num_predicted for sample in samples]).tolist()
        for (sample, own), start, end in zip(each, [0, *ends], ends, strict=False):
            if sample.ages is not None:
                part["flags"][start:end] |= sample.ages[own] << 1

    def filled(self) -> np.ndarray:
        """The slice in memory of its own."""
        data = np.empty(self.num_bytes, np.uint8)
        self.fill(data)
        return data


def to_slices(
    samples: Sequence[TrainSample], plan: StepPlan, *, multiple_of: int, document_multiple_of: int
) -> tuple[dict[str, np.ndarray], list[Slice]]:
    """The index, and the slice of each data-parallel rank.

    Args:
        plan: of one or several passes over `samples`.
        multiple_of, document_multiple_of: see `assemble`.
    """
    assert plan, "a step has at least one mini-batch"
    dp = len(plan[0])
    for ranks in plan:
        counts = [len(micro_batches) for micro_batches in ranks]
        assert len(counts) == dp and len(set(counts)) == 1, f"ranks with unequal numbers of micro-batches: {counts}"
    members = [[index for row in ranks for pack in row for own in pack for index in own] for ranks in plan]
    trained = np.array([np.count_nonzero(sample.loss_mask) for sample in samples], dtype=np.int32)
    order = np.array(list(chain.from_iterable(members)), dtype=np.int32)
    index: dict[str, np.ndarray] = {
        "multiples": np.array([multiple_of, document_multiple_of], dtype=np.int64),
        "num_micro_batches": np.array([len(ranks[0]) for ranks in plan], dtype=np.int64),
        "num_trained_tokens": np.array([trained[own].sum() for own in members], dtype=np.int64),
        "num_sequences": np.array([len(own) for own in members], dtype=np.int64),
        "samples": order,
        "completions": completion_numbers(samples)[order],
        "trained_tokens": trained[order],
    }
    slices = [Slice(samples, list(chain.from_iterable(ranks[rank] for ranks in plan))) for rank in range(dp)]
    return index, slices


def from_slice(index: dict[str, np.ndarray], data: np.ndarray) -> list[list[PackedBatch]]:
    """The packs of the rank whose slice this is, as [mini-batch][micro-batch]."""
    part = _sections(data)
    starts, prompt_starts = cumulative(part["lengths"]), cumulative(part["prompt_lengths"])
    has_turns = part["is_predicted"].size > 0
    is_predicted = np.unpackbits(part["is_predicted"], count=len(part["tokens"])).view(np.bool_)

    def at_tokens(responses: np.ndarray) -> np.ndarray:
        """0 where a token is not predicted."""
        if not has_turns:
            return responses
        values = np.zeros(len(part["tokens"]), responses.dtype)
        values[is_predicted] = responses
        return values

    is_trained, ages = at_tokens((part["flags"] & _TRAINED).view(np.bool_)), at_tokens(part["flags"] >> 1)
    rollout_logprobs = at_tokens(part["rollout_logprobs"])
    has_token_advantages = part["token_advantages"].size > 0
    token_advantages = at_tokens(part["token_advantages"]) if has_token_advantages else part["token_advantages"]
    has_sets = part["kept_sizes"].size > 0
    kept = KeptTokens.of_sizes(part["kept_ids"], at_tokens(part["kept_sizes"])) if has_sets else None
    samples = {
        number: TrainSample(
            prompt_tokens=part["prompt_tokens"][prompt_starts[prompt] : prompt_starts[prompt + 1]],
            tokens=part["tokens"][start:end],
            loss_mask=is_trained[start:end],
            rollout_logprobs=rollout_logprobs[start:end],
            advantage=advantage,
            group=prompt,
            ages=ages[start:end],
            is_sampled=is_predicted[start:end] if has_turns else None,
            token_advantages=token_advantages[start:end] if has_token_advantages else None,
            kept=kept and kept.part(start, end),
        )
        for number, prompt, advantage, start, end in zip(
            part["numbers"].tolist(),
            part["prompt_of"].tolist(),
            part["advantages"].tolist(),
            starts[:-1],
            starts[1:],
            strict=True,
        )
    }
    multiple_of, document_multiple_of = index["multiples"].tolist()
    order, branches = iter(part["order"].tolist()), iter(part["num_branches"].tolist())
    packs = (
        assemble(
            samples,
            [[next(order) for _ in range(next(branches))] for _ in range(count)],
            multiple_of=multiple_of,
            document_multiple_of=document_multiple_of,
        )
        for count in part["num_documents"].tolist()
    )
    return [[next(packs) for _ in range(count)] for count in index["num_micro_batches"].tolist()]


def _counts(data: np.ndarray) -> np.ndarray:
    return data[: 8 * len(_COUNTS)].view(np.int64)


def _num_bytes(counts: dict[str, int]) -> int:
    return 8 * len(_COUNTS) + sum(np.dtype(dtype).itemsize * counts[name] for dtype, name in _SECTIONS.values())


def _sections(data: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a slice: views of its bytes."""
    counts = dict(zip(_COUNTS, _counts(data).tolist(), strict=True))
    assert _num_bytes(counts) == len(data), f"a slice of {len(data)} bytes, not {_num_bytes(counts)}"
    found: dict[str, np.ndarray] = {}
    start = 8 * len(_COUNTS)
    for name, (dtype, count) in _SECTIONS.items():
        end = start + np.dtype(dtype).itemsize * counts[count]
        found[name] = data[start:end].view(dtype)
        start = end
    return found
