"""Runs a call for the first time in a separate process, under limits of time and memory."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path

TRIAL_S = 20.0
TRIAL_BYTES = 512 << 20
"""Memory that a trial may take in addition to that of this process."""


def exceeded(work: Callable[[], object]) -> str | None:
    """The limit that `work` exceeds in a forked process, in words; None if it ends in time, also with an error.

    Call from the main thread, before the start of threads whose locks `work` could wait for.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os._exit(_fits(work))
    os.close(writer)
    try:
        # Nothing is ever written: the pipe's end shows that the child has ended.
        has_ended = bool(select.select([reader], [], [], TRIAL_S)[0])
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if not has_ended:
        return f"takes more than {TRIAL_S:g} s"
    return None if status == 0 else f"takes more than {TRIAL_BYTES >> 20} MiB of memory"


def _fits(work: Callable[[], object]) -> int:
    """Exit status of the child: 0 unless memory ran out."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))
        work()
    except BaseException as err:
        causes: list[BaseException | None] = [err]
        while causes[-1] is not None:
            causes.append(causes[-1].__cause__ or causes[-1].__context__)
        return int(any(isinstance(cause, MemoryError) for cause in causes))
    return 0
