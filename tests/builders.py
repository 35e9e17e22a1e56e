"""The records between rooms, built from what a test is about; everything else has a harmless value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from mgrpo.types import (
    Branch,
    Completion,
    KeptTokens,
    Prompt,
    RolloutGroup,
    Score,
    ScoredGroup,
    TeacherScores,
    TrainSample,
    TrajectoryRecord,
    Turn,
)


def prompt(tokens: Sequence[int] | np.ndarray = (5, 6), *, verifiers: Sequence[str] = (), **fields: object) -> Prompt:
    """A prompt; each verifier has the ground truth 1 unless `ground_truths` is given."""
    values = {"id": (0, 0), "text": "", "ground_truths": (1,) * len(verifiers)} | fields
    return Prompt(tokens=np.asarray(tokens, np.int32), verifiers=tuple(verifiers), **values)


def completion(
    tokens: int | Sequence[int] | np.ndarray = 2,
    *,
    logprobs: float | Sequence[float] | np.ndarray = -1.0,
    version: int | Sequence[int] = 0,
    finish_reason: str = "stop",
    text: str = "",
    trajectory: TrajectoryRecord | None = None,
    kept: KeptTokens | None = None,
) -> Completion:
    """A completion of the tokens 0, 1, .. if only their number is given; one log-probability or version may stand for all."""
    ids = np.arange(tokens) if isinstance(tokens, int) else np.asarray(tokens)
    is_sampled = np.ones(len(ids), np.bool_) if trajectory is None else trajectory.is_sampled
    return Completion(
        tokens=ids.astype(np.int32),
        logprobs=np.where(is_sampled, np.full(len(ids), logprobs, np.float32), np.float32(0)),
        policy_versions=np.where(is_sampled, np.full(len(ids), version, np.int32), np.int32(-1)),
        finish_reason=finish_reason,
        text=text,
        trajectory=trajectory,
        kept=kept,
    )


def kept_tokens(*sets: Sequence[int]) -> KeptTokens:
    """The set of each token."""
    ids = np.array([own for each in sets for own in each], np.int32)
    return KeptTokens.of_sizes(ids, np.array([len(each) for each in sets], np.int32))


def sets_of(kept: KeptTokens) -> list[list[int]]:
    """The same back: what a test compares."""
    assert kept.ids.dtype == kept.sizes.dtype == np.int32 and kept.offsets[0] == 0
    assert kept.offsets[-1] == len(kept.ids)
    return [kept.ids[a:b].tolist() for a, b in itertools.pairwise(kept.offsets.tolist())]


def teacher_scores(length: int, k: int, rng: np.random.Generator) -> TeacherScores:
    """Of random tokens; about one in eight is missing."""
    missing = rng.random(length) < 0.125
    ids = np.where(missing[:, None], -1, rng.integers(0, 1000, (length, k))).astype(np.int32)
    return TeacherScores(
        logprobs=np.where(missing, np.nan, -rng.random(length)).astype(np.float32),
        ids=ids if k else None,
        likeliest=np.where(ids < 0, np.nan, -rng.random((length, k))).astype(np.float32) if k else None,
    )


def trajectory(mask: str, **fields: object) -> TrajectoryRecord:
    """From a mask such as "11001": a 1 for each token that was sampled. Each stretch of these is a turn unless `turns` is given."""
    turns = tuple(Turn(start=found.start(), end=found.end()) for found in re.finditer("1+", mask))
    values = {"turns": turns, "messages": (), "ended_by": "stop", "scored_text": "", "sampled_text": ""} | fields
    return TrajectoryRecord(is_sampled=np.array([mark == "1" for mark in mask], np.bool_), **values)


def branch(start: int, end: int, prompt_tokens: Sequence[int] = (5, 6)) -> Branch:
    """A branch of a trajectory."""
    return Branch(prompt_tokens=np.asarray(prompt_tokens, np.int32), start=start, end=end)


def turn(start: int = 0, end: int = 1, **fields: object) -> Turn:
    """A turn of a trajectory."""
    return Turn(start=start, end=end, **fields)


def rollout_group(completions: Sequence[Completion], of: Prompt | None = None) -> RolloutGroup:
    """A group, of a prompt that does not matter unless given."""
    return RolloutGroup(prompt=of or prompt(), completions=tuple(completions))


def scored_group(
    rewards: Sequence[float],
    *,
    completions: Sequence[Completion] | None = None,
    parts: Sequence[Mapping[str, float]] | None = None,
    of: Prompt | None = None,
) -> ScoredGroup:
    """A group with one completion, and one mapping of parts, for each reward."""
    completions = completions or [completion() for _ in rewards]
    scores = [Score(reward=r, parts=dict(p)) for r, p in zip(rewards, parts or [{}] * len(rewards), strict=True)]
    return ScoredGroup(group=rollout_group(completions, of), scores=tuple(scores))


def train_sample(group: RolloutGroup, index: int, *, advantage: float = 0.0, number: int = 0) -> TrainSample:
    """Completion `index` of a group that is `number` in its step; an advantage of NaN trains nothing."""
    sampled, is_trained = group.completions[index], advantage == advantage
    return TrainSample(
        prompt_tokens=group.prompt.tokens,
        tokens=sampled.tokens,
        loss_mask=np.full(len(sampled.tokens), is_trained),
        rollout_logprobs=sampled.logprobs,
        advantage=advantage if is_trained else 0.0,
        group=number,
    )
