"""Environments in worker processes: whatever a tool does, its own trajectory is told, and the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.instance import Ending, Instance
from mgrpo.environments.loop.losses import AcquireTimeout, EnvironmentLost, ResetFailed
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers import host, link
from mgrpo.environments.workers import pool as pools
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool, describe
from tests.processes import processes_with

TOOLS = Path(__file__).with_name("hostile_tools.py")
ROW = {"question": "six times seven?"}
QUICK = WorkerLimits(tool_timeout_s=0.5, reset_timeout_s=30, acquire_timeout_s=20, grace_s=0.3)


def spec(name: str, **settings: Any) -> Spec:
    return Spec(entry=f"{TOOLS}:{name}", call_name="" if name[0].isupper() else name, settings=settings)


def pool(
    *names: str, pool_size: int = 2, num_workers: int = 1, limits: WorkerLimits = QUICK, **settings: Any
) -> EnvironmentPool:
    specs = [spec(name, **settings) for name in names]
    return EnvironmentPool(specs, pool_size=pool_size, num_workers=num_workers, limits=limits)


def call(name: str, **arguments: Any) -> Call:
    return Call(name=name, arguments=arguments)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def taken(environments: EnvironmentPool, row: dict[str, Any] | None = None, name: str = "t") -> Instance:
    return await environments.acquire(row or ROW, seed=3, trajectory=name)


async def asked(instance: Instance, name: str, **arguments: Any) -> Answered:
    """The answer to a turn of one call."""
    return (await instance.step([call(name, **arguments)]))[0]


async def until(claim: Any, limit_s: float = 10) -> None:
    end = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen worker is given up after the limit of a call."""
    monkeypatch.setattr(link, "PATIENCE_S", 0.3)


def test_a_trajectory_has_an_opening_answers_and_an_ending() -> None:
    """The whole way of a trajectory, each value worked out by hand."""

    async def go() -> None:
        environments = pool("echo", "Counting")
        description = await environments.start()
        assert [tool.name for tool in description.tools] == ["echo", "count"]
        instance = await taken(environments)
        assert (instance.opening, instance.active, instance.acts) == ("six times seven? 3", {"echo", "count"}, False)
        assert instance.metrics == {"Counting/resets": 1.0}
        answers = await instance.step([call("count"), call("echo", text="42"), call("nothing"), call("count")])
        assert [answer.observation for answer in answers[:2]] == [
            Observation(text="1 2", reward=0.5, metrics={"Counting/steps": 2.0}),
            Observation(text="42"),
        ]
        assert [answer.observation.failed for answer in answers] == [False, False, True, False]
        assert not any(answer.timed_out for answer in answers)
        assert await instance.ending() == Ending(reward=0.5, snapshot={"steps": 2})
        await instance.release()
        again = await taken(environments)
        assert (await asked(again, "count")).observation.text == "2 1"
        await environments.close()

    run(go())


def test_what_is_offered_can_be_asked_without_a_pool() -> None:
    assert [tool.name for tool in describe([spec("echo")]).tools] == ["echo"]


@pytest.mark.parametrize("entry", [f"{TOOLS}:absent", "absent_module:tool", f"{TOOLS}:Broken"])
def test_a_tool_that_cannot_be_had_is_named(entry: str) -> None:
    """At the start, where the user can change it; not as trajectories without score."""
    with pytest.raises(ValueError, match="cannot be") as failure:
        describe([spec("echo"), Spec(entry=entry)])
    assert entry in str(failure.value)

    async def go() -> None:
        with pytest.raises(ValueError) as again:
            await EnvironmentPool([Spec(entry=entry)], pool_size=1, num_workers=1).start()
        assert entry in str(again.value)

    run(go())


