"""Engines that die, hang, come and go while groups are sampled: no group is lost, and none comes twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mgrpo.moving import from_values
from mgrpo.rollout import start
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import Engine, EngineError, WrongAnswerError
from mgrpo.rollout.engines import members
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.heartbeat import Heartbeat
from mgrpo.rollout.engines.members import State
from mgrpo.rollout.engines.roster import Roster
from tests.builders import prompt
from tests.scripted_engine import ScriptedEngine, Told


class Run:
    """A dispatcher over engines that are started again, and the groups that came."""

    def __init__(
        self, count: int, *, start: Callable[[int], Engine] | None = None, limit: int | None = None, **settings
    ):
        self.config = from_values({"num_samples_per_prompt_rollout": 2, "vllm_num_engines": count, **settings})
        self.started: list[int] = []
        roster = Roster(
            [ScriptedEngine(answers=False) for _ in range(count)],
            self.config.engine,
            start=start or self.start,
            max_restarts=self.config.engine.engine_max_restarts,
        )
        self.fleet = Fleet(roster, seed=1)
        self.dispatcher = Dispatcher(
            self.fleet,
            self.config.rollout,
            run_seed=1,
            decode=lambda tokens: ["" for _ in tokens],
            stop_token_ids=(),
            samples_per_engine=limit,
        )
        self.came: Counter[int] = Counter()
        self.failures: list[Exception] = []
        self.told = Told()
        self.dispatcher.listen(self.told)
        self.dispatcher.thread.submit(self.dispatcher.resume).result()

    @property
    def replayed(self) -> list[int]:
        return self.told.replays

    @property
    def failure(self) -> Exception | None:
        return self.told.failure

    def start(self, number: int) -> Engine:
        self.started.append(number)
        return ScriptedEngine(answers=False, hangs="start")

    def load(self) -> None:
        """Engines that were started again load their models."""
        self.settle()
        for engine in list(self.fleet.engines):
            if not engine.ready.done():
                engine.ready.set_result(None)
        self.settle()

    def send(self, *rows: int) -> None:
        requests = [
            self.dispatcher.for_training(
                row, prompt([row], id=(0, row)), lambda _, row=row: self.came.update([row]), failed=self.failures.append
            )
            for row in rows
        ]
        self.dispatcher.thread.submit(lambda: self.dispatcher.send(requests)).result()

    def settle(self) -> None:
        """Wait until restarts and their consequences are through."""
        for _ in range(3):
            self.fleet.roster._starts.submit(lambda: None).result(10)
            self.dispatcher.thread.submit(lambda: None).result(10)

    def engine(self, number: int) -> ScriptedEngine:
        return self.fleet.engines[number]

    def rows(self) -> list[list[int]]:
        """The prompts that each engine has and has not answered."""
        return [[int(tokens[0]) for tokens, _ in engine.queued.values()] for engine in self.fleet.engines]

    def answer_all(self) -> None:
        for engine in list(self.fleet.engines):
            if engine.fails != "all":
                engine.answer(*list(engine.queued))
        self.settle()


def test_the_groups_of_an_engine_that_dies_begin_again_on_the_others_before_what_waits() -> None:
    """They were to be sampled first; a step in order waits for them."""
    run = Run(2, limit=8, engine_max_restarts=0)
    run.send(*range(10))
    assert run.rows() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    run.engine(0).answer(*list(run.engine(0).queued))
    run.settle()
    assert run.rows() == [[8, 9], [1, 3, 5, 7]]
    run.engine(1).die()
    run.settle()
    assert run.rows()[0] == [8, 9, 1, 3] and run.replayed == [1, 3, 5, 7]
    run.answer_all()
    assert run.rows()[0] == [5, 7]
    run.answer_all()
    assert run.came == Counter(range(10)) and run.failure is None


def test_with_one_engine_the_run_waits_until_it_is_started_again() -> None:
    """There is nobody else."""
    run = Run(1)
    run.send(0, 1)
    run.engine(0).die()
    run.settle()
    assert run.started == [0] and run.rows() == [[]]
    run.load()
    assert run.rows() == [[0, 1]] and not run.engine(0).is_paused
    run.answer_all()
    assert run.came == Counter([0, 1]) and run.failure is None


def test_what_a_dead_engine_still_says_counts_for_nothing() -> None:
    """Its groups are being sampled elsewhere, and would be trained on twice."""
    run = Run(2)
    run.send(0, 1)
    dead = run.engine(1)
    run.fleet.roster.lost(1, dead, "silent")
    run.settle()
    assert run.rows()[0] == [0, 1] and run.engine(1) is not dead
    dead.answer(*list(dead.queued))
    run.load()
    run.fleet.roster.lost(1, dead, "late")
    run.settle()
    assert not run.came and run.fleet.members[1].state is State.SERVING and run.started == [1]
    run.answer_all()
    assert run.came == Counter([0, 1])


def test_what_an_engine_says_that_was_given_up_counts_for_nothing() -> None:
    """Nobody has taken its place yet, or ever will."""
    run = Run(2, engine_max_restarts=0)
    run.send(0, 1)
    run.fleet.roster.lost(1, run.engine(1), "silent")
    run.settle()
    run.engine(1).answer(*list(run.engine(1).queued))
    run.settle()
    assert not run.came and run.rows()[0] == [0, 1]
    run.answer_all()
    assert run.came == Counter([0, 1]) and run.failure is None


@pytest.mark.parametrize("seed", range(30))
def test_no_group_is_lost_or_comes_twice_whoever_dies_when(seed: int) -> None:
    """A lost group holds a step for ever; one that comes twice is trained on twice."""
    random_ = random.Random(seed)
    run = Run(3, limit=random_.choice((None, 4)), engine_max_restarts=100)
    rows = 0
    for _ in range(60):
        match random_.randrange(4):
            case 0 if rows < 60:
                run.send(*range(rows, rows + 4))
                rows += 4
            case 1:
                engine = run.engine(random_.randrange(3))
                if engine.fails != "all" and engine.queued:
                    engine.answer(*random_.sample(list(engine.queued), random_.randint(1, len(engine.queued))))
            case 2:
                run.engine(random_.randrange(3)).die()
            case 3:
                run.load()
    for _ in range(100):
        run.load()
        run.answer_all()
    assert run.came == Counter(range(rows)) and run.failure is None


def test_a_silent_engine_gets_no_more_groups_and_later_loses_those_it_has(capsys) -> None:
    """One that is stopped (SIGSTOP) fails no call: only its silence tells."""
    run = Run(2, engine_heartbeat_timeout=10, limit=4)
    heartbeat = Heartbeat(run.fleet.roster, patience_s=10)
    run.send(0, 1)
    run.engine(1).hangs = "ping"
    for _ in range(6):
        heartbeat.beat(1)
    run.engine(0).answer(*list(run.engine(0).queued))
    run.settle()
    run.send(2, 3, 4)
    assert run.rows() == [[2, 3], [1]]
    for _ in range(5):
        heartbeat.beat(1)
    run.load()
    assert run.rows() == [[2, 3], [1, 4]] and run.replayed == [1] and run.started == [1]
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [
        "mgrpo: engine 1 has not answered for 5 s and is given no more groups",
        "mgrpo: engine 1 is dead and is started again: no answer within engine_heartbeat_timeout=10 s",
        "mgrpo: groups of engine 1 that begin again on others: 1",
    ]
    run.answer_all()
    assert run.came == Counter(range(5))


def test_a_suspect_that_answers_goes_on(capsys) -> None:
    """A machine may be busy for a while."""
    run = Run(1, engine_heartbeat_timeout=10)
    heartbeat = Heartbeat(run.fleet.roster, patience_s=10)
    asked = []
    run.engine(0).ping = lambda: asked.append(run.engine(0)._future("never")) or asked[-1]
    run.engine(0).hangs = "never"
    for _ in range(6):
        heartbeat.beat(1)
    run.send(0)
    assert run.rows() == [[]] and len(asked) == 1
    asked[0].set_result(None)
    run.settle()
    assert run.rows() == [[0]] and "engine 0 answers again" in capsys.readouterr().err


def test_an_engine_that_was_removed_finishes_first_and_goes_at_the_next_sync(capsys) -> None:
    """What it has begun is worth its time; what it has not done by then goes to the others."""
    run = Run(2)
    run.send(0, 1, 2, 3)
    run.fleet.roster.remove(1)
    run.send(4, 5)
    assert run.rows() == [[0, 2, 4, 5], [1, 3]]
    run.engine(1).answer(next(iter(run.engine(1).queued)))
    run.settle()
    assert run.came == Counter([1])
    assert run.fleet.begin_sync() == {0: 0}
    run.settle()
    assert run.rows()[0] == [0, 2, 4, 5, 3] and ("close",) in run.engine(1).calls and not run.started
    assert capsys.readouterr().err.splitlines() == [
        "mgrpo: engine 1 is given no more groups, and goes at the next weight sync",
        "mgrpo: engine 1 is gone",
        "mgrpo: groups of engine 1 that begin again on others: 1",
    ]
    with pytest.raises(EngineError, match=r"^engine 0 cannot go: the run has 1 engines, and min_engines=1$"):
        run.fleet.roster.remove(0)
    with pytest.raises(EngineError, match=r"^there is no engine 1; choose one of 0$"):
        run.fleet.roster.remove(1)


def test_an_engine_that_was_added_is_given_groups() -> None:
    """More machines have become free."""
    run = Run(1, limit=2)
    run.send(0, 1)
    assert run.rows() == [[0]]
    assert run.fleet.roster.add() == 1
    run.load()
    assert run.rows() == [[0], [1]] and not run.engine(1).is_paused


def test_an_engine_for_which_there_is_no_room_is_refused() -> None:
    """The run goes on as it is."""

    def start(number: int) -> Engine:
        raise RuntimeError("Ray has only 0 CPUs left")

    run = Run(1, start=start)
    with pytest.raises(EngineError, match=r"^no engine can be added: Ray has only 0 CPUs left$"):
        run.fleet.roster.add()
    assert len(run.fleet.engines) == 1 and run.failure is None


def test_an_engine_with_a_wrong_answer_is_given_up() -> None:
    """A server may be started again any number of times, and would answer wrongly each time: the run would go round until its limit."""
    run = Run(2)
    run.send(*range(4))
    run.engine(0).die(WrongAnswerError("token 96, the vocabulary has 0 to 63"))
    run.settle()
    assert run.started == [] and run.fleet.members[0].state is State.RETIRED
    run.answer_all()
    assert sorted(run.came.elements()) == [0, 1, 2, 3] and run.failure is None
    run.send(4)
    run.engine(1).die(WrongAnswerError("0 completions"))
    run.settle()
    assert "could not generate: token 96, the vocabulary has 0 to 63" in str(run.failure)


def test_the_run_ends_when_too_few_engines_are_left_and_says_what_became_of_each() -> None:
    """It would wait for ever."""
    run = Run(3, min_engines=2, engine_max_restarts=0)
    run.send(0)
    run.engine(2).die()
    run.fleet.resume()
    run.settle()
    assert run.failure is None
    run.engine(0).die()
    run.settle()
    assert str(run.failure) == (
        "1 of 3 engines are left, min_engines=2; engine 0: could not generate: it has died; "
        "engine 2: could not resume: resume has failed"
    )


def test_an_engine_that_cannot_be_started_again_ends_the_run_after_its_tries(monkeypatch) -> None:
    """The message is that of the last one. Between two tries is time in which a GPU's memory may come back."""
    monkeypatch.setattr(members, "AGAIN_S", 0.2)
    tries = []

    def start(number: int) -> Engine:
        tries.append(time.monotonic())
        return ScriptedEngine(fails="start")

    run = Run(1, start=start, engine_max_restarts=2)
    run.send(0)
    run.engine(0).die()
    deadline = time.monotonic() + 10
    while run.failure is None and time.monotonic() < deadline:
        run.settle()
    assert str(run.failure) == "could not start an engine: start has failed"
    assert len(tries) == 2 and tries[1] - tries[0] > 0.19


