"""What teachers read in place of the policy's prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from mgrpo.run.inputs.row_teachers import TeacherTemplate
from mgrpo.run.produce.lessons import Lessons, feedback, lesson_metrics, right_answers
from mgrpo.types import Completion, Prompt, RewardScale, Score, ScoredGroup
from tests import builders

NAN = float("nan")
SCALE = RewardScale(max_possible_score=10.0, verification_reward=10.0, format_reward=0.0, weights={"half": 0.5})


def reworded(prompt: Prompt, change) -> np.ndarray:
    """A tokenizer of characters, whose prompts are a chat's: 1, the question, 2."""
    return np.array([1, *map(ord, change(prompt.text)), 2], np.int32)


def lessons_of(template: str | None, *, scale: RewardScale | None = SCALE, longest: int = 1000) -> Lessons:
    read = None if template is None else TeacherTemplate.read(template)
    return Lessons(read, reworded=reworded, scale=scale, longest=[longest])


def group(rewards: Sequence[float], completions: Sequence[Completion] | None = None, **fields: object) -> ScoredGroup:
    own = builders.prompt([1, ord("q"), 2], text="q", verifiers=["integer"], **{"teacher": 0, **fields})
    completions = completions or [builders.completion(2, text=f"a{n}") for n in range(len(rewards))]
    return builders.scored_group(rewards, completions=completions, of=own)


def read(scored: ScoredGroup) -> list[list[str]]:
    """The texts of all lessons, or why there is none."""
    return [
        [f"({own.untaught})" if own.prompt is None else "".join(map(chr, own.prompt[1:-1].tolist())) for own in lessons]
        for lessons in scored.lessons
    ]


def test_without_a_template_the_teacher_reads_the_policys_own_arrays() -> None:
    """Copies of them would travel as prompts of the teacher's."""
    branches = (builders.branch(0, 1), builders.branch(2, 3, [7, 8]))
    turns = builders.completion(3, trajectory=builders.trajectory("101", branches=branches))
    scored = lessons_of(None).added(group([1.0, 0.0, NAN], [builders.completion(2), turns, builders.completion(0)]))
    first, second, third = scored.lessons
    assert first[0].prompt is scored.group.prompt.tokens
    assert [own.prompt for own in second] == [branch.prompt_tokens for branch in branches]
    assert third[0].prompt is None and third[0].untaught == ""
    assert lesson_metrics([scored]) == {"distillation/asked": 3, "distillation/untaught": 0}


def test_a_prompt_without_a_teacher_has_no_lessons() -> None:
    """And a run without teachers no metrics of them."""
    scored = lessons_of("{prompt}").added(group([1.0, 0.0], teacher=-1))
    assert scored.lessons == () and not scored.is_taught and lesson_metrics([scored]) == {}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # The best right one of the others; of equals the first.
        ([10.0, 0.0, 10.0, 4.0], ["a2", "a0", "a0", "a0"]),
        # With one, that one is not taught: its own answer would only be copied.
        ([0.0, 10.0, NAN, 4.0], ["a1", None, "a1", "a1"]),
        ([0.0, 9.9, 0.0, 4.0], [None] * 4),
        ([NAN] * 4, [None] * 4),
        ([10.0] * 4, ["a1", "a0", "a0", "a0"]),
    ],
)
def test_an_answer_is_the_best_right_one_of_the_other_completions(rewards, expected) -> None:
    """A wrong answer would be taught as a right one."""
    scored = lessons_of("{prompt}+{answer}").added(group(rewards))
    assert read(scored) == [["(no_answer)" if answer is None else f"q+{answer}"] for answer in expected]
    missing = expected.count(None)
    found = {"distillation/asked": 4 - missing, "distillation/untaught": missing}
    assert lesson_metrics([scored]) == found | ({"distillation/untaught/no_answer": missing} if missing else {})


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        # Functions and environments have no scale: the best, if others are worse.
        ([0.5, 0.2, 0.5, NAN], None, [True, False, True, False]),
        ([0.5, 0.5, 0.5, NAN], None, [False] * 4),
        ([-1.0, -2.0, NAN, NAN], None, [True, False, False, False]),
        ([NAN] * 4, None, [False] * 4),
        (
            [0.5, 0.2, 0.1, 0.0],
            dataclasses.replace(SCALE, max_possible_score=0.0, verification_reward=0.0),
            [True] + [False] * 3,
        ),
        ([10.0, 9.0, 0.0, NAN], SCALE, [True, False, False, False]),
        ([5.0, 4.0, 0.0, NAN], dataclasses.replace(SCALE, weights={"integer": 0.5}), [True, False, False, False]),
    ],
)
def test_a_right_answer_has_the_highest_reward_that_its_row_allows(rewards, scale, expected) -> None:
    """Where there is no such number, none is right while all are the same."""
    assert right_answers(group(rewards), scale).tolist() == expected


