"""The producer with teachers on engines or servers: groups wait for them, are saved with what they said, and are never lost."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mgrpo.rollout.engine import EngineError
from mgrpo.run.inputs.row_teachers import TeacherTemplate
from mgrpo.run.produce.asked_teachers import Asking
from mgrpo.run.produce.lessons import Lessons
from mgrpo.run.records import Rollouts
from mgrpo.types import Lesson, Prompt, PromptId, TeacherScores
from tests import builders
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.test_teachers import Class
from tests.unit.run.producing import collect, producer
from tests.unit.run.test_producer import indices, settle

EQUAL = (0.0, 0.0)
K = 2


class ScriptedTeachers:
    """Stands for `mgrpo.rollout.teachers.Teachers`: a token's log-probability is minus the token minus a tenth of its place.

    Args:
        answers: whether it answers as soon as it is asked; otherwise by `answer`.
    """

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.asked: list[tuple[int, Sequence[tuple[np.ndarray, int]], Callable[[list[TeacherScores]], None]]] = []
        self.waiting: list[int] = []
        self.failed: Callable[[Exception], None] = lambda err: None

    def listen(self, failed: Callable[[Exception], None]) -> None:
        self.failed = failed

    def ask(self, teacher, sequences, done) -> None:
        self.waiting.append(len(self.asked))
        self.asked.append((teacher, sequences, done))
        if self.answers:
            self.answer()

    def answer(self, count: int | None = None) -> None:
        """The questions that wait, or the first of them, in a thread of its own, the last one first."""
        now, self.waiting = self.waiting[:count], self.waiting[len(self.waiting[:count]) :]
        for number in reversed(now):
            _, sequences, done = self.asked[number]
            thread = threading.Thread(target=done, args=([said(*sequence) for sequence in sequences],))
            thread.start()
            thread.join()


def said(tokens: np.ndarray, start: int) -> TeacherScores:
    logprobs = (-tokens - np.arange(len(tokens)) / 10)[start:].astype(np.float32)
    ids = np.stack([tokens[start:], tokens[start:] + 1], axis=1).astype(np.int32)
    return TeacherScores(logprobs=logprobs, ids=ids, likeliest=np.stack([logprobs] * K, axis=1))


def prompt_of(prompt_id: PromptId, opening: str = "") -> Prompt:
    """Rows 0, 3, 6.. have no teacher, the others one of two."""
    row = prompt_id[1]
    return builders.prompt([row + 1, 2], id=prompt_id, verifiers=["integer"], opening=opening, teacher=row % 3 - 1)


def taught(
    teachers: ScriptedTeachers, engine: ScriptedEngine | None = None, *, rewards=lambda index: EQUAL, **settings
):
    distillation = {"distillation_topk": K, "teacher_model_name_or_path": "math:BIG1,code:BIG2"} | settings
    return producer(
        rewards,
        engine=engine,
        prompt=prompt_of,
        lessons=Lessons(None, reworded=lambda prompt, change: prompt.tokens, scale=None, longest=[100, 100]),
        teachers=teachers,
        teacher_mode="engine",
        distillation_loss="forward_kl",
        **distillation,
    )


def numbers(rollouts: Rollouts) -> list[int]:
    return sorted(indices(rollouts.groups) + indices(rollouts.dropped))


def test_groups_with_a_teacher_are_trained_on_with_its_word_and_without_a_spread() -> None:
    """Equal rewards say nothing, teachers all the same; a group that has neither is left out."""
    rollouts = collect(taught(teachers := ScriptedTeachers()))
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([1, 2], [0, 3])
    assert [teacher for teacher, _, _ in teachers.asked] == [0, 1]
    for scored in rollouts.groups:
        row = scored.group.prompt.id[1]
        for completion in scored.group.completions:
            # The engine answers with the prompt's own tokens, which stand at places 2 and 3.
            assert completion.tokens.tolist() == [row + 1, 2]
            expected = said(np.array([row + 1, 2] * 2), 2)
            assert completion.taught is not None
            for ours, theirs in zip(dataclasses.astuple(completion.taught), dataclasses.astuple(expected), strict=True):
                assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    metrics = rollouts.teacher_metrics
    assert (metrics["distillation/asked"], metrics["distillation/untaught"]) == (4, 0)
    assert {name for name in metrics if name.startswith("time/")} == {
        "time/teach",
        "time/teachers/math/avg_wait",
        "time/teachers/code/avg_wait",
    }


def test_a_step_waits_for_teachers_and_engines_do_not() -> None:
    """Groups of the next steps are sampled meanwhile, and a weight sync does not wait for a teacher."""
    teachers = ScriptedTeachers(answers=False)
    own = taught(teachers, engine := ScriptedEngine(answers=False), use_rho_correction=True, async_steps=1)
    own.begin()
    settle(own)
    engine.answer(*range(8))
    settle(own)
    taking = own.take()
    settle(own)
    assert len(teachers.asked) == 5 and not taking.done()
    own.thread.submit(own._pause).result().result(10)
    teachers.answer(1)
    settle(own)
    assert not taking.done() and not own.groups.is_complete
    teachers.answer(1)
    assert indices(own.dispatcher.wait(taking).groups) == [1, 2]
    own.hand_over(prepare=False)
    teachers.answer()
    settle(own)
    own.begin()
    assert indices(collect(own).groups) == [4, 5, 7]


def test_answers_in_any_order_give_the_same_step() -> None:
    """A run with teachers on engines repeats."""
    first = collect(taught(ScriptedTeachers()))
    teachers = ScriptedTeachers(answers=False)
    own = taught(teachers)
    taking = own.take()
    while not taking.done():
        settle(own)
        teachers.answer()
    again = own.dispatcher.wait(taking)
    assert indices(first.groups) == indices(again.groups)
    for a, b in zip(first.groups, again.groups, strict=True):
        for x, y in zip(a.group.completions, b.group.completions, strict=True):
            assert x.taught.logprobs.tolist() == y.taught.logprobs.tolist()


def test_a_teacher_that_does_not_answer_in_time_is_named() -> None:
    """The engines and the rewards have done their part."""
    own = taught(ScriptedTeachers(answers=False), rollout_timeout=1)
    with pytest.raises(
        EngineError, match=r"no answer from the teacher math \(groups: 1\) and the teacher code \(groups: 1\)"
    ):
        own.dispatcher.wait(own.take())


def test_teachers_that_are_lost_end_the_wait_with_their_reason() -> None:
    """Otherwise the run would wait for `rollout_timeout`."""
    own = taught(teachers := ScriptedTeachers(answers=False))
    taking = own.take()
    settle(own)
    teachers.failed(EngineError("all engines of the teacher math have failed"))
    with pytest.raises(EngineError, match="all engines of the teacher math"):
        own.dispatcher.wait(taking)


def test_groups_of_a_teachers_engine_that_dies_are_asked_again_and_none_is_dropped() -> None:
    """The other engine judges them; the step is the one that it would have been."""
    real = Class()
    own = taught(real.teachers)
    taking = own.take()
    settle(own)
    real.settle()
    first, second = real.engines[0]
    assert len(first.queued) + len(second.queued) == 2 and not taking.done()
    (first if first.queued else second).die()
    real.settle()
    for teacher, engine in ((0, 0), (0, 1), (1, 0), (1, 1)):
        real.answer(teacher, engine)
    rollouts = own.dispatcher.wait(taking)
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([1, 2], [0, 3])
    for scored in rollouts.groups:
        for completion in scored.group.completions:
            assert completion.taught is not None
            assert completion.taught.logprobs.tolist() == (-completion.tokens).tolist()


def resumed(own, teachers: ScriptedTeachers, **settings):
    state = own.state_dict()
    arrays = {name: array for name, array in state.pop("rollouts", {}).items() if array.size}
    again = taught(teachers, ScriptedEngine(answers=False), **settings)
    again.load_state_dict({**json.loads(json.dumps(state)), "rollouts": arrays})
    again.begin()
    settle(again)
    return again


def test_each_branch_is_asked_about_and_only_what_was_sampled_is_kept() -> None:
    """A tool's answer is context for the teacher, not a lesson; and each branch follows its own context."""
    branches = (builders.branch(0, 3, [5, 6]), builders.branch(4, 5, [7]), builders.branch(5, 7, [5, 6, 8]))
    own = builders.completion(range(10, 17), trajectory=builders.trajectory("1010110", branches=branches))
    plain, empty = builders.completion([3, 4]), builders.completion(0)
    scored = builders.scored_group([0.0] * 3, completions=[own, plain, empty], of=builders.prompt([5, 6], teacher=0))
    hint = np.array([1, 2, 3], np.int32)
    lessons = ((Lesson(prompt=hint), Lesson(prompt=None), Lesson(prompt=branches[2].prompt_tokens)),)
    scored = dataclasses.replace(scored, lessons=(*lessons, (Lesson(prompt=hint),), (Lesson(prompt=None),)))
    done: list = []
    asking = Asking(
        teachers := ScriptedTeachers(),
        ["math"],
        post=lambda task: task(),
        done=lambda number, group: done.append((number, group)),
        failed=done.append,
    )
    asking.add(7, scored)
    ((_, sequences, _),) = teachers.asked
    assert [(tokens.tolist(), start) for tokens, start in sequences] == [
        ([1, 2, 3, 10, 11, 12], 3),
        ([5, 6, 8, 15, 16], 3),
        ([1, 2, 3, 3, 4], 3),
    ]
    ((number, group),) = done
    branched, flat, none = group.completions
    assert number == 7 and none.taught is None and asking.waited_for == ""
    values = [-10.3, None, -12.5, None, None, -15.3, None]
    for name, missing in (
        ("logprobs", np.isnan),
        ("ids", lambda ids: (ids < 0).all(1)),
        ("likeliest", lambda x: np.isnan(x).all(1)),
    ):
        found = missing(getattr(branched.taught, name))
        assert found.tolist() == [value is None for value in values], name
    judged = [n for n, value in enumerate(values) if value is not None]
    assert branched.taught.logprobs[judged].tolist() == pytest.approx([-10.3, -12.5, -15.3])
    assert branched.taught.ids[judged].tolist() == [[10, 11], [12, 13], [15, 16]]
    assert flat.taught.logprobs.tolist() == pytest.approx([-3.3, -4.4])