def test_an_engine_that_is_removed_while_it_waits_for_its_next_start_stays_away(monkeypatch) -> None:
    """It would be started for nobody, and keep its GPU."""
    monkeypatch.setattr(members, "AGAIN_S", 0.2)
    tries = []

    def start(number: int) -> Engine:
        tries.append(number)
        return ScriptedEngine(fails="start")

    run = Run(2, start=start)
    run.engine(0).die()
    run.fleet.resume()
    run.settle()
    run.fleet.roster.remove(0)
    time.sleep(0.4)
    run.settle()
    assert tries == [0] and run.fleet.members[0].state is State.RETIRED and run.failure is None


def test_what_keeps_every_engine_from_its_first_weights_ends_the_run_at_once() -> None:
    """A mistake in the settings is told in seconds, and not after as many starts as are allowed."""
    run = Run(2)
    run.fleet.require_weights()
    for number in (0, 1):
        run.fleet.roster.lost(number, run.engine(number), "another shape")
    run.settle()
    assert not run.started and str(run.failure).endswith("engine 0: another shape; engine 1: another shape")


def test_an_engine_that_misses_the_first_sync_is_started_again_after_it() -> None:
    """The others have shown that the settings are right."""
    run = Run(2)
    run.fleet.require_weights()
    seats = run.fleet.begin_sync()
    calls = run.fleet.receive_weights(seats, 1, check=False, step=1)
    run.fleet.roster.lost(1, run.engine(1), "killed")
    run.settle()
    assert not run.started
    run.fleet.end_sync(1, calls, run.fleet.finish(calls, "receive weights"))
    run.load()
    assert run.started == [1] and run.fleet.members.open == [0] and run.fleet.members.stale == [1]


