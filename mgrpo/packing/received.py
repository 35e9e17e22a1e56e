"""Packs from the slice that a rank has received, laid out as the policy reads them, and as teachers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mgrpo.packing.document import as_taught, assemble, taught_documents
from mgrpo.packing.lengths import Documents, cumulative
from mgrpo.packing.slices import TRAINED, sections
from mgrpo.types import KeptTokens, PackedBatch, Routes, TeacherScores, TrainSample


def from_slice(index: Mapping[str, np.ndarray], data: np.ndarray) -> list[list[PackedBatch]]:
    """The packs of the rank whose slice this is, as [mini-batch][micro-batch]; all of a step have the same fields."""
    part = sections(data)
    samples = _samples(part, index)
    return _packs(part, index, lambda own, padding: _as_others(assemble(samples, own, **padding), index))


def teacher_packs(index: Mapping[str, np.ndarray], data: np.ndarray, teacher: int) -> list[list[PackedBatch]]:
    """Packs of the same layout as this teacher reads them: its sequences alone, in the same order, after the teacher's prompts.

    A pack without any of them becomes a dummy pack.
    """
    part = sections(data)
    read = {number: as_taught(sample) for number, sample in _samples(part, index).items() if sample.teacher == teacher}
    return _packs(
        part,
        index,
        lambda own, padding: assemble(
            read,
            [each for members in own for each in taught_documents(read, [n for n in members if n in read])],
            **padding,
        ),
    )


def _packs(
    part: Mapping[str, np.ndarray],
    index: Mapping[str, np.ndarray],
    make: Callable[[Documents, dict[str, int]], PackedBatch],
) -> list[list[PackedBatch]]:
    padding = dict(zip(("multiple_of", "document_multiple_of"), index["multiples"].tolist(), strict=True))
    order, branches = iter(part["order"].tolist()), iter(part["num_branches"].tolist())
    packs = (
        make([[next(order) for _ in range(next(branches))] for _ in range(count)], padding)
        for count in part["num_documents"].tolist()
    )
    return [[next(packs) for _ in range(count)] for count in index["num_micro_batches"].tolist()]


def _as_others(pack: PackedBatch, index: Mapping[str, np.ndarray]) -> PackedBatch:
    """Pack with all fields of the step's packs, also where no sample of this one has a teacher."""
    if "teachers" in index and pack.teachers is None:
        pack = replace(pack, teachers=np.full(len(pack.samples), -1, np.int8))
    if "num_likeliest" in index and pack.taught is None:
        pack = replace(pack, taught=TeacherScores.none(len(pack.targets), int(index["num_likeliest"][0])))
    return pack


def _samples(part: Mapping[str, np.ndarray], index: Mapping[str, np.ndarray]) -> dict[int, TrainSample]:
    """The samples of a slice by number."""
    starts = cumulative(part["lengths"])
    has_turns = part["is_predicted"].size > 0
    is_predicted = np.unpackbits(part["is_predicted"], count=len(part["tokens"])).view(np.bool_)

    def at_tokens(responses: np.ndarray) -> np.ndarray:
        """Values at all tokens; 0 where a token is not predicted."""
        if not has_turns:
            return responses
        values = np.zeros(len(part["tokens"]), responses.dtype)
        values[is_predicted] = responses
        return values

    is_trained, ages = at_tokens((part["flags"] & TRAINED).view(np.bool_)), at_tokens(part["flags"] >> 1)
    rollout_logprobs = at_tokens(part["rollout_logprobs"])
    has_token_advantages = part["token_advantages"].size > 0
    token_advantages = at_tokens(part["token_advantages"]) if has_token_advantages else part["token_advantages"]
    has_sets = part["kept_sizes"].size > 0
    kept = KeptTokens.of_sizes(part["kept_ids"], at_tokens(part["kept_sizes"])) if has_sets else None
    prompts = _cut(part["prompt_tokens"], part["prompt_lengths"])
    prompt_lengths = part["prompt_lengths"][part["prompt_of"]]
    routes = _routes(part["routes"], index, (prompt_lengths + part["lengths"] - 1).tolist())
    samples = {
        number: TrainSample(
            prompt_tokens=prompts[prompt],
            tokens=part["tokens"][start:end],
            loss_mask=is_trained[start:end],
            rollout_logprobs=rollout_logprobs[start:end],
            advantage=advantage,
            group=prompt,
            ages=ages[start:end],
            is_sampled=is_predicted[start:end] if has_turns else None,
            token_advantages=token_advantages[start:end] if has_token_advantages else None,
            kept=kept and kept.part(start, end),
            routes=own,
        )
        for number, prompt, advantage, start, end, own in zip(
            part["numbers"].tolist(),
            part["prompt_of"].tolist(),
            part["advantages"].tolist(),
            starts[:-1],
            starts[1:],
            routes,
            strict=True,
        )
    }
    return _with_teachers(samples, part, index) if part["teachers"].size else samples


def _routes(data: np.ndarray, index: Mapping[str, np.ndarray], lengths: list[int]) -> Sequence[Routes | None]:
    if "routes" not in index:
        return [None] * len(lengths)
    layers, top_k, itemsize = index["routes"].tolist()
    return _cut(data.view(f"u{itemsize}").reshape(-1, layers, top_k), lengths)


def _with_teachers(
    samples: Mapping[int, TrainSample], part: Mapping[str, np.ndarray], index: Mapping[str, np.ndarray]
) -> dict[int, TrainSample]:
    prompts: list[np.ndarray | None] = [*_cut(part["teacher_prompt_tokens"], part["teacher_prompt_lengths"]), None]
    prompt_of = part["teacher_prompt_of"].tolist() or [-1] * len(samples)
    teachers, found, start = part["teachers"].tolist(), {}, 0
    for (number, sample), teacher, prompt in zip(samples.items(), teachers, prompt_of, strict=True):
        taught = None
        if "num_likeliest" in index and teacher >= 0:
            is_predicted = sample.is_predicted
            end = start + int(np.count_nonzero(is_predicted))
            taught = _scores(part, start, end, int(index["num_likeliest"][0])).spread(is_predicted)
            start = end
        found[number] = replace(sample, teacher=teacher, teacher_prompt=prompts[prompt], taught=taught)
    return found


def _scores(part: Mapping[str, np.ndarray], start: int, end: int, num_likeliest: int) -> TeacherScores:
    """Teacher scores of the responses from `start` to `end`, end excluded, of samples with a teacher."""
    own = slice(start * num_likeliest, end * num_likeliest)
    ids, likeliest = (part[name][own].reshape(-1, num_likeliest or 1) for name in ("taught_ids", "taught_likeliest"))
    return TeacherScores(
        logprobs=part["taught_logprobs"][start:end],
        ids=ids if num_likeliest else None,
        likeliest=likeliest if num_likeliest else None,
    )


def _cut(values: np.ndarray, lengths: np.ndarray | list[int]) -> list[np.ndarray]:
    """Views of the concatenated parts."""
    starts = cumulative(lengths).tolist()
    return [values[start:end] for start, end in pairwise(starts)]