def test_an_environment_that_does_not_get_ready_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer would otherwise be a run that never begins."""
    monkeypatch.setattr(pools, "_START_LIMIT_S", 0.3)
    with pytest.raises(ValueError, match=r"hostile_tools\.py:Unready is not set up after 0\.3 s"):
        describe([spec("Unready")])


def test_a_pool_of_one_serves_sixty_four_trajectories_in_their_order() -> None:
    """A pool may be far smaller than a batch: all are served, none twice, first come first served."""

    async def go() -> None:
        environments = pool("Counting", pool_size=1)
        await environments.start()
        order: list[tuple[int, str]] = []

        async def trajectory(number: int) -> None:
            instance = await environments.acquire(ROW, seed=number, trajectory=f"t{number}")
            order.append((number, (await asked(instance, "count")).observation.text))
            await instance.release()

        await asyncio.gather(*map(trajectory, range(64)))
        assert order == [(number, f"{number + 1} 1") for number in range(64)]
        assert environments.take_metrics()["time/env_acquire"] > 0
        await environments.close()

    run(go())


def test_environments_exist_up_to_the_pools_size_and_are_closed_in_the_end(tmp_path: Path) -> None:
    """More would take more memory than was asked for; one that is not closed loses what it has not written."""

    async def go() -> None:
        environments = pool("Counting", pool_size=5, num_workers=2, folder=str(tmp_path))
        await environments.start()
        instances = [await taken(environments) for _ in range(5)]
        log = tmp_path / "log"
        assert log.read_text().split() == ["setup"] * 5
        for instance in instances:
            await instance.release()
            await instance.release()
        for instance in [await taken(environments) for _ in range(5)]:
            await instance.release()
        await environments.close()
        assert log.read_text().split() == ["setup"] * 5 + ["close"] * 5

    run(go())


def test_what_a_trajectory_leaves_is_let_go_of_when_it_is_over(tmp_path: Path) -> None:
    """Otherwise it is kept until the next one begins, which may be never; and no other trajectory gets it before."""

    async def go() -> None:
        environments = pool("Ending", pool_size=1, folder=str(tmp_path))
        await environments.start()
        for _ in range(2):
            await (await taken(environments)).release()
        log = tmp_path / "log"
        await until(lambda: log.read_text().split() == ["setup", "end", "end"])
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["die", "freeze", "hang", "hang in a thread", "raise"])
def test_an_environment_that_does_not_let_go_serves_nobody_else(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CLOSE_LIMIT_S", 0.2)

    async def go() -> None:
        environments = pool("Ending", pool_size=1)
        await environments.start()
        await (await taken(environments, ROW | {"where": "end", "bad": bad})).release()
        assert (await asked(await taken(environments), "count")).observation.text == "1 1", "a new one"
        await environments.close()

    run(go())


def test_environments_that_nobody_needs_for_long_are_closed(tmp_path: Path) -> None:
    """A pool without a limit would keep the most that any step or evaluation has had at once. One that is used stays."""

    async def go() -> None:
        environments = pool("Counting", pool_size=1 << 30, limits=WorkerLimits(idle_s=0.4), folder=str(tmp_path))
        await environments.start()
        for instance in [await taken(environments) for _ in range(4)]:
            await instance.release()
        log, resets = tmp_path / "log", 0
        while log.read_text().split().count("close") < 3:
            instance = await taken(environments)
            count = int((await asked(instance, "count")).observation.text.split()[0])
            assert count > resets, "the same instance again"
            resets = count
            await instance.release()
            await asyncio.sleep(0.02)
        assert log.read_text().split() == ["setup"] * 4 + ["close"] * 3
        await until(lambda: log.read_text().split().count("close") == 4)
        assert (await asked(await taken(environments), "count")).observation.text == "1 1"
        await environments.close()

    run(go())


def test_who_waits_too_long_is_told_who_holds_the_environments() -> None:
    async def go() -> None:
        environments = pool("echo", pool_size=1, limits=WorkerLimits(acquire_timeout_s=0.1))
        await environments.start()
        holder = await taken(environments, name="prompt 7, sample 2")
        with pytest.raises(AcquireTimeout, match=r"1 of pool_size=1 are held, the longest by prompt 7, sample 2 for"):
            await taken(environments, name="another")
        await holder.release()
        assert (await asked(await taken(environments), "echo", text="a")).observation.text == "a"
        await environments.close()

    run(go())


def test_a_queue_that_moves_is_waited_for() -> None:
    """Each waits longer than the limit; what counts is that some trajectory got an environment in the meantime."""

    async def go() -> None:
        environments = pool("echo", pool_size=1, limits=WorkerLimits(acquire_timeout_s=0.3))
        await environments.start()

        async def use(name: str) -> None:
            instance = await taken(environments, name=name)
            await asyncio.sleep(0.12)
            await instance.release()

        await asyncio.gather(*(use(str(number)) for number in range(5)))
        await environments.close()

    run(go())


def test_time_in_which_no_environment_has_work_counts_little() -> None:
    """Prepared trajectories hold the pool while the model is trained, for longer than any tool may take."""

    async def go() -> None:
        environments = pool("rest", pool_size=1, limits=WorkerLimits(acquire_timeout_s=0.2))
        await environments.start()
        prepared = await taken(environments)
        waiting = asyncio.create_task(taken(environments))
        await asyncio.sleep(0.6)
        assert not waiting.done(), "nobody asks the environment anything"
        work = asyncio.create_task(asked(prepared, "rest", seconds=5))
        with pytest.raises(AcquireTimeout):
            await asyncio.wait_for(waiting, 1)
        work.cancel()
        await environments.close()

    run(go())


def test_who_has_to_begin_again_does_not_wait_behind_others(tmp_path: Path) -> None:
    """Others may hold what they have until all trajectories of their prompt have begun: each would wait for the other."""
    order: list[str] = []

    async def go() -> None:
        environments = pool("Hostile", pool_size=1)
        await environments.start()

        async def use(name: str, row: dict[str, Any]) -> None:
            instance = await taken(environments, row, name=name)
            order.append(name)
            await instance.release()

        row = ROW | {"where": "reset", "bad": "raise", "once": str(tmp_path / "once")}
        await asyncio.gather(use("first", row), use("second", ROW), use("third", ROW))
        await environments.close()

    run(go())
    assert order == ["first", "second", "third"]


@pytest.mark.parametrize("tool", ["rest", "sleep", "sleep_apart", "stay"])
def test_a_late_call_is_told_and_its_turn_goes_on(tool: str) -> None:
    """Cancelled or not: the model learns that it was late, the other calls of the turn have their answers."""

    async def go() -> None:
        environments = pool(tool, "echo")
        await environments.start()
        instance = await taken(environments)
        late, other = await instance.step([call(tool, seconds=1000), call("echo", text="here")])
        assert late.timed_out and late.observation.failed and late.seconds >= 0.5
        assert late.observation.text == '{"error": "TimeoutError: no answer within 0.5 s"}'
        assert not other.timed_out and other.observation.text == "here" and other.seconds < late.seconds
        assert environments.take_metrics()["env/timeouts"] == 1
        await environments.close()

    run(go())


def test_a_late_call_that_was_cancelled_costs_its_environment_and_not_the_worker() -> None:
    """The trajectory goes on with it; the next one gets a new environment."""

    async def go() -> None:
        environments = pool("rest", "Counting", pool_size=1)
        await environments.start()
        pids = environments.pids
        instance = await taken(environments)
        assert (await asked(instance, "rest", seconds=1000)).timed_out
        assert (await asked(instance, "count")).observation.text == "1 1"
        await instance.release()
        instance = await taken(environments)
        assert (await asked(instance, "count")).observation.text == "1 1", "a new one, which counts from one"
        await environments.close()
        assert environments.take_metrics()["env/replaced"] == 0 and pids

    run(go())


def test_after_a_late_call_environments_still_go_on_together() -> None:
    """A call that goes on in the same turn is not one that could not be ended."""

    async def go() -> None:
        environments = pool("rest", "echo")
        await environments.start()
        instance = await taken(environments)
        assert (await asked(instance, "rest", seconds=1000)).timed_out
        turn = [call("rest", seconds=0.05), call("echo", text="a"), call("rest", seconds=0.05)]
        assert [each.observation.text for each in await instance.step(turn)] == ["rested", "a", "rested"]
        await environments.close()

    run(go())


@pytest.mark.parametrize("tool", ["sleep", "sleep_apart", "stay"])
def test_a_worker_with_a_call_that_cannot_be_ended_lets_others_finish_and_is_replaced(tool: str) -> None:
    """Threads cannot be killed: without the worker's end every such call would cost memory and a core for the whole run."""

    async def go() -> None:
        environments = pool(tool, "echo", limits=WorkerLimits(tool_timeout_s=0.5, acquire_timeout_s=20, grace_s=1.0))
        await environments.start()
        (old,) = environments.pids
        culprit, other = await taken(environments), await taken(environments)
        assert (await asked(culprit, tool, seconds=1000)).timed_out
        refused = await asked(culprit, "echo", text="a")
        assert refused.observation.failed and not refused.timed_out
        assert (await asked(other, "echo", text="b")).observation.text == "b"
        waiting = asyncio.create_task(taken(environments))
        await other.release()
        await asyncio.sleep(0.1)
        assert not waiting.done(), "the worker takes no new trajectory"
        await until(lambda: environments.pids not in ([old], []))
        # Its own call ended the worker, so the trajectory goes on without tools.
        assert (await asked(culprit, "echo", text="a")).observation.failed
        assert await culprit.ending() == Ending()
        await culprit.release()
        assert (await asked(await waiting, "echo", text="c")).observation.text == "c"
        assert environments.take_metrics()["env/replaced"] == 1
        await environments.close()

    run(go())


