"""Groups of several turns through the dispatcher and engines that echo: who samples what, when engines pause, and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes, Task
from mgrpo.environments.loop.gathering import Ask
from mgrpo.environments.loop.instance import Ending
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import EngineError, RefusedError
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.interaction import Asked, Interaction
from mgrpo.rollout.requests import RequestBounds
from mgrpo.types import Prompt, RolloutGroup
from tests.builders import prompt
from tests.scripted_engine import ScriptedEngine, Told


class Said:
    unreadable: Sequence[str] = ()

    def __init__(self, content: str, calls: Sequence[Call]) -> None:
        self.content, self.calls = content, calls


class Turns:
    """A language in which every turn is an action; the answer to it is one id."""

    def read(self, turn: Sampled, *, calls: bool) -> Said:
        return Said(f"{len(turn.tokens)}", [])

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> None:
        return None

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        return [99]

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        raise AssertionError

    def text(self, tokens: Sequence[np.ndarray]) -> list[str]:
        return ["" for _ in tokens]


class Acting:
    """Ends a trajectory with its action of this number; each waits until `gate` is set."""

    opening, acts, active = "", True, frozenset[str]()
    metrics: Mapping[str, float] = {}

    def __init__(self, turns: int, gate: threading.Event) -> None:
        self.left, self.gate = turns, gate

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        while not self.gate.is_set():
            await asyncio.sleep(0.002)
        self.left -= 1
        return [Answered(observation=Observation(text="!", done=not self.left), seconds=0.0)]

    async def ending(self) -> Ending:
        return Ending()

    async def release(self, broken: bool = False) -> None:
        pass


class Place:
    def __init__(self, turns: int) -> None:
        self.turns, self.gate, self.acquired, self.is_closed = turns, threading.Event(), 0, False
        self.gate.set()
        self.lost = False
        self.names: list[str] = []
        self.rows: list[Mapping[str, object]] = []

    async def acquire(self, row: Mapping[str, object], *, seed: int, trajectory: str) -> Acting:
        self.acquired += 1
        self.names.append(trajectory)
        self.rows.append(row)
        if self.lost:
            raise EnvironmentLost
        return Acting(self.turns, self.gate)

    async def start(self) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {"env/lost": 0.0}

    async def close(self) -> None:
        self.is_closed = True


@contextmanager
def playing(
    *,
    turns: int = 2,
    num_engines: int = 1,
    in_rounds: bool = True,
    seeds_prompts: bool = False,
    answers: bool = True,
    asked: Asked | None = None,
    episodes: type[Episodes] = Episodes,
) -> Iterator[tuple[Dispatcher, Place]]:
    """Engines that sample, two samples for each prompt, and environments that end after so many turns."""
    config = from_values({"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 2, "response_length": 64})
    engines = [ScriptedEngine(answers=answers) for _ in range(num_engines)]
    fleet = Fleet(Roster(engines, config.engine), seed=1, seeds_prompts=seeds_prompts)
    place = Place(turns)
    interaction = Interaction(
        place,
        Turns(),
        EpisodeBounds(max_model_length=200, max_calls=9),
        episodes=episodes,
        opened=lambda asked, text, is_training: asked,
        asked=asked,
        in_rounds=in_rounds,
        run_seed=1,
    )
    own = Dispatcher(
        fleet,
        config.rollout,
        run_seed=1,
        decode=lambda tokens: ["" for _ in tokens],
        stop_token_ids=(),
        interaction=interaction,
    )
    own.thread.submit(own.resume).result()
    try:
        yield own, place
    finally:
        interaction.close()
        assert place.is_closed and not interaction.thread.is_alive()


def begin(own: Dispatcher, *prompts: Prompt) -> list[Future[RolloutGroup]]:
    groups: list[Future[RolloutGroup]] = [Future() for _ in prompts]

    def fail(err: Exception, failing: Sequence[Future[RolloutGroup]] = groups) -> None:
        for group in failing:
            if not group.done():
                group.set_exception(err)

    own.listen(Told(fail))
    requests = [
        own.for_training(n, p, group.set_result, failed=partial(fail, failing=[group]))
        for n, (p, group) in enumerate(zip(prompts, groups, strict=True))
    ]
    own.thread.submit(lambda: own.send(requests)).result()
    return groups


def in_thread(own: Dispatcher, do: Callable[[], object]) -> object:
    return own.thread.submit(do).result(10)


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


PROMPTS = [prompt([10 + row] * (row + 1), id=(0, row)) for row in range(3)]


def test_later_turns_go_on_from_all_that_was_sampled() -> None:
    """The engine echoes its prompt: the second turn repeats prompt, first turn and answer."""
    with playing() as (own, place):
        (group,) = begin(own, PROMPTS[0])
        found = group.result(10)
        first, second = own.fleet.engines[0].batches
        assert place.acquired == 2
    assert first.sampling.num_samples == 2 and second.sampling.num_samples == 1
    assert first.max_tokens.tolist() == [64] and second.max_tokens.tolist() == [62, 62]
    assert second.tokens.tolist() == [10, 10, 99] * 2
    assert second.salts.tolist() == [first.salts[0]] * 2, "later turns read what is cached of the first"
    assert [c.tokens.tolist() for c in found.completions] == [[10, 99, 10, 10, 99]] * 2
    assert [c.loss_mask.tolist() for c in found.completions] == [[True, False, True, True, True]] * 2


def test_rows_hold_what_the_prompt_asks_where_that_is_wanted() -> None:
    """Programs talk in messages; reward functions may know the text alone."""
    for asked, expected in ((None, "text"), (lambda one, is_training: [is_training, one.id], [True, (0, 7)])):
        with playing(asked=asked) as (own, place):
            begin(own, prompt([1], id=(0, 7), text="text", columns={"level": 3}))[0].result(10)
            assert place.rows[0] == {"prompt": expected, "level": 3}


def test_rounds_are_queued_while_engines_pause_and_keep_their_cache() -> None:
    """Else what is sampled together would depend on the moment at which each prompt arrives; a cleared cache costs twice the time."""
    with playing(turns=3) as (own, _):
        [group.result(10) for group in begin(own, *PROMPTS)]
        calls = own.fleet.engines[0].calls
        assert len(own.fleet.engines[0].batches) == 3
    assert calls == [("resume",), *[("pause", "keep"), ("resume",)] * 3]


def test_prompts_that_are_prepared_wait_for_the_engines_to_be_resumed() -> None:
    """The next step's prompts are queued while the learners train."""
    with playing() as (own, _):
        engine = own.fleet.engines[0]
        in_thread(own, own.pause)
        groups = begin(own, *PROMPTS)
        wait_until(lambda: len(engine.batches) == 1)
        assert engine.calls[-1] == ("pause", "drain") and len(engine.queued) == 3
        in_thread(own, own.resume)
        assert [len(group.result(10).completions) for group in groups] == [2, 2, 2]


