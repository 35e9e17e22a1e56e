"""Work in a thread that never keeps its process alive, and lines about a wait that takes long."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

FIRST_WORD_S = 60.0

T = TypeVar("T")


class Background:
    """One thread that runs its tasks in order.

    A `ThreadPoolExecutor` would be joined at the end of the process, which then waits for a call that hangs.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue `task`; the future has its result or its exception."""
        done: Future[T] = Future()
        self._work.put((done, task))
        return done

    def close(self) -> None:
        """End the thread after the queued tasks."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            done, task = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(task())
            except BaseException as err:
                done.set_exception(err)
            del item, done, task


@contextmanager
def announced(what: str, limit: str, *, first_s: float | None = None) -> Iterator[None]:
    """Print the reason for a wait when the block has run for a minute, then after two, four, eight minutes ...

    Args:
        what: as in "waiting for `what` since 60 s".
        limit: text about the wait's limit.
    """
    done = threading.Event()

    def say() -> None:
        since, pause = 0.0, FIRST_WORD_S if first_s is None else first_s
        while not done.wait(pause):
            since, pause = since + pause, since + pause
            print(f"mgrpo: waiting for {what} since {since:g} s ({limit})", file=sys.stderr, flush=True)

    threading.Thread(target=say, name="announced", daemon=True).start()
    try:
        yield
    finally:
        done.set()
