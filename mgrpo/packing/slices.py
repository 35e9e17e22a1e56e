"""A step's packs on their way to the learners: an index for every rank, and a slice of bytes for each data-parallel rank.

A slice holds the samples that its rank trains on, 9 bytes for a response token and 4 for a prompt token or one between
turns; where the sampling was cut, 4 more for a response token and for each token of its set; with scores of teachers on
engines or servers, 4 for a response token with a score, and 8 for each likeliest token; the prompts of teachers on the
learners that read others than the policy; with routes of the engines, layers x top_k bytes for each token that a sample
reads, or twice as many; and which of the samples form a document, which documents a pack. All else is a
function of lengths: the receiver lays its packs out itself.

The index: `multiples [2]` (of packs, of documents), `num_micro_batches`, `num_trained_tokens` and `num_sequences`, all
`[mini-batches]`, the last two over all ranks, so that each has the loss's denominator without the others' packs; and
`samples`, `completions` and `trained_tokens` `[sequences]`, of the sequences of all ranks, mini-batch after mini-batch. In a
step with a sample that has a teacher also `teachers` `[sequences]` int8, and with their scores `num_likeliest` `[1]`. In one with
routes `routes [3]`: MoE layers, top_k and bytes of a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from mgrpo.packing.lengths import Documents, completion_numbers
from mgrpo.packing.step import StepPlan
from mgrpo.types import TeacherScores, TrainSample

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
    "teachers",
    "taught",
    "likeliest",
    "teacher_prompt_of",
    "teacher_prompts",
    "teacher_prompt_tokens",
    "packs",
    "documents",
    "sequences",
    "route_bytes",
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
    # Of the samples, -1 for none; none where all teachers read the policy's prompts.
    "teacher_prompt_of": (np.int32, "teacher_prompt_of"),
    "teacher_prompt_lengths": (np.int32, "teacher_prompts"),
    "teacher_prompt_tokens": (np.int32, "teacher_prompt_tokens"),
    # Scores of the responses of samples with a teacher; none where learners query it.
    "taught_logprobs": (np.float32, "taught"),
    # Of the same, each with its k likeliest tokens.
    "taught_ids": (np.int32, "likeliest"),
    "taught_likeliest": (np.float32, "likeliest"),
    "flags": (np.uint8, "responses"),
    # Of the samples; none where no sample of the slice has one.
    "teachers": (np.int8, "teachers"),
    # A bit for each token; none where all tokens are predicted.
    "is_predicted": (np.uint8, "mask_bytes"),
    # Of each sample's prompt and tokens but the last; their shape and type are in the index.
    "routes": (np.uint8, "route_bytes"),
}
TRAINED = 1
"""Bit 0 of a token's flags is its loss mask; the other seven are its age in policy versions."""