def test_every_turn_of_every_sample_has_a_seed_of_its_own() -> None:
    with playing(seeds_prompts=True, turns=3, in_rounds=False) as (own, _):
        [group.result(10) for group in begin(own, *PROMPTS)]
        seeds = np.concatenate([batch.seeds for batch in own.fleet.engines[0].batches])
    assert len(np.unique(seeds)) == len(seeds) == 3 + 2 * 3 * 2


def test_a_trajectory_stays_with_the_engine_that_has_it_in_its_cache() -> None:
    with playing(num_engines=2, turns=3, in_rounds=False) as (own, _):
        [group.result(10) for group in begin(own, *PROMPTS)]
        rows = [
            {int(batch.tokens[a]) for batch in engine.batches for a in batch.cu_seqlens[:-1]}
            for engine in own.fleet.engines
        ]
    assert rows[0] | rows[1] == {10, 11, 12} and not rows[0] & rows[1]


class Apart(Episodes):
    """Every sample asks for all its turns by itself, as agents do."""

    async def run(self, task: Task) -> RolloutGroup:
        async def played(sample: int) -> None:
            for turn in range(1, 4):
                ask = Ask(
                    prompt=task.prompt,
                    place=task.place,
                    sample=sample,
                    turn=turn,
                    tokens=task.prompt.tokens,
                    num_samples=1,
                    max_tokens=9,
                    stop=("x",) if sample else (),
                    answer=asyncio.get_running_loop().create_future(),
                )
                await self.gathering.sample(ask)

        await asyncio.gather(played(0), played(1))
        self.gathering.leave()
        return RolloutGroup(prompt=task.prompt, completions=())


