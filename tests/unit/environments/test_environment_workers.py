"""Workers with calls that are late, hang or kill them: whatever a tool does, its own trajectory is told, and the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from mgrpo.environments.loop.instance import Ending, Instance
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers import link
from mgrpo.environments.workers.pool import EnvironmentPool
from tests.unit.environments.pooled import ROW, asked, call, pool, run, taken, until


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


async def check_that_it_stays(environments: EnvironmentPool, instance: Instance, before: list[int]) -> None:
    """The worker goes on with this trajectory and takes the next one."""
    assert (await asked(instance, "echo", text="a")).observation.text == "a"
    await instance.release()
    assert (await asked(await taken(environments), "echo", text="b")).observation.text == "b"
    assert environments.pids == before
    await environments.close()


def test_a_worker_whose_late_call_ends_by_itself_stays() -> None:
    """A search that takes a second too long must not cost thirty other trajectories their environments."""

    async def go() -> None:
        environments = pool("sleep", "echo")
        await environments.start()
        before = environments.pids
        instance = await taken(environments)
        assert (await asked(instance, "sleep", seconds=0.7)).timed_out
        await asyncio.sleep(0.4)
        await check_that_it_stays(environments, instance, before)

    run(go())


def test_a_thread_that_an_environment_keeps_is_not_a_call_that_hangs() -> None:
    """Readers of a connection are such threads: they go on between calls, and nothing is wrong."""

    async def go() -> None:
        environments = pool("keep_a_thread", "echo")
        await environments.start()
        before = environments.pids
        instance = await taken(environments)
        assert (await asked(instance, "keep_a_thread", seconds=1)).observation.text == "kept"
        await check_that_it_stays(environments, instance, before)

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