def test_a_worker_whose_late_call_ends_by_itself_stays() -> None:
    """A search that takes a second too long must not cost thirty other trajectories their environments."""

    async def go() -> None:
        environments = pool("sleep", "echo")
        await environments.start()
        before = environments.pids
        instance = await taken(environments)
        assert (await asked(instance, "sleep", seconds=0.7)).timed_out
        await asyncio.sleep(0.4)
        assert (await asked(instance, "echo", text="a")).observation.text == "a"
        await instance.release()
        assert (await asked(await taken(environments), "echo", text="b")).observation.text == "b"
        assert environments.pids == before
        await environments.close()

    run(go())


def test_a_thread_that_an_environment_keeps_is_not_a_call_that_hangs() -> None:
    """Readers of a connection are such threads: they go on between calls, and nothing is wrong."""

    async def go() -> None:
        environments = pool("keep_a_thread", "echo")
        await environments.start()
        before = environments.pids
        instance = await taken(environments)
        assert (await asked(instance, "keep_a_thread", seconds=1)).observation.text == "kept"
        assert (await asked(instance, "echo", text="a")).observation.text == "a"
        await instance.release()
        assert (await asked(await taken(environments), "echo", text="b")).observation.text == "b"
        assert environments.pids == before
        await environments.close()

    run(go())


