"""A pool of environments in worker processes: who has one, who waits for one, and what is there when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.environment import Observation
from mgrpo.environments.loop.instance import Ending
from mgrpo.environments.loop.losses import AcquireTimeout, EnvironmentLost
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers import pool as pools
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool, describe
from tests.processes import processes_with
from tests.unit.environments.pooled import QUICK, ROW, TOOLS, asked, call, pool, run, spec, taken, until


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