def test_the_penalty_for_length_makes_no_answer_wrong_and_a_shorter_one_better() -> None:
    """It rises smoothly: almost no answer would be right."""
    scored = group([8.5, 9.0, 0.0])
    parts = [{"overlong": -1.5}, {"overlong": -1.0}, {}]
    scores = [Score(reward=own.reward, parts=part) for own, part in zip(scored.scores, parts, strict=True)]
    scored = dataclasses.replace(scored, scores=tuple(scores))
    assert read(lessons_of("{answer}{prompt}").added(scored)) == [["a1q"], ["a0q"], ["a1q"]]


def test_an_answer_of_several_turns_is_what_the_model_wrote() -> None:
    """And an answer without text is none."""
    turns = builders.trajectory("101", sampled_text="call\n42", scored_text="42")
    completions = [
        builders.completion(2, text=" "),
        builders.completion(3, trajectory=turns),
        builders.completion(2, text="x"),
    ]
    scored = lessons_of("{prompt}{answer}").added(group([10.0, 10.0, 0.0], completions))
    assert read(scored) == [["qcall\n42"], ["(no_answer)"], ["qcall\n42"]]


TOOL = (
    {"role": "assistant", "content": "x"},
    {"role": "tool", "content": " 17 "},
    {"role": "assistant", "content": "y"},
)


@pytest.mark.parametrize(
    ("extras", "messages", "expected"),
    [
        ({"feedback": "too long"}, TOOL, "too long"),
        ({"feedback": None, "other": "x"}, TOOL, "17"),
        ({"feedback": "a", "second/feedback": "b"}, (), "a\nb"),
        ({"feedback": 3}, (), "3"),
        ({}, ({"role": "user", "content": "no"}, *TOOL[:1]), "no"),
        ({}, TOOL[:1], ""),
        ({"feedback": " "}, (), ""),
    ],
)
def test_feedback_is_what_functions_recorded_or_the_environment_said_last(extras, messages, expected) -> None:
    """It is the only word on a completion that says more than its reward."""
    own = builders.completion(1, trajectory=builders.trajectory("1", messages=messages))
    assert feedback(Score(reward=0.0, extras=extras), own) == expected


def test_columns_and_feedback_stand_where_the_template_says_and_what_is_missing_is_counted() -> None:
    """A template with a hole would tell the teacher nothing, or the word None."""
    scored = group([0.0, 0.0], columns={"solution": {"x": "é"}, "level": None})
    scores = (Score(reward=0.0, extras={"feedback": "{prompt}"}), Score(reward=0.0))
    scored = dataclasses.replace(scored, scores=scores)
    found = lessons_of("{solution}|{prompt}|{feedback}").added(scored)
    assert read(found) == [['{"x": "é"}|q|{prompt}'], ["(no_feedback)"]]
    assert read(lessons_of("{level}{prompt}{feedback}").added(scored)) == [["(no_column)"]] * 2


def test_completions_with_equal_texts_share_one_prompt() -> None:
    """It travels once, and packs may share it."""
    found = lessons_of("{prompt}{answer}").added(group([10.0, 0.0, 0.0, 10.0])).lessons
    assert found[1][0].prompt is found[2][0].prompt is found[3][0].prompt is not found[0][0].prompt


def test_a_branch_is_taught_where_its_context_begins_with_the_prompt() -> None:
    """Elsewhere there is no place for what only the teacher is told."""
    contexts = ([1, ord("q"), 2], [1, ord("q"), 2, ord("x"), 2], [1, ord("y"), 2, 9])
    branches = tuple(builders.branch(2 * n, 2 * n + 2, context) for n, context in enumerate(contexts))
    own = builders.completion(6, trajectory=builders.trajectory("111111", branches=branches))
    scored = lessons_of("{prompt}!").added(group([0.0], [own]))
    assert read(scored) == [["q!", "q!\x02x", "(branch)"]]
    assert lesson_metrics([scored]) == {
        "distillation/asked": 2,
        "distillation/untaught": 1,
        "distillation/untaught/branch": 1,
    }
    # The prompt and two tokens are 6; with the answer of the environment 8.
    assert read(lessons_of("{prompt}!", longest=7).added(group([0.0], [own]))) == [["q!", "(too_long)", "(branch)"]]
    assert read(lessons_of("{prompt}!", longest=5).added(group([0.0], [own]))) == [["(too_long)"] * 2 + ["(branch)"]]


def test_equal_groups_have_equal_lessons() -> None:
    """A resumed run makes those of saved groups again."""
    scored = group([10.0, 10.0, 0.0])
    first, again = (lessons_of("{prompt}{answer}").added(scored) for _ in range(2))
    assert read(first) == read(again)
