"""A pool of environments that misbehave, for the tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from mgrpo.environments.environment import Answered, Call
from mgrpo.environments.loop.instance import Instance
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool

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
