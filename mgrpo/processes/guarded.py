"""A program with a guard: however it ends, all its descendants end as well. Standard library only.

`die_with_parent` ends one process. Its descendants would go on, and a process that hangs or is killed cannot end them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import NoReturn

from mgrpo.processes.lifetime import adopt_orphans, die_with_parent, kill_descendants


def go_on_guarded() -> None:
    """Go on in a child; this process stays its guard, and ends as the child ends, after all descendants.

    Call it before there are threads. The guard keeps the standard pipes open: when they end, everything has ended.
    """
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    child = os.fork()
    if child:
        _guard(child, signals)
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _guard(child: int, signals: set[signal.Signals]) -> NoReturn:
    status = None
    while status is None:
        if signal.sigwait(signals) == signal.SIGTERM:
            status = signal.SIGTERM.value
        status = _reap(child) if status is None else status
    _end_descendants()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _end_descendants() -> None:
    """Kill, adopt and reap all of them; none is left when this returns."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_descendants(os.getpid())
            os.waitpid(-1, 0)


def _reap(child: int) -> int | None:
    """Reap processes that have ended; return the child's wait status, None while it runs."""
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == child:
            return ended[1]
    return None