def test_while_so_few_engines_serve_a_loaded_one_gets_its_weights_at_once() -> None:
    """No step without groups, and no ordinary sync without a step."""
    run = Run(2)
    run.fleet.require_weights()
    run.fleet.end_sync(1, calls := run.fleet.receive_weights(run.fleet.begin_sync(), 1, check=False, step=1), [*calls])
    run.engine(1).die()
    run.fleet.resume()
    run.load()
    assert run.fleet.members.stale == [1] and not run.fleet.needs_sync
    run.engine(0).die()
    run.fleet.resume()
    run.load()
    assert run.fleet.needs_sync
    seats = run.fleet.begin_sync(only_stale=True)
    calls = run.fleet.receive_weights(seats, 1, check=False, step=1)
    run.send(7)
    run.fleet.end_sync(1, calls, run.fleet.finish(calls, "receive weights"))
    run.settle()
    assert not run.fleet.needs_sync and 7 in run.rows()[0] and not run.engine(0).is_paused


def test_an_engine_that_fails_while_the_engines_pause_is_not_waited_for() -> None:
    """The learners would wait for its pause to the end of their patience."""
    run = Run(2)
    run.send(0, 1)
    paused = run.dispatcher.thread.submit(run.dispatcher.pause).result()
    run.engine(1).answer(*list(run.engine(1).queued))
    run.settle()
    assert not paused.done()
    run.engine(0).die()
    run.settle()
    assert paused.done() and run.came == Counter([1])
    run.dispatcher.thread.submit(run.dispatcher.resume).result()
    run.answer_all()
    assert run.came == Counter([0, 1])