def test_samples_that_ask_apart_share_an_engine_and_keep_their_own_stop_strings() -> None:
    """They begin with the same tokens, and the engine that has read them need not read them again."""
    with playing(num_engines=2, in_rounds=False, episodes=Apart) as (own, _):
        [group.result(10) for group in begin(own, *PROMPTS)]
        batches = [[batch for batch in engine.batches] for engine in own.fleet.engines]
    rows = [{int(batch.tokens[a]) for batch in each for a in batch.cu_seqlens[:-1]} for each in batches]
    assert rows[0] | rows[1] == {10, 11, 12} and not rows[0] & rows[1]
    ends = [(batch.sampling.stop_strings, len(batch.numbers)) for each in batches for batch in each]
    assert [sum(size for stops, size in ends if stops == own_ones) for own_ones in ((), ("x",))] == [9, 9]


class Leaving(Episodes):
    """Asks for two turns, and waits only for the first."""

    async def run(self, task: Task) -> RolloutGroup:
        def ask(turn: int) -> asyncio.Task[Sequence[Sampled]]:
            one = Ask(
                prompt=task.prompt,
                place=task.place,
                sample=0,
                turn=turn,
                tokens=task.prompt.tokens,
                num_samples=1,
                max_tokens=9,
                answer=asyncio.get_running_loop().create_future(),
            )
            return asyncio.create_task(self.gathering.sample(one))

        read, left = ask(1), ask(2)
        await read
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        self.gathering.leave()
        return RolloutGroup(prompt=task.prompt, completions=())


def test_a_turn_that_nobody_waits_for_is_withdrawn_from_its_engine() -> None:
    """By an agent that gave up its call, or has ended."""
    with playing(in_rounds=False, answers=False, episodes=Leaving) as (own, _):
        (group,) = begin(own, PROMPTS[0])
        engine = own.fleet.engines[0]
        wait_until(lambda: len(engine.queued) == 2)
        first, second = engine.queued
        engine.answer(first)
        group.result(10)
        wait_until(lambda: ("withdraw", second) in engine.calls)
        wait_until(lambda: not own.loads.is_busy(0))
        assert not own.interaction.turns and not own.listener.failure


def test_engines_that_are_drained_sample_the_turns_that_are_left() -> None:
    """A pause between two turns would train on a trajectory of two policies where none was asked for; what has not begun waits."""
    with playing(in_rounds=False) as (own, place):
        place.gate.clear()
        (group,) = begin(own, PROMPTS[0])
        wait_until(lambda: len(own.fleet.engines[0].batches) == 1)
        own.holds_training = True
        paused = in_thread(own, own.pause)
        (late,) = begin(own, PROMPTS[1])
        assert not paused.done()
        place.gate.set()
        paused.result(10)
        assert group.done() and not late.done() and own.fleet.engines[0].calls[-1] == ("pause", "drain")
        assert in_thread(own, own.numbers_that_wait) == [0]
        own.holds_training = False
        in_thread(own, own.resume)
        assert len(late.result(10).completions) == 2


def test_turns_of_an_engine_that_dies_go_on_elsewhere() -> None:
    """Only what had just begun is sampled again from its prompt."""
    with playing(num_engines=2, in_rounds=False, answers=False) as (own, _):
        (group,) = begin(own, PROMPTS[1])
        first, second = own.fleet.engines
        wait_until(lambda: first.queued)
        first.answer(*first.queued)
        wait_until(lambda: first.queued)
        in_thread(own, first.die)
        wait_until(lambda: second.queued)
        assert [tokens.tolist() for tokens, _ in second.queued.values()] == [[11, 11, 11, 11, 99]] * 2
        second.answer(*second.queued)
        assert len(group.result(10).completions) == 2 and not own.listener.replays


def test_a_pause_does_not_wait_for_a_group_that_its_engine_has_lost() -> None:
    """It begins again after the pause; until then it is held, and would never end."""
    with playing(num_engines=2, in_rounds=False, answers=False) as (own, _):
        (late,) = begin(own, PROMPTS[0])
        first = own.fleet.engines[0]
        wait_until(lambda: first.queued)
        own.holds_training = True
        paused = in_thread(own, own.pause)
        assert not paused.done()
        in_thread(own, first.die)
        paused.result(10)
        assert not late.done()


