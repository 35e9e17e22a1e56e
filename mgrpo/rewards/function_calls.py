"""Calls of reward functions, on copies of the data and with seeded random numbers, and the reading of their results."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import os
import random
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import numpy as np

from mgrpo.processes.background import Background, announced
from mgrpo.processes.user_code import UserCodeError, definition, own_frames
from mgrpo.rewards.verifier import LARGEST

T = TypeVar("T")
RewardFunction = Callable[..., Iterable[float | None] | Awaitable[Iterable[float | None]]]


class Snapshot(SimpleNamespace):
    """The copy of an environment that reward functions are given: the attributes that it had at the end of a trajectory, those that JSON can hold."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the environment has no attribute {name} that can leave its process; there are "
            f"{', '.join(vars(self)) or 'none'}. Keep plain values in attributes without a leading underscore, or let the "
            "environment compute the reward (get_reward)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One reward function with its keyword arguments."""

    name: str
    function: RewardFunction
    arguments: Mapping[str, Any]
    seed: np.random.SeedSequence
    """Seed of the global states of `random` and `numpy.random` during the function."""


def call_all(
    calls: Sequence[FunctionCall], num_completions: int, *, timeout_s: float | None = None
) -> list[list[float]]:
    """The values of each function, NaN where it does not apply: plain functions run in turn, then the async ones together.

    Args:
        timeout_s: `reward_funcs_timeout`; one that still runs then goes on in its thread, which does not keep the process.
    Raises:
        UserCodeError: a function failed, took longer than `timeout_s`, or did not return one number for each completion.
    """
    thread = _thread_of(os.getpid())
    values = {
        call.name: _result(thread.submit(partial(_run, call, num_completions)), [call], timeout_s)
        for call in calls
        if not _is_async(call.function)
    }
    waiting = [call for call in calls if call.name not in values]
    if waiting:
        future = asyncio.run_coroutine_threadsafe(_await_all(waiting), _event_loop())
        try:
            results = _result(future, waiting, timeout_s)
        except BaseException:
            future.cancel()
            raise
        for call, returned in zip(waiting, results, strict=True):
            values[call.name] = _numbers(call, returned, num_completions)
    return [values[call.name] for call in calls]


def _result(future: Future[T], calls: Sequence[FunctionCall], timeout_s: float | None) -> T:
    """The results of the calls, or an error that names those that took too long."""
    names = "reward function " + ", ".join(call.name for call in calls)
    with announced(names, "no limit" if timeout_s is None else f"reward_funcs_timeout={timeout_s:g} s"):
        late = wait([future], timeout_s).not_done
    if late:
        _thread_of.cache_clear()  # that thread takes no more calls
        raise UserCodeError(
            f"{names} has not returned within reward_funcs_timeout={timeout_s:g} s; raise it if the work is that long",
            "\n".join(definition(innermost(call.function)) for call in calls),
        )
    return future.result()


# A forked process has none of its parent's threads.
@functools.cache
def _thread_of(pid: int) -> Background:
    """One thread for all calls of plain functions: a function's objects may belong to its thread."""
    return Background("reward-functions")


def number_of(value: Any) -> float | None:
    """The value as a float if it is a number of any kind, including numpy's and torch's scalars, else None."""
    if not isinstance(value, numbers.Number) and (not hasattr(value, "__float__") or getattr(value, "shape", ()) != ()):
        return None
    try:
        return float(value)  # complex numbers raise TypeError
    except (TypeError, ValueError, OverflowError):
        return None


def innermost(function: RewardFunction) -> RewardFunction:
    """The function inside any `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _run(call: FunctionCall, num_completions: int) -> list[float]:
    _seed_global_states(call.seed)
    try:
        returned = call.function(**_own_copies(call.arguments))
    except (Exception, SystemExit) as err:
        raise _failed(call.name, err) from err
    return _numbers(call, returned, num_completions)


async def _await_all(calls: Sequence[FunctionCall]) -> list[Any]:
    _seed_global_states(calls[0].seed)
    tasks = [asyncio.ensure_future(_await(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _await(call: FunctionCall) -> Any:
    try:
        return await call.function(**_own_copies(call.arguments))  # type: ignore[misc]  # it is async
    # Ctrl-C reaches the main thread only: here the function itself raised it.
    except (Exception, SystemExit, KeyboardInterrupt) as err:
        raise _failed(call.name, err) from err


def _seed_global_states(seed: np.random.SeedSequence) -> None:
    """Seed the process's own states, which nothing restores: code outside reward functions must not rely on them."""
    words = seed.generate_state(4)
    random.seed(words.tobytes())
    np.random.seed(words)


def _own_copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all lists and dicts: a function that sorts its completions must not move the rewards of the next one.

    Values of the data are copied as well, since they belong to the next epoch's prompt.
    """
    return {
        # Not item by item: there may be millions.
        name: [list(tokens) for tokens in value] if name == "completion_ids" else _copied(value)
        for name, value in arguments.items()
    }


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is Snapshot:
        return Snapshot(**_copied(vars(value)))
    return value


def _failed(name: str, err: BaseException) -> UserCodeError:
    return UserCodeError(
        f"reward function {name} failed: {type(err).__name__}: {err}",
        own_frames(traceback.extract_tb(err.__traceback__)),
    )


def _is_async(function: RewardFunction) -> bool:
    inner = innermost(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: an HTTP client that a function keeps belongs to the loop in which it was first used."""
    return _event_loop_of(os.getpid())


# A forked process has none of its parent's threads and needs a loop of its own. The cache keeps the parent's loop
# referenced: collecting it would close descriptors that the two processes share.
@functools.cache
def _event_loop_of(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_forever, args=(loop,), name="async-reward-functions", daemon=True).start()
    return loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        # asyncio passes these on to the awaiting task, and then also raises them here; `call_all` needs the thread alive.
        except (SystemExit, KeyboardInterrupt):
            continue


def _numbers(call: FunctionCall, returned: object, num_completions: int) -> list[float]:
    """One float per completion; NaN where the function does not apply."""

    def refused(found: str) -> UserCodeError:
        return UserCodeError(f"reward function {call.name} returned {found}", definition(innermost(call.function)))

    wanted = "return a list with one number (or None) for each"
    if isinstance(returned, (str, bytes, Mapping, Set)) or not isinstance(returned, Iterable):
        found = "None" if returned is None else f"a {type(returned).__name__}"
        raise refused(f"{found} for {num_completions} completions; {wanted}")
    try:
        values = list(returned)
    except (Exception, SystemExit) as err:  # a generator runs only here
        raise _failed(call.name, err) from err
    if len(values) != num_completions:
        raise refused(f"{len(values)} values for {num_completions} completions; {wanted}")
    results = []
    for index, value in enumerate(values):
        number = math.nan if value is None else number_of(value)
        if number is None or abs(number) > LARGEST:
            raise refused(f"{value!r:.80} for completion {index}; {wanted}, of at most {LARGEST:g} (float32)")
        results.append(number)
    return results