def test_a_resumed_run_asks_again_only_about_what_was_not_answered() -> None:
    """Every answer costs the teacher a forward, and an answer by other weights would be another."""
    settings = {"use_rho_correction": True, "async_steps": 1, "inflight_updates": True}
    teachers = ScriptedTeachers(answers=False)
    own = taught(teachers, engine := ScriptedEngine(answers=False), **settings)
    own.begin()
    settle(own)
    engine.answer(*range(8))
    settle(own)
    teachers.answer(2)
    settle(own)
    fresh = ScriptedTeachers()
    again = resumed(own, fresh, **settings)
    assert [int(sequences[0][0][0]) - 1 for _, sequences, _ in fresh.asked] == [4, 5, 7]
    teachers.answer()
    for ours, theirs in zip(collect(own).groups, collect(again).groups, strict=True):
        assert ours.group.prompt.id == theirs.group.prompt.id
        for x, y in zip(ours.group.completions, theirs.group.completions, strict=True):
            for a, b in zip(dataclasses.astuple(x.taught), dataclasses.astuple(y.taught), strict=True):
                assert a.dtype == b.dtype and a.tolist() == b.tolist()


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"distillation_topk": K}, []),
        ({"distillation_topk": K + 1}, [1, 2, 4, 5, 7]),
        ({"teacher_temperature": 0.5}, [1, 2, 4, 5, 7]),
        ({"teacher_prompt_template": "{prompt} {solution}"}, [1, 2, 4, 5, 7]),
        ({"teacher_model_name_or_path": "math:OTHER,code:BIG2"}, [1, 4, 7]),
    ],
)
def test_a_run_that_asks_for_something_else_asks_again(changed, asked) -> None:
    """What was said before would be of another shape, or of another question."""
    settings = {"use_rho_correction": True, "async_steps": 1, "inflight_updates": True}
    own = taught(ScriptedTeachers(), engine := ScriptedEngine(answers=False), **settings)
    own.begin()
    settle(own)
    engine.answer(*range(8))
    settle(own)
    fresh = ScriptedTeachers(answers=False)
    again = resumed(own, fresh, **settings, **changed)
    taking = again.take()
    settle(again)
    assert taking.done() == (not asked)
    assert [int(sequences[0][0][0]) - 1 for _, sequences, _ in fresh.asked] == asked


