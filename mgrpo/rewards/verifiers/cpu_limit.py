"""A limit of processor time for one piece of work in this thread's process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

# Seconds between further signals, for code that swallows the first exception.
_AGAIN_S = 0.1


class OutOfTime(BaseException):
    """The work took too long; not an `Exception`, since sympy and math-verify go on after those."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` once this process has computed for so long; waiting for a busy machine does not count.

    For the main thread only, where Python handles signals. A single operation in C is not interrupted.
    """
    previous = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _raise(number: int, frame: object) -> None:
    raise OutOfTime
