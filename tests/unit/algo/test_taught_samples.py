"""Samples of completions that have a teacher: which tokens are trained, and what travels with them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from mgrpo.algo.credit.turn_credit import TurnCredit
from mgrpo.algo.training_samples import train_samples
from mgrpo.types import Completion, Lesson, ScoredGroup, TeacherScores, TrainSample
from tests import builders

NAN = float("nan")
samples_of = functools.partial(train_samples, normalization="centered", ddof=0, eps=0.0)


def scores(*logprobs: float, k: int = 2) -> TeacherScores:
    """Ids that tell the place; NaN and -1 where there is no log-probability."""
    values = np.array(logprobs, np.float32)
    ids = np.where(np.isnan(values)[:, None], -1, np.arange(len(values))[:, None] * 10 + np.arange(k))
    likeliest = np.where(ids < 0, np.nan, -ids / 7)
    return TeacherScores(logprobs=values, ids=ids.astype(np.int32), likeliest=likeliest.astype(np.float32))


def group(completion: Completion, lessons: tuple[Lesson, ...], *, reward: float = 1.0, teacher: int = 1) -> ScoredGroup:
    """Beside the completion another one, of reward 0, which has no lesson."""
    scored = builders.scored_group(
        [reward, 0.0], completions=[completion, builders.completion(2)], of=builders.prompt(teacher=teacher)
    )
    return dataclasses.replace(scored, lessons=(lessons, (Lesson(prompt=None, untaught="no_answer"),)))


def lesson_of(scored: ScoredGroup) -> ScoredGroup:
    """With the policy's own prompt as the first completion's lesson."""
    return dataclasses.replace(scored, lessons=((Lesson(prompt=scored.group.prompt.tokens),), *scored.lessons[1:]))


@pytest.mark.parametrize(("has_score", "stopped", "only", "is_asked"), list(itertools.product([True, False], repeat=4)))
def test_a_token_is_trained_if_a_reward_or_its_teacher_says_something(has_score, stopped, only, is_asked) -> None:
    """The four cases decide every token; a token that both leave out would still count in the loss's denominator."""
    own = builders.completion(3, finish_reason="stop" if stopped else "length", trajectory=builders.trajectory("101"))
    own = dataclasses.replace(own, taught=scores(-1, NAN, NAN)) if is_asked else own
    scored = group(own, (Lesson(prompt=None),), reward=1.0 if has_score else NAN)
    scored = lesson_of(scored) if is_asked else scored
    sample, other = samples_of([scored], mask_truncated=True, distillation_only=only)
    # Token 1 was not sampled, and of token 2 the teacher knows nothing.
    by_reward = has_score and not only and stopped
    expected = [stopped, False, False] if is_asked else [by_reward, False, by_reward]
    assert sample.loss_mask.tolist() == expected
    assert other.loss_mask.tolist() == [not only] * 2
    assert (sample.teacher, other.teacher) == (1 if is_asked else -1, -1)
    assert sample.advantage == (0.5 if has_score and not only else 0.0)


def test_rewards_are_not_trained_on_under_distillation_only() -> None:
    """Neither through the completion's advantage nor through its turns'."""
    own = builders.completion(3, trajectory=builders.trajectory("101"))
    scored = lesson_of(group(dataclasses.replace(own, taught=scores(-1, NAN, -2)), (Lesson(prompt=None),)))
    sample, _ = samples_of([scored], turn_credit=TurnCredit(), distillation_only=True)
    assert (sample.advantage, sample.token_advantages) == (0.0, None)
    assert sample.loss_mask.tolist() == [True, False, True]


def test_tool_answers_are_trained_on_by_the_reward_alone() -> None:
    """mask_tool_use=false trains on what a tool has written; no teacher judges that."""
    own = builders.completion(3, trajectory=builders.trajectory("101"))
    taught = dataclasses.replace(own, taught=scores(-1, NAN, NAN))
    for completion, last in ((own, True), (taught, False)):
        scored = lesson_of(group(completion, (Lesson(prompt=None),)))
        sample, _ = samples_of([scored], mask_tool_use=False)
        assert sample.is_sampled is None and sample.loss_mask.tolist() == [True, True, last]
        sample, _ = samples_of([scored], mask_tool_use=False, distillation_only=True)
        assert sample.loss_mask.tolist() == [True, False, last]


def equal(sample: TrainSample, expected: TeacherScores) -> bool:
    return sample.taught is not None and all(
        np.array_equal(ours, theirs, equal_nan=True)
        for ours, theirs in zip(dataclasses.astuple(sample.taught), dataclasses.astuple(expected), strict=True)
    )


def test_a_branch_has_the_scores_of_its_own_tokens_and_the_prompt_of_its_own_lesson() -> None:
    """Scores of other tokens are numbers all the same, and would be learned from."""
    branches = (builders.branch(0, 2), builders.branch(3, 5, [5, 6, 8]), builders.branch(5, 6, [9]))
    own = builders.completion(6, trajectory=builders.trajectory("110111", branches=branches))
    hints = tuple(np.array(tokens, np.int32) for tokens in ([1, 2, 3], [1, 2, 3, 8]))
    lessons = (*(Lesson(prompt=hint) for hint in hints), Lesson(prompt=None, untaught="branch"))
    asked = scores(-1, -2, NAN, -4, NAN, NAN)
    first, second, third, _ = samples_of([group(dataclasses.replace(own, taught=asked), lessons)])
    assert equal(first, asked.part(slice(0, 2))) and equal(second, asked.part(slice(3, 5))) and third.taught is None
    assert [part.teacher for part in (first, second, third)] == [1, 1, -1]
    assert [part.loss_mask.tolist() for part in (first, second, third)] == [[True] * 2, [True, False], [True]]
    # A teacher on an engine has read its prompt already; one on the learners is to.
    assert first.teacher_prompt is second.teacher_prompt is None
    first, second, third, other = samples_of([group(own, lessons)])
    assert first.teacher_prompt is hints[0] and second.teacher_prompt is hints[1]
    assert third.teacher_prompt is other.teacher_prompt is None
    assert [part.teacher for part in (first, second, third, other)] == [1, 1, -1, -1]
    assert [part.loss_mask.tolist() for part in (first, second, third)] == [[True] * 2, [True] * 2, [True]]


def test_a_teacher_that_reads_what_the_policy_reads_is_sent_no_prompt() -> None:
    """It would travel twice, and be read in packs of its own."""
    sample, _ = samples_of([lesson_of(group(builders.completion(2), (Lesson(prompt=None),)))])
    assert (sample.teacher, sample.teacher_prompt, sample.taught) == (1, None, None)


def test_a_completion_that_never_began_is_not_taught() -> None:
    """Its one stand-in token was never sampled."""
    sample, _ = samples_of([group(builders.completion(0), (Lesson(prompt=None),), reward=NAN)])
    assert sample.teacher == -1 and not sample.loss_mask.any()
