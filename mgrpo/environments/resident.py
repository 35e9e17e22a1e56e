"""An environment in its worker process: one question at a time, under limits of time and length."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.catalog import Description, Spec, Toolbox, built
from mgrpo.environments.environment import Call, Observation
from mgrpo.environments.limits import Limits
from mgrpo.environments.threads import OwnedThreads, called
from mgrpo.processes.json_lines import Message

_CANCEL_S = 1.0
"""For which a coroutine may go on after it was cancelled."""
_MAX_SNAPSHOT_BYTES = 1 << 22
_MAX_ERROR_CHARS = 1000


class Failed(Exception):
    """The environment did not answer; the text says why."""


class Late(Failed):
    """There was no answer in time."""


class Resident:
    """One environment. What of it cannot be ended, `is_stuck` tells."""

    def __init__(self, number: int, specs: Sequence[Spec], limits: Limits, threads: OwnedThreads) -> None:
        self._number, self._specs, self._limits, self._threads = number, specs, limits, threads
        self._toolbox: Toolbox | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call goes on: a thread, or a coroutine that ignores being cancelled."""
        return (self._task is not None and not self._task.done()) or self._threads.is_busy(self._number)

    async def description(self, limit_s: float) -> Description:
        """What it offers, of a new environment.

        Raises:
            Failed: it cannot be built or set up.
        """
        return (await self._within(limit_s, self._ready())).describe()

    async def reset(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Message:
        async def begin() -> Message:
            toolbox = await self._ready()
            toolbox.trajectory = trajectory
            opening = await self._called(toolbox.reset, row, seed=seed)
            text = "" if opening is None else shortened(opening.text, self._limits.output_bytes)
            return {"opening": text, "active": sorted(toolbox.active), "acts": toolbox.acts}

        return await self._within(self._limits.reset_timeout_s, begin())

    async def step(self, calls: Sequence[Call]) -> Message:
        """The answers of one turn; a failed one for each call if there are none."""
        began, is_late = time.monotonic(), False
        limit_s = self._limits.tool_timeout_s * len(calls)
        try:
            if self.is_stuck:
                raise Failed("an earlier call is still running")
            observations = await self._within(limit_s, self._observed(calls))
        except Failed as err:
            is_late = isinstance(err, Late)
            observations = [failure(str(err))] * len(calls)
        seconds = (time.monotonic() - began) / max(1, len(calls))
        answers = [dataclasses.asdict(observation) for observation in observations]
        return {"observations": answers, "seconds": seconds, "timed_out": is_late}

    async def ending(self) -> Message:
        async def ask() -> Message:
            assert self._toolbox is not None
            reward = await self._called(self._toolbox.reward)
            snapshot = await self._called(self._toolbox.snapshot)
            if len(json.dumps(snapshot)) > _MAX_SNAPSHOT_BYTES:
                raise ValueError(
                    f"its public attributes take more than {_MAX_SNAPSHOT_BYTES >> 20} MiB as JSON; "
                    "begin the names of those that no reward function needs with _"
                )
            return {"reward": None if reward is None else finite(reward), "snapshot": snapshot}

        if self.is_stuck:
            raise Failed("a call is still running")
        return await self._within(self._limits.reset_timeout_s, ask())

    async def close(self, limit_s: float) -> None:
        """Cancel what goes on, and close the environment unless that goes on nevertheless.

        Raises:
            Failed: it could not be closed.
        """
        if self._task is not None and not self._task.done():
            await self._cancel(self._task)
        if self._toolbox is not None and not self.is_stuck:
            await self._within(limit_s, self._called(self._toolbox.close))

    async def _ready(self) -> Toolbox:
        if self._toolbox is None:
            toolbox = await self._called(built, self._specs)
            await self._called(toolbox.setup)
            self._toolbox = toolbox
        return self._toolbox

    async def _observed(self, calls: Sequence[Call]) -> list[Observation]:
        assert self._toolbox is not None
        observations = await self._called(self._toolbox.step, calls)
        if not isinstance(observations, Sequence) or len(observations) != len(calls):
            raise TypeError(f"the environment answered {observations!r:.100}; expected were {len(calls)} observations")
        return [self._checked(observation) for observation in observations]

    def _checked(self, observation: Any) -> Observation:
        if not isinstance(observation, Observation):
            raise TypeError(f"the environment answered {observation!r:.100}, which is not an Observation")
        return Observation(
            text=shortened(observation.text, self._limits.output_bytes),
            reward=finite(observation.reward),
            done=bool(observation.done),
            failed=bool(observation.failed),
            metrics={str(name): float(value) for name, value in observation.metrics.items()},
        )

    async def _called(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await called(self._threads, method, *args, **kwargs)

    async def _within(self, limit_s: float, work: Awaitable[Any]) -> Any:
        """The result of `work`; after `limit_s` it is cancelled, or `is_stuck`.

        Raises:
            Failed: it raised anything.
        """
        self._task = task = asyncio.create_task(_outcome(work))
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            await self._cancel(task)
            raise Late(f"no answer within {limit_s:g} s")
        result, err = task.result()
        if err is not None:
            raise Failed(said(err)) from err
        return result

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)


async def _outcome(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The result, or what was raised: whatever that is, it must not end the worker's loop."""
    try:
        return await work, None
    except BaseException as err:
        return None, err


def failure(text: str) -> Observation:
    """What the model is told of a call that has no answer."""
    return Observation(text=json.dumps({"error": text}, ensure_ascii=False), failed=True)


def said(err: BaseException) -> str:
    """An exception in a few words, whatever its own methods do."""
    try:
        text = str(err)
    except Exception:
        text = "its text cannot be read"
    return f"{type(err).__name__}: {text.encode(errors='replace').decode()[:_MAX_ERROR_CHARS]}"


def finite(value: Any) -> float:
    """A reward as a number.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the environment gave the reward {number}")
    return number


def shortened(text: Any, limit: int) -> str:
    """A text of at most about `limit` bytes: a longer one loses its middle. Lone surrogates become question marks."""
    data = str(text).encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    head, tail = data[: limit // 2], data[len(data) - limit // 2 :]
    cut = len(data) - len(head) - len(tail)
    return f"{head.decode(errors='ignore')}\n... {cut} bytes left out ...\n{tail.decode(errors='ignore')}"
