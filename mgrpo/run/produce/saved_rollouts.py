"""Sampled groups as arrays and JSON, for the state of a run, and back.

A record of a trajectory is its `TrajectoryRecord`; which of the tokens were sampled lies in an array, as the tokens do, and so
do the contexts of branches.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.types import (
    AgentRecord,
    Branch,
    Completion,
    KeptTokens,
    Prompt,
    RolloutGroup,
    Routes,
    Score,
    ScoredGroup,
    TeacherScores,
    TrajectoryRecord,
    Turn,
)

_ARRAYS = ("tokens", "logprobs", "policy_versions")

PromptOf = Callable[..., Prompt]
"""Returns the prompt of an id, with an environment's opening if given."""


def packed(groups: Mapping[int, RolloutGroup]) -> tuple[dict[int, dict[str, Any]], dict[str, np.ndarray]]:
    """For each group a JSON record of its completions' places in the arrays, which lie end to end.

    The arrays are those of `Completion` by name, `texts` uint8, in UTF-8, `is_sampled` uint8 if there are trajectories,
    `contexts` int32 if these have branches, `routes` if engines report routed experts, `kept_ids` and `kept_sizes`, both
    int32, if the sampling was cut, and `taught_logprobs` float32, `taught_ids` int32 and `taught_likeliest` float32, for completions with teacher scores.
    """
    records: dict[int, dict[str, Any]] = {}
    completions = [completion for group in groups.values() for completion in group.completions]
    texts = [completion.text.encode() for completion in completions]
    contexts = [branch.prompt_tokens for completion in completions for branch in _branches(completion)]
    context_ends = iter(itertools.accumulate(map(len, contexts)))
    ends = iter(itertools.accumulate(len(completion.tokens) for completion in completions))
    taught = [completion.taught for completion in completions if completion.taught]
    taught_ends = iter(itertools.accumulate(len(scores.logprobs) for scores in taught))
    text_ends = iter(itertools.accumulate(map(len, texts)))
    routes = [own for completion in completions for own in completion.routes]
    route_ends = iter(itertools.accumulate(map(len, routes)))
    start = text_start = 0
    for number, group in groups.items():
        size = len(group.completions)
        cuts = [start, *itertools.islice(ends, size)]
        text_cuts = [text_start, *itertools.islice(text_ends, size)]
        reasons = [completion.finish_reason for completion in group.completions]
        records[number] = {"cuts": cuts, "text_cuts": text_cuts, "finish_reasons": reasons}
        if any(completion.trajectory for completion in group.completions):
            records[number]["trajectories"] = [_record(c.trajectory, context_ends) for c in group.completions]
        if any(completion.taught for completion in group.completions):
            records[number]["taught"] = [
                c.taught and [next(taught_ends), c.taught.num_likeliest] for c in group.completions
            ]
        if any(completion.routes for completion in group.completions):
            # A state has no type for uint16: its bytes are kept as int16.
            places = [
                [[end - len(own), end] for own, end in zip(c.routes, route_ends, strict=False)]
                for c in group.completions
            ]
            records[number]["routes"] = {"row": routes[0].shape[1:], "places": places}
        if group.prompt.opening:
            records[number]["opening"] = group.prompt.opening
        start, text_start = cuts[-1], text_cuts[-1]
    arrays = {name: np.concatenate([getattr(c, name) for c in completions]) for name in _ARRAYS if completions}
    if any(completion.trajectory for completion in completions):
        arrays["is_sampled"] = np.concatenate([completion.loss_mask for completion in completions]).astype(np.uint8)
    if any(completion.kept for completion in completions):
        kept = KeptTokens.joined([c.kept or KeptTokens.none(len(c.tokens)) for c in completions])
        arrays |= {"kept_ids": kept.ids, "kept_sizes": kept.sizes}
    arrays |= _scores_as_arrays(taught)
    if routes:
        whole = np.concatenate(routes).ravel()
        arrays["routes"] = whole.view(np.int16) if whole.itemsize == 2 else whole
    if contexts:
        arrays["contexts"] = np.concatenate(contexts)
    return records, arrays | ({"texts": np.array(bytearray(b"".join(texts)))} if completions else {})


