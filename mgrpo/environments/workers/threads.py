"""Threads that count for whom they run: one that hangs cannot be ended, only be known."""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

OWNER: contextvars.ContextVar[int | None] = contextvars.ContextVar("OWNER", default=None)
"""The instance for which the current task works."""

# A thread is started only where none is idle; this is more than there are calls at a time.
_MOST_THREADS = 1 << 14


class OwnedThreads(ThreadPoolExecutor):
    """As a loop's default executor it counts everything that runs by `asyncio.to_thread`."""

    def __init__(self) -> None:
        super().__init__(max_workers=_MOST_THREADS, thread_name_prefix="environment")
        self._running: Counter[int | None] = Counter()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        owner = OWNER.get()
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
            if not self._running[owner]:
                del self._running[owner]
