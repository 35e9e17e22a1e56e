"""No process outlives the one that started it. Standard library only; Linux does the watching."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send `signal_number` to this process when its parent dies.

    The kernel watches the thread that forked this process: call it only where that thread lives as long as its process.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal_number)


def adopt_orphans() -> None:
    """Have the kernel give this process every descendant whose own parent ends, also one that left its session."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Processes that `pid` has started or adopted; none where it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def kill_descendants(pid: int, *, rounds: int = 100) -> int:
    """Kill all that descends from `pid`, which adopts orphans or is stopped; returns how many.

    Whoever is met is stopped first, so that one that forks without end cannot stay ahead.
    """
    killed: set[int] = set()
    for _ in range(rounds):
        met = [pid]
        for parent in met:
            for child in children(parent):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGSTOP)
                met.append(child)
        for child in met[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if not set(met[1:]) - killed:
            break
        killed.update(met[1:])
    return len(killed)