def test_the_text_of_an_environment_is_there_again_after_a_resume() -> None:
    """The completions were sampled after it, and would be trained, and judged, without it."""
    settings = {"use_rho_correction": True, "async_steps": 1, "inflight_updates": True}
    own = taught(ScriptedTeachers(), engine := ScriptedEngine(answers=False), **settings)
    own.begin()
    settle(own)
    engine.answer(1)
    settle(own)
    group = own.groups.out[1]
    group.sampled = dataclasses.replace(group.sampled, prompt=prompt_of(group.prompt.id, "Welcome."))
    again = resumed(own, ScriptedTeachers(), **settings)
    assert again.groups.out[1].sampled.prompt.opening == "Welcome."


def test_teachers_on_the_learners_are_not_asked_and_have_their_prompts() -> None:
    """Learners score the packs with them, as they do with the reference."""
    template = TeacherTemplate.read("{prompt}{answer}")
    lessons = Lessons(
        template, reworded=lambda prompt, change: np.array([9, 9, 9], np.int32), scale=None, longest=[100, 100]
    )
    own = producer(
        lambda index: (0.0, 1.0), prompt=prompt_of, lessons=lessons, teacher_model_name_or_path="math:BIG1,code:BIG2"
    )
    own.dispatcher.decode = lambda tokens: ["text" for _ in tokens]
    rollouts = collect(own)
    assert indices(rollouts.groups) == [0, 1, 2, 3]
    _, first, second, _ = rollouts.groups
    for scored in (first, second):
        (wrong,), (right,) = scored.lessons
        assert wrong.prompt.tolist() == [9, 9, 9] and (right.prompt, right.untaught) == (None, "no_answer")
    assert rollouts.teacher_metrics == {
        "distillation/asked": 2,
        "distillation/untaught": 2,
        "distillation/untaught/no_answer": 2,
    }
