"""Threads for plain methods, which count for whom they run: a thread that hangs cannot be ended, only be known."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

OWNER: contextvars.ContextVar[int] = contextvars.ContextVar("OWNER")
"""For whom the current task works."""

# A thread is started only where none is idle: as many as there are calls at a time.
_MOST_THREADS = 1 << 14


class OwnedThreads(ThreadPoolExecutor):
    """As a loop's default executor it also counts what environments run by `asyncio.to_thread`."""

    def __init__(self) -> None:
        super().__init__(max_workers=_MOST_THREADS, thread_name_prefix="environment")
        self._running: Counter[int | None] = Counter()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        owner = OWNER.get(None)
        self._count(owner, 1)
        future = super().submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: self._count(owner, -1))
        return future

    def is_busy(self, owner: int) -> bool:
        """Whether a thread runs for `owner`."""
        with self._lock:
            return self._running[owner] > 0

    def _count(self, owner: int | None, change: int) -> None:
        with self._lock:
            self._running[owner] += change


async def called(threads: OwnedThreads, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a method: of a coroutine in the loop, of any other in a thread, which may return an awaitable."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    context = contextvars.copy_context()
    future = threads.submit(context.run, _outcome, method, args, kwargs)
    result, err = await asyncio.wrap_future(future)
    if err is not None:
        raise err
    return await result if inspect.isawaitable(result) else result


def _outcome(method: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """The result, or what was raised: a future cannot hold a StopIteration."""
    try:
        return method(*args, **kwargs), None
    except BaseException as err:
        return None, err
