"""An environment in its worker process: one request at a time, under limits of time and length."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.offered.agent import Endpoint, Outcome
from mgrpo.environments.offered.calling import Failed, Late, TimedCalls, WorkerLimits
from mgrpo.environments.offered.description import Description
from mgrpo.environments.offered.offered_environment import shortened
from mgrpo.environments.offered.toolbox import Toolbox
from mgrpo.environments.workers.environment_catalog import Spec, built
from mgrpo.processes.json_lines import Message

_MAX_SNAPSHOT_BYTES = 1 << 22


class Resident:
    """One environment, built and set up at its first request."""

    def __init__(self, specs: Sequence[Spec], limits: WorkerLimits, *, is_in_thread: Callable[[], bool]) -> None:
        """`is_in_thread`: true while a thread of the worker works for it."""
        self._specs, self._limits = specs, limits
        self._calls = TimedCalls(limits, is_in_thread=is_in_thread)
        self._toolbox: Toolbox | None = None

    @property
    def is_stuck(self) -> bool:
        """True while a call that was cut off continues."""
        return self._calls.is_stuck

    @property
    def toolbox(self) -> Toolbox:
        """The environment itself, which keeps the limits of its steps."""
        assert self._toolbox is not None, "a reset comes first"
        return self._toolbox

    async def description(self, limit_s: float) -> Description:
        """The offers of a new environment.

        Raises:
            Late: it is not set up in time.
            Exception, SystemExit: it cannot be built or set up.
        """
        try:
            return (await self._calls.within(limit_s, self._ready)).describe()
        except Late as err:
            entries = " or ".join(spec.entry for spec in self._specs)
            raise Late(f"{entries} is not set up after {limit_s:g} s") from err

    async def reset(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Message:
        async def begin() -> Message:
            toolbox = await self._ready()
            opening = await toolbox.reset(row, seed=seed, trajectory=trajectory)
            return {
                "opening": shortened(opening.text, self._limits.output_bytes),
                "metrics": dict(opening.metrics),
                "active": sorted(toolbox.active),
                "acts": toolbox.acts,
                "tells": toolbox.tells,
                "ends": toolbox.ends,
            }

        return await self._calls.within(self._limits.reset_timeout_s, begin)

    async def resume(self, answer: Message) -> Message:
        """The program's next sampling request, or its result, see `Program.resume`."""

        self._refuse_if_stuck()
        return await self._calls.within(self._limits.tool_timeout_s, self.toolbox.program.resume, answer)

    async def run_agent(self, endpoint: Message, *, truth: Message, limit_s: float) -> Message:
        """Run the trajectory's agent; the outcome, see `Agent.run`."""
        self._refuse_if_stuck()
        agent = self.toolbox.agent
        run = functools.partial(agent.run, Endpoint(**endpoint), truth=truth, limit_s=limit_s)
        try:
            found = await self._calls.within(limit_s + agent.ending_s, run)
        except Late as err:
            found = Outcome(ended="late", output=str(err))
        return {**found.to_json(), "metrics": {f"{agent.name}/{name}": value for name, value in found.metrics.items()}}

    async def ending(self) -> Message:
        async def ask() -> Message:
            reward = await self.toolbox.reward()
            snapshot = await asyncio.to_thread(self.toolbox.snapshot)
            if len(json.dumps(snapshot)) > _MAX_SNAPSHOT_BYTES:
                raise ValueError(
                    f"the environment's public attributes take more than {_MAX_SNAPSHOT_BYTES >> 20} MiB as JSON; "
                    "begin the names of those that no reward function needs with _"
                )
            return {"reward": reward, "snapshot": snapshot}

        self._refuse_if_stuck()
        return await self._calls.within(self._limits.reset_timeout_s, ask)

    async def end(self, limit_s: float) -> None:
        await self._calls.within(limit_s, self.toolbox.end)

    async def close(self, limit_s: float) -> None:
        """Cancel running calls, and close the environment unless one cannot be ended.

        Raises:
            Late: it does not close in time.
            Exception, SystemExit: it cannot be closed.
        """
        await self._calls.cancel()
        if self._toolbox is not None and not self.is_stuck:
            await self._calls.within(limit_s, self._toolbox.close)

    def _refuse_if_stuck(self) -> None:
        if self.is_stuck:
            raise Failed("a call is still running")

    async def _ready(self) -> Toolbox:
        if self._toolbox is None:
            toolbox = await asyncio.to_thread(built, self._specs, self._calls)
            await toolbox.setup()
            self._toolbox = toolbox
        return self._toolbox