def unpacked(prompt: Prompt, record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> RolloutGroup:
    """A group from its record and the arrays; its prompt has the record's `opening`."""
    texts = arrays.get("texts", np.zeros(0, np.uint8))
    cuts, text_cuts = itertools.pairwise(record["cuts"]), itertools.pairwise(record["text_cuts"])
    reasons = record["finish_reasons"]
    trajectories = record.get("trajectories", [None] * len(reasons))
    is_sampled = arrays.get("is_sampled", np.zeros(0, np.uint8)).astype(np.bool_)
    contexts = arrays.get("contexts", np.zeros(0, np.int32))
    sizes = arrays.get("kept_sizes")
    taught = record.get("taught", [None] * len(reasons))
    routed = record.get("routes", {"places": [()] * len(reasons)})
    routes = _routes(arrays["routes"], routed["row"]) if "row" in routed else np.zeros(0)
    kept = None if sizes is None else KeptTokens.of_sizes(arrays.get("kept_ids", np.zeros(0, np.int32)), sizes)
    return RolloutGroup(
        prompt=prompt,
        completions=tuple(
            Completion(
                tokens=arrays["tokens"][a:b],
                logprobs=arrays["logprobs"][a:b],
                policy_versions=arrays["policy_versions"][a:b],
                finish_reason=reason,
                text=texts[c:d].tobytes().decode(),
                trajectory=own and _trajectory(own, is_sampled[a:b], contexts),
                kept=kept and kept.part(a, b),
                taught=spoken and _scores(arrays, spoken[0] - (b - a), *spoken),
                routes=tuple(routes[first:last] for first, last in places),
            )
            for (a, b), (c, d), reason, own, spoken, places in zip(
                cuts, text_cuts, reasons, trajectories, taught, routed["places"], strict=True
            )
        ),
    )


def fits(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray], rollout: Rollout) -> bool:
    """True if a run with these settings may train on the group: its size matches, and so does the meaning of its logprobs."""
    has_size = len(record["finish_reasons"]) == rollout.num_samples_per_prompt_rollout
    return has_size and ("kept_sizes" in arrays) == rollout.is_cut


def plain_scores(scored: ScoredGroup) -> list[list[Any]]:
    """The scores of a group in JSON. Records of reward functions of other types become strings."""
    return [
        [score.reward, score.parts, json.loads(json.dumps(dict(score.extras), default=str))] for score in scored.scores
    ]


def read_scores(plain: Sequence[Sequence[Any]]) -> tuple[Score, ...]:
    """The scores from `plain_scores`."""
    return tuple(Score(reward=reward, parts=parts, extras=extras) for reward, parts, extras in plain)


def _scores_as_arrays(taught: Sequence[TeacherScores]) -> dict[str, np.ndarray]:
    """Teacher scores end to end; likeliest tokens flat."""
    parts = {
        "taught_logprobs": [scores.logprobs for scores in taught],
        "taught_ids": [scores.ids.ravel() for scores in taught if scores.ids is not None],
        "taught_likeliest": [scores.likeliest.ravel() for scores in taught if scores.likeliest is not None],
    }
    return {name: np.concatenate(own) for name, own in parts.items() if own}


def _scores(arrays: Mapping[str, np.ndarray], start: int, end: int, k: int) -> TeacherScores:
    """Scores of taught tokens `start` to `end`, end excluded; `k` is equal in a state."""
    logprobs = arrays["taught_logprobs"][start:end]
    if not k:
        return TeacherScores(logprobs=logprobs)
    ids, likeliest = (arrays[name].reshape(-1, k)[start:end] for name in ("taught_ids", "taught_likeliest"))
    return TeacherScores(logprobs=logprobs, ids=ids, likeliest=likeliest)


def _routes(flat: np.ndarray, row: Sequence[int]) -> Routes:
    return flat.view(np.uint16 if flat.itemsize == 2 else np.uint8).reshape(-1, *row)


def _branches(completion: Completion) -> tuple[Branch, ...]:
    return completion.trajectory.branches if completion.trajectory else ()


def _record(trajectory: TrajectoryRecord | None, context_ends: Iterator[int]) -> dict[str, Any] | None:
    """A trajectory in JSON; `context_ends`: ends of the contexts of the branches that follow."""
    if trajectory is None:
        return None
    names = [field.name for field in dataclasses.fields(trajectory) if field.name not in ("is_sampled", "branches")]
    values = {name: getattr(trajectory, name) for name in names}
    branches = [
        [branch.start, branch.end, end - len(branch.prompt_tokens), end, branch.parent, branch.messages, branch.after]
        for branch, end in zip(trajectory.branches, context_ends, strict=False)
    ]
    values |= {"branches": branches} if branches else {}
    values["agent"] = trajectory.agent and dataclasses.asdict(trajectory.agent)
    return values | {"turns": [dataclasses.asdict(turn) for turn in trajectory.turns]}


def _trajectory(record: Mapping[str, Any], is_sampled: np.ndarray, contexts: np.ndarray) -> TrajectoryRecord:
    turns = tuple(_turn(turn) for turn in record["turns"])
    branches = tuple(_branch(contexts, *branch) for branch in record.get("branches", ()))
    agent = AgentRecord(**record["agent"]) if record.get("agent") else None
    values = {**record, "turns": turns, "messages": tuple(record["messages"]), "branches": branches, "agent": agent}
    return TrajectoryRecord(is_sampled=is_sampled, **values)


def _branch(
    contexts: np.ndarray,
    start: int,
    end: int,
    first: int,
    last: int,
    parent: int = -1,
    messages: Sequence[Mapping[str, object]] = (),
    after: int = -1,
) -> Branch:
    """A branch from its record. States of earlier versions lack `parent`, `messages` and `after`."""
    context, said = contexts[first:last], tuple(messages)
    return Branch(prompt_tokens=context, start=start, end=end, parent=parent, after=after, messages=said)


def _turn(record: Mapping[str, Any]) -> Turn:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
    return Turn(**values)