def test_a_pause_ends_when_the_run_has_failed() -> None:
    """The tools of a group that is under way may take as long as they like."""
    with playing(in_rounds=False) as (own, place):
        place.gate.clear()
        (group,) = begin(own, PROMPTS[0])
        wait_until(lambda: len(own.fleet.engines[0].batches) == 1)
        paused = in_thread(own, own.pause)
        own.fleet.abort()
        in_thread(own, lambda: own.send_turns([], together=False))
        paused.result(10)
        with pytest.raises(EngineError, match="aborted"):
            group.result(10)
        place.gate.set()


def test_what_fails_unseen_in_the_loop_ends_the_run() -> None:
    """A group whose answer was lost would be waited for until the time for a whole step is over."""
    with playing() as (own, _):
        own.interaction.gathering.send = None
        (group,) = begin(own, PROMPTS[0])
        with pytest.raises(TypeError):
            group.result(10)


def test_an_evaluation_takes_turns_as_well() -> None:
    with playing() as (own, _):
        groups = own.wait(own.sample_evaluation(PROMPTS))
    assert [group.prompt.id for group in groups] == [p.id for p in PROMPTS]
    assert all(len(c.trajectory.turns) == 2 for group in groups for c in group.completions)


def test_an_environment_knows_a_trajectory_of_an_evaluation_from_one_of_the_training() -> None:
    """Both count their rows from zero: a tool that files what it finds by the name would mix them."""
    with playing() as (own, place):
        begin(own, PROMPTS[1])[0].result(10)
        own.wait(own.sample_evaluation(PROMPTS[1:2]))
    assert place.names == ["0/1/0", "0/1/1", "eval/0/1/0"]


@pytest.mark.parametrize("in_rounds", [True, False])
def test_an_abort_ends_what_waits_for_tools(in_rounds: bool) -> None:
    """Ctrl-C must not wait for a tool."""
    with playing(in_rounds=in_rounds, answers=False) as (own, place):
        place.gate.clear()
        groups = begin(own, *PROMPTS)
        engine = own.fleet.engines[0]
        wait_until(lambda: len(engine.queued) == 3)
        engine.answer(*engine.queued)
        own.fleet.abort()
        place.gate.set()
        for group in groups:
            with pytest.raises(EngineError, match="aborted"):
                group.result(10)


def test_an_environment_that_breaks_its_promise_ends_the_run() -> None:
    with playing() as (own, _):
        own.interaction.episodes.environments.acquire = _failing
        (group,) = begin(own, PROMPTS[0])
        with pytest.raises(ValueError, match="different texts"):
            group.result(10)


async def _failing(row: Mapping[str, object], *, seed: int, trajectory: str) -> Acting:
    raise ValueError("different texts")


def test_a_turn_that_engines_refuse_fails_its_group_alone() -> None:
    """What an environment has answered may be at fault; the other groups have nothing to do with it."""
    with playing(turns=3, in_rounds=True) as (own, _):
        own.fleet.engines[0].refuses = {11: "token 99 is out of vocabulary"}
        groups = begin(own, *PROMPTS)
        failure = groups[1].exception(10)
        assert isinstance(failure, RefusedError) and "turn 0 of sample 0 of training row 1" in str(failure)
        assert [len(groups[row].result(10).completions) for row in (0, 2)] == [2, 2]
        wait_until(lambda: not own.unfinished.groups and not own.interaction.groups)
        assert own.listener.failure is None


@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_later_turn_that_is_refused_before_the_queue_fails_its_group_alone(in_rounds) -> None:
    """Token 99 is what the environment answers."""
    with playing(turns=3, in_rounds=in_rounds) as (own, _):
        own.bounds = RequestBounds(max_model_len=70, vocab=99, has_tokenizer=False, has_masks=False)
        for group, row in zip(begin(own, *PROMPTS), range(3), strict=True):
            failure = str(group.exception(10))
            assert f"of training row {row} of epoch 0: token 99 at place {2 * row + 2} of its prompt" in failure
        own.bounds = replace(own.bounds, vocab=100)
        assert [len(group.result(10).completions) for group in begin(own, *PROMPTS)] == [2, 2, 2]
        assert own.listener.failure is None
