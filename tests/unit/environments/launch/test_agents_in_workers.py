"""Agents in the workers of a run: what is left when processes are killed, and functions that fail."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mgrpo.environments.boxes.local import leftover
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers.environment_catalog import AGENT, Spec
from mgrpo.environments.workers.pool import EnvironmentPool
from mgrpo.processes.lifetime import children
from tests.unit.environments.launch.test_command import FORKS_AWAY, processes_with

ENDPOINT = {"base_url": "http://127.0.0.1:9/s/0-1", "api_key": "the-api-key"}
LONG_S = 120.0
SECRET = "LAUNCH_TEST_SECRET"


async def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        await asyncio.sleep(0.05)


async def in_pool(spec: Spec, play: Callable[[EnvironmentPool], Any], **options: Any) -> Any:
    pool = EnvironmentPool([spec], pool_size=2, num_workers=1, limits=WorkerLimits(), **options)
    await pool.start()
    try:
        return await play(pool)
    finally:
        await pool.close()


def command(text: str, **settings: Any) -> Spec:
    return Spec(entry=f"{AGENT}command", settings={"command": text, "box": "none", **settings})


def swept(folders: Iterable[str]) -> None:
    """What the next start does with folders of boxes that have been left for long."""
    for folder in folders:
        os.utime(folder, (0, 0))
    leftover.sweep()


@pytest.mark.parametrize("box", ["none", "local"])
def test_a_killed_worker_leaves_no_process_and_no_folder(box: str) -> None:
    """Without walls, the guard of the worker may end a box's keeper before that has removed its folder: the next start does."""
    mark = f"mgrpo-mark-{os.getpid()}-worker-{box}"
    folders = f"{tempfile.gettempdir()}/mgrpo-box-*"
    before = set(glob.glob(folders))

    async def play(pool: EnvironmentPool) -> None:
        instance = await pool.acquire({}, seed=0, trajectory="0")
        playing = asyncio.create_task(instance.run_agent(ENDPOINT, truth={}, limit_s=LONG_S))
        await until(lambda: len(processes_with(mark)) == 2)
        # The guard is the worker's parent.
        (worker,) = children(pool.pids[0])
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EnvironmentLost):
            await playing
        await until(lambda: not processes_with(mark))
        if box == "none":
            swept(set(glob.glob(folders)) - before)
        await until(lambda: set(glob.glob(folders)) <= before)
        await instance.release()

    asyncio.run(in_pool(command(f"sh -c '{FORKS_AWAY}; sleep 1000000' {mark}", box=box), play))


LEARNER = """
import asyncio, sys
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool

async def main():
    pool = EnvironmentPool([Spec(entry="agent:command", settings={"command": sys.argv[1], "box": sys.argv[2]})], pool_size=1, num_workers=1)
    await pool.start()
    instance = await pool.acquire({}, seed=0, trajectory="0")
    await instance.run_agent({"base_url": "http://127.0.0.1:9/s/0-1", "api_key": "key"}, truth={}, limit_s=1e6)

asyncio.run(main())
"""


@pytest.mark.parametrize("box", ["none", "local"])
def test_a_killed_learner_leaves_no_process_and_no_folder(box: str) -> None:
    """Without walls, the guard of the worker may end a box's keeper before that has removed its folder: the next start does."""
    # The learner's own command line must not hold the mark as a word.
    mark = f"mgrpo-mark-{os.getpid()}-learner-{box}"
    before = set(glob.glob(f"{tempfile.gettempdir()}/mgrpo-box-*"))
    words = [sys.executable, "-c", LEARNER, f"sh -c '{FORKS_AWAY}; sleep 1000000' {mark}", box]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}) as learner:
        try:
            asyncio.run(until(lambda: len(processes_with(mark)) == 2))
        finally:
            learner.kill()
    asyncio.run(until(lambda: not processes_with(mark)))
    left = set(glob.glob(f"{tempfile.gettempdir()}/mgrpo-box-*")) - before
    assert box == "none" or not left
    swept(left)
    assert not any(map(os.path.exists, left))


def test_a_variable_that_is_named_reaches_the_agent_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "s3cret-value")
    monkeypatch.setenv("OTHER_SECRET", "an0ther-value")

    async def play(pool: EnvironmentPool) -> Any:
        instance = await pool.acquire({}, seed=0, trajectory="0")
        found = await instance.run_agent(ENDPOINT, truth={}, limit_s=LONG_S)
        await instance.release()
        return found

    told = asyncio.run(
        in_pool(command(f"sh -c 'env; test ${SECRET} = s3cret-value'", env=[SECRET]), play, variables=[SECRET])
    )
    assert (told["ended"], told["status"]) == ("ended", 0)
    assert f"{SECRET}=***" in told["output"] and "OTHER_SECRET" not in told["output"]
    assert "s3cret" not in told["output"] and "the-api-key" not in told["output"]


FUNCTIONS = """
import asyncio
async def rewards(row, endpoint):
    endpoint.metrics["steps"] = 2
    return row["worth"]
async def raises(row, endpoint):
    raise KeyError("of the agent")
async def exits(row, endpoint):
    raise SystemExit(0)
async def hangs(row, endpoint):
    await asyncio.sleep(1e6)
async def ignores(row, endpoint):
    while True:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            pass
"""


@pytest.mark.parametrize(
    ("name", "worth", "expected"),
    [
        ("rewards", 0.5, ("ended", 0.5, "")),
        ("rewards", None, ("ended", None, "")),
        ("rewards", True, ("crashed", None, "True")),
        ("rewards", "1", ("crashed", None, "'1'")),
        ("rewards", 1e300, ("crashed", None, "float32")),
        ("raises", 0, ("crashed", None, "of the agent")),
        ("exits", 0, ("crashed", None, "SystemExit")),
        ("hangs", 0, ("late", None, "within 2 s")),
        ("ignores", 0, ("late", None, "within 2 s")),
    ],
)
def test_a_function_ends_as_its_outcome_says(tmp_path: Path, name: str, worth: Any, expected: tuple[Any, ...]) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)

    async def play(pool: EnvironmentPool) -> Any:
        instance = await pool.acquire({"worth": worth}, seed=0, trajectory="0")
        endpoint = ENDPOINT | {"reward_key": "the-reward-key"}
        found = await instance.run_agent(endpoint, truth={}, limit_s=LONG_S if name[0] in "re" else 2.0)
        await instance.release()
        return found

    found = asyncio.run(in_pool(Spec(entry=f"{AGENT}{file}:{name}"), play))
    assert (found["ended"], found["reward"]) == expected[:2]
    assert expected[2] in found["output"]
    assert found["metrics"] == ({"rewards/steps": 2.0} if found["ended"] == "ended" else {})


def test_a_function_that_does_not_set_its_reward_has_none(tmp_path: Path) -> None:
    """With agent_sets_reward=false its own word would be added to what verifiers and reward functions give."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)

    async def play(pool: EnvironmentPool) -> Any:
        instance = await pool.acquire({"worth": 0.5}, seed=0, trajectory="0")
        found = await instance.run_agent(ENDPOINT, truth={}, limit_s=LONG_S)
        await instance.release()
        return found

    found = asyncio.run(in_pool(Spec(entry=f"{AGENT}{file}:rewards"), play))
    assert (found["ended"], found["reward"]) == ("ended", None)