def test_after_the_end_no_engine_is_missed() -> None:
    """Closing kills them, and a run that starts them again never ends."""
    run = Run(2)
    run.fleet.roster.close()
    run.engine(0).die()
    run.fleet.resume()
    run.settle()
    assert not run.started and run.fleet.roster.num_deaths == 0


def test_a_wiring_that_was_forgotten_is_found_at_the_first_group() -> None:
    """The groups of an engine that fails would be waited for, without a limit."""
    fleet = Fleet(Roster([ScriptedEngine()], from_values({}).engine), seed=1)
    with pytest.raises(
        AssertionError, match="`listen` first: whoever gives engines groups must learn that one is lost"
    ):
        fleet.roster.open  # noqa: B018
    rollout = from_values({}).rollout
    own = Dispatcher(fleet, rollout, run_seed=1, decode=lambda tokens: [], stop_token_ids=())
    assert list(fleet.roster.open) == [0]
    with pytest.raises(
        AssertionError, match="`listen` first: whoever trains must learn that a group begins again or never comes"
    ):
        own.for_training(0, prompt(), print, failed=print)


@pytest.mark.parametrize("when", ["before the fleet is there", "later"])
def test_the_failure_of_ray_itself_ends_the_run_and_is_told_with_the_logs(monkeypatch, when) -> None:
    """The main thread may be in a collective that waits for the engines, and would hear of it after hours."""
    cluster = SimpleNamespace(failure=Future(), on_gpu=False, address=None)
    cluster.start_engines = lambda kind: SimpleNamespace(engines=[ScriptedEngine()], start=print)
    cluster.keep_logs, cluster.close = lambda: "; logs", lambda: None
    monkeypatch.setattr(start, "Cluster", lambda config, num_local_learners: cluster)
    told: list[str] = []
    if when != "later":
        cluster.failure.set_result("Ray's raylet has ended")
    with start.started_fleet(from_values({}), num_local_learners=1, on_failure=told.append) as fleet:
        if when == "later":
            assert not told
            cluster.failure.set_result("Ray's raylet has ended")
        with pytest.raises(EngineError, match=r"^Ray's raylet has ended; logs$"):
            fleet.roster.raise_failure()
    assert told == ["Ray's raylet has ended; logs"]