def test_a_worker_in_which_only_a_hanging_call_is_left_ends_at_once() -> None:
    """With a pool of one the grace would be waiting for nobody."""

    async def go() -> None:
        environments = pool(
            "sleep", pool_size=1, limits=WorkerLimits(tool_timeout_s=0.1, grace_s=1000, acquire_timeout_s=20)
        )
        await environments.start()
        instance = await taken(environments)
        await asked(instance, "sleep", seconds=1000)
        await instance.release()
        assert (await asked(await taken(environments), "sleep", seconds=0)).observation.text == "slept"
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["block", "freeze", "hold the interpreter"])
def test_a_worker_that_answers_nobody_is_killed(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot keep its own limits then, so this side does: the culprit is told, the others have no score."""
    end = link.Link._end_child
    # A busy machine: the others' limits pass before the worker has ended.
    monkeypatch.setattr(link.Link, "_end_child", lambda own: (time.sleep(0.5), end(own)))
    code = {
        "freeze": "os.kill(os.getpid(), signal.SIGSTOP)",
        # A search for a pattern holds the lock of the interpreter until it ends.
        "hold the interpreter": "import re; re.match('(a+)+b', 'a' * 60)",
    }

    async def go() -> None:
        environments = pool("block", "run", "rest", "Counting")
        await environments.start()
        culprit, other = await taken(environments, name="culprit"), await taken(environments)
        work = asked(culprit, "block", seconds=1000) if bad == "block" else asked(culprit, "run", code=code[bad])
        answer = asyncio.create_task(work)
        with pytest.raises(EnvironmentLost):
            # The tool's thread may begin later than these calls.
            for _ in range(50):
                await asyncio.sleep(0.1)
                await asked(other, "count")
        late = await answer
        assert late.timed_out and late.observation.failed
        assert (await asked(culprit, "count")).observation.failed
        with pytest.raises(EnvironmentLost):
            await culprit.ending()
        for instance in (culprit, other):
            await instance.release()
        assert (await asked(await taken(environments), "count")).observation.text == "1 1"
        assert environments.take_metrics()["env/replaced"] == 1
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
def test_who_is_late_because_of_anothers_call_has_no_score() -> None:
    """It is the call that was already known to hang that froze the worker, not the one that came after it."""
    code = "import time; time.sleep(0.5); import re; re.match('(a+)+b', 'a' * 60)"

    async def go() -> None:
        environments = pool("run", "rest", limits=WorkerLimits(tool_timeout_s=0.2, acquire_timeout_s=20, grace_s=1000))
        await environments.start()
        culprit, other = await taken(environments), await taken(environments)
        assert (await asked(culprit, "run", code=code)).timed_out
        await asyncio.sleep(0.6)
        with pytest.raises(EnvironmentLost, match="another trajectory's call"):
            await asked(other, "rest", seconds=0)
        assert (await asked(culprit, "rest", seconds=0)).observation.failed
        assert environments.take_metrics()["env/timeouts"] == 1
        await environments.close()

    run(go())


@pytest.mark.parametrize("bad", ["die", "exit", "flood the pipe", "forge an answer", "kill the guard"])
def test_a_worker_that_dies_in_a_call_costs_its_trajectories_and_is_replaced(bad: str) -> None:
    """Kill -9, an exit, or what is not the protocol: the trajectory has no score, and the pool goes on."""

    async def go() -> None:
        environments = pool("Hostile", "echo", pool_size=2)
        await environments.start()
        instance = await taken(environments, ROW | {"where": "step", "bad": bad})
        other = await taken(environments)
        if bad == "kill the guard":
            (guard,) = environments.pids
            os.kill(guard, signal.SIGKILL)
            await until(lambda: guard not in environments.pids)
        with pytest.raises(EnvironmentLost):
            await asked(instance, "count")
        with pytest.raises(EnvironmentLost):
            await asked(other, "count")
        with pytest.raises(EnvironmentLost):
            await other.ending()
        for each in (instance, other):
            await each.release()
        both = [await taken(environments) for _ in range(2)]
        assert [(await asked(each, "count")).observation.text for each in both] == ["1 1", "1 1"]
        assert environments.take_metrics()["env/replaced"] == 1
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["die", "freeze", "hang", "hang in a thread", "raise", "leave"])
def test_a_reset_is_tried_twice(bad: str, tmp_path: Path) -> None:
    """The first failure may be an accident; the second one is the row's, which has no score then."""
    limits = WorkerLimits(reset_timeout_s=0.3, acquire_timeout_s=20, grace_s=0.1)

    async def go() -> None:
        environments = pool("Hostile", pool_size=1, limits=limits)
        await environments.start()
        row = ROW | {"where": "reset", "bad": bad}
        instance = await taken(environments, row | {"once": str(tmp_path / "once")})
        assert (await asked(instance, "count")).observation.text == "1 1"
        await instance.release()
        with pytest.raises(ResetFailed, match="no environment could begin t, in 2 tries"):
            await taken(environments, row)
        await (await taken(environments)).release()
        await environments.close()

    run(go())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bad", ["die", "freeze", "hang", "hang in a thread", "raise"])
def test_an_environment_that_does_not_close_is_ended(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free again, and the end of the pool does not wait for it."""
    monkeypatch.setattr(host, "_CLOSE_LIMIT_S", 0.2)
    monkeypatch.setenv("MGRPO_TOOL_MARK", mark := f"pool-{os.getpid()}-{bad}")

    async def go() -> None:
        environments = pool("Hostile", pool_size=1)
        await environments.start()
        row = ROW | {"where": "close", "bad": bad}
        await (await taken(environments, row)).release(broken=True)
        await taken(environments, row)
        began = time.monotonic()
        await environments.close()
        assert time.monotonic() - began < 5
        await until(lambda: not processes_with(mark))

    run(go())


@pytest.mark.parametrize("bad", ["raise", "hang", "die"])
def test_an_environment_without_a_verdict_gives_no_score(bad: str) -> None:
    """A trajectory whose reward is unknown must not be scored by others as if the environment had none."""
    limits = WorkerLimits(reset_timeout_s=0.3, acquire_timeout_s=20)

    async def go() -> None:
        environments = pool("Hostile", pool_size=1, limits=limits)
        await environments.start()
        instance = await taken(environments, ROW | {"where": "reward", "bad": bad})
        with pytest.raises(EnvironmentLost):
            await instance.ending()
        await instance.release()
        assert (await (await taken(environments)).ending()).reward == 0.0
        await environments.close()

    run(go())


def test_odd_answers_of_an_environment_are_failed_calls() -> None:
    """Errors of its author must not stop a run, and no reward may be nan."""

    async def go() -> None:
        environments = pool("Odd", limits=WorkerLimits(output_bytes=100))
        await environments.start()
        instance = await taken(environments)
        for kind in ("nan", "few", "text", "none", "stop"):
            assert (await asked(instance, "odd", kind=kind)).observation.failed, kind
        assert (await asked(instance, "odd", kind="surrogate")).observation.text == "a?b"
        long = (await asked(instance, "odd", kind="long")).observation
        assert long.text == "ä" * 25 + "\n... 1900 bytes left out ...\n" + "ä" * 25 and not long.failed
        await environments.close()

    run(go())


def test_what_json_does_not_hold_is_a_failed_call_and_no_column() -> None:
    """A model may nest a thousand lists, which would end whoever reads them by its limit of recursion."""
    nested: Any = []
    for _ in range(900):
        nested = [nested]

    async def go() -> None:
        environments = pool("echo", "Counting")
        await environments.start()
        instance = await taken(environments, ROW | {"image": object(), "bytes": b"", "nested": nested})
        turn = [
            call("echo", text=nested),
            call("echo", text="a"),
            call("echo", text={1, 2}),
            call("echo", text=16**5000),
        ]
        assert [answer.observation.failed for answer in await instance.step(turn)] == [True, False, True, True]
        await environments.close()

    run(go())


def test_what_a_tool_prints_is_not_taken_for_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "print('{\"id\": 0}'); os.write(1, b'noise\\n' * 1000); sys.stdout.flush(); "
        "subprocess.run(['echo', 'from a child']); answer = repr(sys.stdin.read())"
    )

    async def go() -> None:
        environments = pool("run")
        await environments.start()
        assert (await asked(await taken(environments), "run", code=code)).observation.text == "''"
        await environments.close()

    run(go())
    out, err = capfd.readouterr()
    assert out == "" and "from a child" in err and "noise" in err


def test_tools_do_not_see_the_runs_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they read is untrusted, and a token would let it act in the user's name."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MGRPO_TOOL_KEY", "for tools")

    async def go() -> None:
        environments = pool("run")
        await environments.start()
        code = "answer = (os.environ.get('HF_TOKEN'), os.environ.get('MGRPO_TOOL_KEY'))"
        assert (await asked(await taken(environments), "run", code=code)).observation.text == "(None, 'for tools')"
        await environments.close()

    run(go())


def test_a_cancelled_trajectory_gives_its_environment_up() -> None:
    """The end of a step cancels what is unfinished: the call is cancelled in the worker, and nobody gets its environment."""

    async def go() -> None:
        environments = pool("rest", "Counting", pool_size=1, limits=WorkerLimits(acquire_timeout_s=20))
        await environments.start()

        async def trajectory() -> None:
            instance = await taken(environments)
            try:
                await asked(instance, "count")
                await asked(instance, "rest", seconds=1000)
            finally:
                await instance.release()

        first, waiting = asyncio.create_task(trajectory()), asyncio.create_task(trajectory())
        await asyncio.sleep(0.2)
        waiting.cancel()
        first.cancel()
        await asyncio.wait({first, waiting})
        assert (await asked(await taken(environments), "count")).observation.text == "1 1"
        assert environments.take_metrics()["env/replaced"] == 0
        await environments.close()

    run(go())


def test_a_trajectory_that_is_cancelled_in_its_reset_leaves_its_place() -> None:
    async def go() -> None:
        environments = pool("Counting", pool_size=1, delay_s=0.2)
        await environments.start()
        task = asyncio.create_task(taken(environments))
        await asyncio.sleep(0.1)
        task.cancel()
        await (await taken(environments)).release()
        await environments.close()

    run(go())


def test_the_end_of_the_pool_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a call, a reset or a place gets an error; nothing runs on; and it can be started again."""
    monkeypatch.setenv("MGRPO_TOOL_MARK", mark := f"pool-{os.getpid()}-end")

    async def go() -> None:
        environments = pool("sleep", "run", pool_size=1, limits=WorkerLimits(acquire_timeout_s=20))
        await environments.start()
        instance = await taken(environments)
        await asked(instance, "run", code="subprocess.Popen(['setsid', '--fork', 'sleep', '4711'])")
        call_, place = (
            asyncio.create_task(asked(instance, "sleep", seconds=1000)),
            asyncio.create_task(taken(environments)),
        )
        await asyncio.sleep(0.05)
        assert len(processes_with(mark)) == 3
        await environments.close()
        await until(lambda: not processes_with(mark))
        with pytest.raises(EnvironmentLost):
            await call_
        with pytest.raises(RuntimeError, match="closed"):
            await place
        with pytest.raises(RuntimeError, match="closed"):
            await taken(environments)
        await instance.release()
        await environments.start()
        await taken(environments)
        await environments.close()

    run(go())


RUN = """
import asyncio, sys, time
from mgrpo.environments.workers import host
from mgrpo.environments.environment import Call
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool

host._CLOSE_LIMIT_S = 0.5

async def main():
    environments = EnvironmentPool([Spec(entry=sys.argv[1] + ":run")], pool_size=2, num_workers=2)
    try:
        await environments.start()
        for _ in range(2):
            instance = await environments.acquire({}, seed=0, trajectory="t")
            await instance.step([Call(name="run", arguments={"code": "subprocess.Popen(['setsid', 'sleep', '4711'])"})])
        print("ready", flush=True)
        await instance.step([Call(name="run", arguments={"code": sys.argv[2]})])
    finally:
        await environments.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("code", ["time.sleep(1000)", "import re; re.match('(a+)+b', 'a' * 60)"])
def test_no_process_outlives_the_run(number: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after kill -9 nor after Ctrl-C, and also not what tools have started, in whatever state a worker is."""
    monkeypatch.setenv("MGRPO_TOOL_MARK", mark := f"pool-{os.getpid()}-{number}")
    process = subprocess.Popen([sys.executable, "-c", RUN, str(TOOLS), code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    assert len(processes_with(mark)) == 1 + 2 * 3
    process.send_signal(number)
    process.wait(20)
    end = time.monotonic() + 5
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.01)
    assert processes_with(mark) == set()


def test_a_pool_whose_workers_cannot_be_replaced_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectories that wait for a worker that never comes would be a run that stands still."""
    monkeypatch.setattr(pools, "_PAUSE_BETWEEN_STARTS_S", 0.0)
    file = tmp_path / "own.py"
    file.write_text(TOOLS.read_text())

    async def go() -> None:
        environments = EnvironmentPool([Spec(entry=f"{file}:Hostile")], pool_size=1, num_workers=1, limits=QUICK)
        await environments.start()
        instance = await taken(environments, ROW | {"where": "step", "bad": "die"})
        file.unlink()
        with pytest.raises(EnvironmentLost):
            await asked(instance, "count")
        await instance.release()
        with pytest.raises(RuntimeError, match=r"own\.py.*3 times in a row"):
            await taken(environments)
        await environments.close()

    run(go())


def test_the_time_of_tools_is_that_in_which_any_was_waited_for() -> None:
    """Two at once count once: it is the time for which the run could have waited."""

    async def go() -> None:
        environments = pool("rest", limits=WorkerLimits(tool_timeout_s=30))
        await environments.start()
        instances = [await taken(environments) for _ in range(2)]
        environments.take_metrics()
        answers = await asyncio.gather(*(asked(instance, "rest", seconds=2.0) for instance in instances))
        assert all(answer.seconds >= 2.0 for answer in answers)
        assert 2.0 <= environments.take_metrics()["time/tools"] < 4.0
        assert environments.take_metrics()["time/tools"] == 0
        await environments.close()

    run(go())