class Slice:
    """The part of a batch for one data-parallel rank; its bytes are filled in where they are wanted."""

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
        self.taught = [s.taught.part(s.is_predicted) for s in self.samples if s.taught is not None]
        num_taught = sum(sample.teacher >= 0 for sample in self.samples)
        assert len(self.taught) in (0, num_taught), "all samples with a teacher have its scores, or none has"
        self.teacher_prompts = {
            id(s.teacher_prompt): s.teacher_prompt for s in self.samples if s.teacher_prompt is not None
        }
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
            "teachers": len(self.samples) if any(sample.teacher >= 0 for sample in self.samples) else 0,
            "taught": sum(len(scores.logprobs) for scores in self.taught),
            "likeliest": sum(scores.ids.size for scores in self.taught if scores.ids is not None),
            "teacher_prompt_of": len(self.samples) if self.teacher_prompts else 0,
            "teacher_prompts": len(self.teacher_prompts),
            "teacher_prompt_tokens": sum(map(len, self.teacher_prompts.values())),
            "packs": len(packs),
            "documents": len(documents),
            "sequences": len(self.order),
            "route_bytes": sum(sample.routes.nbytes for sample in self.samples if sample.routes is not None),
        }
        self.num_bytes = _num_bytes(self.counts)

    def fill(self, data: np.ndarray) -> None:
        """Write the slice into `data`, `[num_bytes]` uint8."""
        _counts(data)[:] = [self.counts[name] for name in _COUNTS]
        part, samples, prompts = sections(data), self.samples, list(self.prompts.values())
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
        self._fill_taught(part)
        self._fill_routes(part["routes"])
        if self.sets:
            # Tokens that are not predicted have an empty set.
            np.concatenate([kept.ids for kept in self.sets], out=part["kept_ids"])
            by_set = zip(self.sets, each, strict=True)
            np.concatenate([kept.sizes[own] for kept, (_, own) in by_set], out=part["kept_sizes"])
        np.concatenate([sample.loss_mask[own] for sample, own in each], out=part["flags"].view(np.bool_))
        ends = np.cumsum([sample.num_predicted for sample in samples]).tolist()
        for (sample, own), start, end in zip(each, [0, *ends], ends, strict=False):
            if sample.ages is not None:
                part["flags"][start:end] |= sample.ages[own] << 1

    def _fill_taught(self, part: Mapping[str, np.ndarray]) -> None:
        if self.counts["teachers"]:
            part["teachers"][:] = [sample.teacher for sample in self.samples]
        if self.teacher_prompts:
            place = {key: number for number, key in enumerate(self.teacher_prompts)}
            prompts = list(self.teacher_prompts.values())
            part["teacher_prompt_of"][:] = [place.get(id(sample.teacher_prompt), -1) for sample in self.samples]
            part["teacher_prompt_lengths"][:] = [len(prompt) for prompt in prompts]
            np.concatenate(prompts, out=part["teacher_prompt_tokens"])
        if self.taught:
            scores = TeacherScores.joined(self.taught)
            part["taught_logprobs"][:] = scores.logprobs
            if scores.ids is not None and scores.likeliest is not None:
                part["taught_ids"][:], part["taught_likeliest"][:] = scores.ids.ravel(), scores.likeliest.ravel()

    def _fill_routes(self, part: np.ndarray) -> None:
        start = 0
        for sample in self.samples:
            if sample.routes is not None:
                end = start + sample.routes.nbytes
                part[start:end].view(sample.routes.dtype).reshape(sample.routes.shape)[:] = sample.routes
                start = end

    def filled(self) -> np.ndarray:
        """Slice copied to new memory."""
        data = np.empty(self.num_bytes, np.uint8)
        self.fill(data)
        return data


def to_slices(
    samples: Sequence[TrainSample], plan: StepPlan, *, multiple_of: int, document_multiple_of: int
) -> tuple[dict[str, np.ndarray], list[Slice]]:
    """The index, and the slice of each data-parallel rank.

    Args:
        samples: of the whole step.
        plan: of one or several passes over `samples`.
        multiple_of: as in `plan_step`.
        document_multiple_of: as in `plan_step`.
    Returns:
        The index, equal on all ranks, and for each rank its packs, whose bytes `Slice.filled` makes.
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
    if any(sample.teacher >= 0 for sample in samples):
        index["teachers"] = np.array([sample.teacher for sample in samples], dtype=np.int8)[order]
    if known := next((sample.taught for sample in samples if sample.taught is not None), None):
        index["num_likeliest"] = np.array([known.num_likeliest], dtype=np.int64)
    routed = [sample.routes for sample in samples if sample.routes is not None]
    assert len(routed) in (0, len(samples)), "all samples of a step have routes, or none has"
    if routed:
        index["routes"] = np.array([*routed[0].shape[1:], routed[0].itemsize], dtype=np.int64)
    slices = [Slice(samples, list(chain.from_iterable(ranks[rank] for ranks in plan))) for rank in range(dp)]
    return index, slices


def _counts(data: np.ndarray) -> np.ndarray:
    return data[: 8 * len(_COUNTS)].view(np.int64)


def _num_bytes(counts: dict[str, int]) -> int:
    return 8 * len(_COUNTS) + sum(np.dtype(dtype).itemsize * counts[name] for dtype, name in _SECTIONS.values())


def sections(data: np.ndarray) -> dict[str, np.ndarray]:
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
