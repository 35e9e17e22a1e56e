"""Teachers on engines that answer when they are told to: who is asked, and what becomes of answers and of engines that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.engine import Engine, WrongAnswerError
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.teachers import Teachers, Teaching
from mgrpo.types import TeacherScores
from tests.scripted_engine import ScriptedEngine

K, VOCAB, MOST = 2, 50, 12


class Class:
    """Teachers `math` and `code` of two engines each, and what they have answered."""

    def __init__(self, *, answers: bool = False, start: Callable[[int], Engine] | None = None, k: int = K) -> None:
        settings = replace(from_values({}).engine, engine_max_restarts=1)
        self.engines = [[ScriptedEngine(answers=answers) for _ in range(2)] for _ in range(2)]
        rosters = [
            Roster(engines, settings, owner=f"the teacher {name}", start=start, max_restarts=1)
            for name, engines in zip(("math", "code"), self.engines, strict=True)
        ]
        fleets = [Teaching(fleet=Fleet(roster, seed=1), most_tokens=MOST) for roster in rosters]
        self.teachers = Teachers(fleets, num_likeliest=k, vocab=VOCAB)
        self.teachers.wait_ready()
        self.rosters = rosters
        self.came: list[list[TeacherScores]] = []
        self.failures: list[Exception] = []
        self.settle()

    def ask(self, teacher: int, *sequences: tuple[Sequence[int], int]) -> None:
        arrays = [(np.array(tokens, np.int32), start) for tokens, start in sequences]
        self.teachers.ask(teacher, arrays, self.came.append)
        self.settle()

    def answer(self, teacher: int, engine: int) -> None:
        own = self.engines[teacher][engine]
        own.answer(*reversed(own.queued))
        self.settle()

    def settle(self) -> None:
        for _ in range(3):
            for roster in getattr(self, "rosters", []):
                roster._starts.submit(lambda: None).result(10)
            self.teachers.thread.submit(lambda: None).result(10)

    def queued(self, teacher: int) -> list[list[list[int]]]:
        return [[tokens.tolist() for tokens, _ in engine.queued.values()] for engine in self.engines[teacher]]


def test_every_sequence_gets_the_scores_of_its_own_tokens_from_where_it_is_judged() -> None:
    """The engines answer in any order, and in parts; the answer to one question comes when all its sequences are there."""
    own = Class()
    own.ask(0, ([1, 2, 3, 4], 2), ([5, 6], 1), ([7, 8, 9], 1))
    own.ask(1, ([20, 21], 1))
    assert own.queued(0) == [[[1, 2, 3, 4]], [[5, 6], [7, 8, 9]]] and own.queued(1) == [[[20, 21]], []]
    own.answer(0, 1)
    assert not own.came
    own.answer(1, 0)
    own.answer(0, 0)
    (other,), scores = own.came
    assert other.logprobs.tolist() == [-21]
    assert [each.logprobs.tolist() for each in scores] == [[-3, -4], [-6], [-8, -9]]
    assert [each.ids.tolist() for each in scores] == [[[3, 4], [4, 5]], [[6, 7]], [[8, 9], [9, 10]]]
    assert [each.likeliest.dtype for each in scores] == [np.float32] * 3
    sampling = own.engines[0][0].batches[0].sampling
    assert (sampling.num_samples, sampling.max_tokens, sampling.temperature, sampling.prompt_logprobs) == (1, 1, 0, K)


def test_what_a_teacher_does_not_say_is_missing_and_not_asked_for_again() -> None:
    """Too long a sequence, one without a token to judge, a value that is no log-probability, a token that the policy does not have."""
    own = Class(answers=True)
    own.ask(0, (range(1, MOST + 2), MOST - 1), ([1, 2], 2), (range(1, MOST + 1), MOST - 1), ([3, VOCAB - 1], 1))
    long, empty, longest, last = own.came[0]
    assert np.isnan(long.logprobs).tolist() == [True, True] and long.ids.tolist() == [[-1, -1], [-1, -1]]
    assert empty.logprobs.shape == (0,) and empty.ids.shape == (0, K)
    assert longest.logprobs.tolist() == [-MOST]
    assert last.ids.tolist() == [[VOCAB - 1, -1]] and np.isnan(last.likeliest).tolist() == [[False, True]]
    assert len(own.engines[0][0].batches[0].numbers) + len(own.engines[0][1].batches[0].numbers) == 2
    own.ask(0)
    assert own.came[1] == []


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_value_that_is_no_log_probability_is_missing(monkeypatch, value) -> None:
    """It would make the gradient of the whole step infinite, or not a number."""
    judge = ScriptedEngine._judgement

    def broken(self, number, tokens):
        found = judge(self, number, tokens)
        found["prompt_logprobs"][0] = found["prompt_likeliest"][0, 1] = value
        return found

    monkeypatch.setattr(ScriptedEngine, "_judgement", broken)
    own = Class(answers=True)
    own.ask(1, ([3, 4, 5], 1))
    (found,) = own.came[0]
    np.testing.assert_array_equal(found.logprobs, np.array([np.nan, -5], np.float32))
    assert found.ids.tolist() == [[4, -1], [5, 6]]
    np.testing.assert_array_equal(found.likeliest, np.array([[-4, np.nan], [-5, -6]], np.float32))


def test_without_likeliest_tokens_there_are_the_tokens_own_alone() -> None:
    own = Class(answers=True, k=0)
    own.ask(0, ([1, 2], 1))
    assert own.came[0][0].logprobs.tolist() == [-2] and own.came[0][0].ids is None and own.came[0][0].likeliest is None


def test_the_sequences_of_an_engine_that_dies_are_asked_again_and_each_answer_comes_once() -> None:
    """The other engine has them now; when that dies as well, both come back, and the questions wait for them."""
    started: list[ScriptedEngine] = []

    def start(number: int) -> Engine:
        started.append(ScriptedEngine(answers=False, hangs="start"))
        return started[-1]

    own = Class(start=start)
    own.ask(0, ([1, 2], 1), ([3, 4], 1))
    own.ask(1, ([5, 6], 1))
    own.engines[0][0].die()
    own.settle()
    assert own.queued(0)[1] == [[3, 4], [1, 2]]
    own.engines[0][1].die()
    own.settle()
    assert len(started) == 2 and not own.failures
    own.engines[0] = list(own.rosters[0].engines)
    for engine in started:
        engine.ready.set_result(None)
        own.settle()
    for engine in (0, 1):
        own.answer(0, engine)
    own.answer(1, 0)
    assert [[each.logprobs.tolist() for each in scores] for scores in own.came] == [[[-2], [-4]], [[-6]]]


@pytest.mark.parametrize("listens", ["before", "after"])
def test_when_no_engine_of_a_teacher_is_left_the_run_is_told_whose(listens) -> None:
    """Also when that happens before somebody listens: the groups would be waited for without an end."""
    own = Class()
    if listens == "before":
        own.teachers.listen(own.failures.append)
    own.ask(1, ([5, 6], 1))
    for engine in own.engines[1]:
        engine.die(WrongAnswerError("its answer has 3 tokens"))
        own.settle()
    if listens == "after":
        own.teachers.listen(own.failures.append)
    own.settle()
    assert [str(err) for err in own.failures] == [
        "the teacher code: 0 of 2 engines are left, min_engines=1; engine 0: could not score: its answer has 3 tokens; engine 1: could not "
        "score: its answer has 3 tokens"
    ]
    assert not own.came


def test_restarts_of_a_teachers_engines_are_counted_within_the_weight_syncs_of_the_policy() -> None:
    """In a run of weeks a few deaths are no reason to give one up."""
    own = Class(start=lambda number: ScriptedEngine(answers=False))
    policy = Roster([ScriptedEngine()], from_values({}).engine)
    policy.beside = own.rosters
    for syncs in (0, 20, 40):
        policy.members.num_syncs = syncs
        policy.synced()
        own.rosters[0].lost(0, own.rosters[0].engines[0], "it has died")
        own.settle()
    assert own.rosters[0].describe()[0]["starts"] == 4


def test_a_sequence_that_a_teacher_refuses_is_not_judged_and_asked_of_no_other_engine(capsys) -> None:
    """It would end one engine of the teacher after the other, and the run; the others of its question are judged."""
    own = Class(answers=True)
    for engine in own.engines[0]:
        engine.refuses = {5: "token 5 is out of vocabulary"}
    own.ask(0, ([1, 2], 1), ([5, 6, 7], 1), ([3, 4], 1))
    first, refused, last = own.came[0]
    assert [first.logprobs.tolist(), last.logprobs.tolist()] == [[-2], [-4]]
    assert np.isnan(refused.logprobs).tolist() == [True, True] and refused.ids.tolist() == [[-1, -1], [-1, -1]]
    assert not own.failures and [len(roster.open) for roster in own.rosters] == [2, 2]
    assert sum(len(batch.numbers) for engine in own.engines[0] for batch in engine.batches) == 3
    assert "a sequence of 3 tokens: token 5 is out of vocabulary" in capsys.readouterr().err
