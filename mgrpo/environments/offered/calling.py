"""Calls of a user's methods, plain or async, from an asyncio loop that must not stand still, and their limits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mgrpo.environments.environment import LARGEST, fits_float32

_CANCEL_S = 1.0
"""The time in which a cancelled coroutine has to end."""
_MAX_ERROR_CHARS = 1000


class Failed(Exception):
    """The environment did not answer; the text is the reason."""


class Late(Failed):
    """The environment did not answer in time."""


class NumberRefused(Failed):
    """A reward or a metric is no number that float32 holds: the trajectory has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of everything that an environment does, in seconds and bytes."""

    tool_timeout_s: float = 30.0
    """Longest time of one call; a turn of several may take the sum of theirs."""
    reset_timeout_s: float = 60.0
    """Longest time of set-up and reset, and of the reward at the end."""
    acquire_timeout_s: float = 60.0
    """Longest wait for an environment, counted anew whenever any trajectory is given one. Time in which no environment is asked
    anything counts a tenth: the model is sampled or trained then, and its trajectories keep the environments that they need."""
    grace_s: float = 30.0
    """Seconds that a worker's other trajectories may continue when a call in it hangs and cannot be cancelled."""
    idle_s: float = 300.0
    """An environment that serves no trajectory for so long is closed; longer than most training phases, as set-up is costly."""
    output_bytes: int = 1 << 16
    """Most bytes of an observation's text in UTF-8; the middle of a longer one is cut."""


class TimedCalls:
    """Calls of one environment's code, each under a time limit. `is_stuck` is true while one cannot be ended."""

    def __init__(self, limits: WorkerLimits | None = None, *, is_in_thread: Callable[[], bool] = lambda: False) -> None:
        """`is_in_thread`: true while a thread works for the environment."""
        self.limits = limits or WorkerLimits()
        self._is_in_thread = is_in_thread
        self._tasks: set[asyncio.Task[Any]] = set()
        self._was_cut = False

    @property
    def is_stuck(self) -> bool:
        """True while a call that was cut off continues: a thread, or a coroutine that ignores its cancellation."""
        return self._was_cut and (bool(self._tasks) or self._is_in_thread())

    async def within(self, limit_s: float, method: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a method; after `limit_s` it is cancelled, or `is_stuck`.

        Raises:
            Late: it takes longer.
            Failed: it raised something that must not travel through the loop, such as a KeyboardInterrupt.
            Exception, SystemExit: anything else that it raised.
        """
        task = asyncio.create_task(outcome(method, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            await self._cancel({task})
            raise Late(f"no answer within {limit_s:g} s")
        result, err = task.result()
        if err is None:
            return result
        raise err if isinstance(err, Exception | SystemExit) else Failed(said(err)) from err

    async def cancel(self) -> None:
        """Cancel the running calls."""
        await self._cancel(self._tasks)

    async def _cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            self._was_cut = True
            await asyncio.wait(tasks, timeout=_CANCEL_S)


async def called(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """A method's result. Coroutines run in the loop, other methods in a thread; these may return an awaitable.

    Raises:
        Failed: it raised something that as a task's exception would end the loop, such as a SystemExit.
        Exception, CancelledError: anything else that it raised.
    """
    result, err = await outcome(method, *arguments, **named)
    if err is not None:
        raise err if isinstance(err, Exception | asyncio.CancelledError) else Failed(said(err)) from err
    return result


async def outcome(method: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, BaseException | None]:
    """Like `called`, with any exception returned: as a task's exception it could end the loop."""
    try:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments, **named), None
        result, err = await asyncio.to_thread(_plain_outcome, method, arguments, named)
        return await result if err is None and inspect.isawaitable(result) else result, err
    except BaseException as err:
        return None, err


def _plain_outcome(method: Callable[..., Any], arguments: Any, named: Any) -> tuple[Any, BaseException | None]:
    """Like `outcome` for a plain method, in a thread: no asyncio future can hold a StopIteration."""
    try:
        return method(*arguments, **named), None
    except BaseException as err:
        return None, err


def said(err: BaseException) -> str:
    """An exception as a short text, whatever its own methods do."""
    text = written(err)[:_MAX_ERROR_CHARS]
    # The toolbox names the entry itself.
    return text if type(err) is ValueError else f"{type(err).__name__}: {text}"


def written(value: object, write: Callable[[Any], str] = str) -> str:
    """A value of the user's code as text, by `str` or `repr`, whatever its own methods do."""
    try:
        return write(value).encode(errors="replace").decode()
    # They may raise a KeyboardInterrupt, or return no text.
    except BaseException:
        return f"a {type(value).__name__} that cannot be written"


def number(value: Any, name: str) -> float:
    """A reward or a metric as the user's code has given it.

    Args:
        name: its name in an error.
    Raises:
        NumberRefused: it is no number, or float32 does not hold it.
    """
    found = math.nan
    if not isinstance(value, str | bytes | bytearray):
        # A number of another library, whose methods may raise anything.
        with contextlib.suppress(BaseException):
            found = float(value)
    if not fits_float32(found):
        raise NumberRefused(f"{name} is {written(value, repr):.80}, expected a number of at most {LARGEST:g} (float32)")
    return found
