"""A limit of processor time for one piece of work of the main thread."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Iterator

# Seconds between further signals, for code that swallows the first exception.
_AGAIN_S = 0.1


class OutOfTime(BaseException):
    """The work took too long; not an `Exception`, since sympy and math-verify go on after those."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` once the work has computed for `seconds`.

    Only its own processor time counts: no wait on a busy machine, no other thread, and no garbage collection, which takes
    a second in a process with millions of objects and waits until the work has ended.

    For the main thread only, where Python handles signals. A single operation in C is not interrupted.
    """
    end_s = time.thread_time() + seconds

    def check(number: int, frame: object) -> None:
        if time.thread_time() >= end_s:
            raise OutOfTime

    collects = gc.isenabled()
    previous = signal.signal(signal.SIGVTALRM, check)
    gc.disable()
    # Counts all threads, so that it is never late.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        # Twice, since a signal may arrive on the way out.
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
        if collects:
            gc.enable()
