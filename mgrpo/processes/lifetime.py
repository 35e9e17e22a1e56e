"""No process outlives the one that started it. Standard library only; the Linux kernel enforces it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel send `signal_number` to this process when its parent dies.

    The kernel watches the thread that forked this process: call it only where that thread lives as long as its process.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal_number)


# Not by a folder on PYTHONPATH: packages beside this one may be for another interpreter, and would hide the user's
# modules of the same names.
_ALONE = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("mgrpo", sys.argv[1] + "/__init__.py")
sys.modules["mgrpo"] = importlib.util.module_from_spec(spec)
sys.path += sys.argv[3:]
spec.loader.exec_module(sys.modules["mgrpo"])
runpy.run_module(sys.argv[2], run_name="__main__")
"""


def start_program(
    module: str,
    *,
    environment: Mapping[str, str],
    settings: Mapping[str, str],
    folders: Sequence[str] = (),
    python: str | None = None,
) -> subprocess.Popen:
    """Start a module of this package as a program, with unbuffered pipes to its standard input and output.

    Args:
        environment: the variables that the program may see; `settings` override them, and OpenMP gets one thread.
        folders: further folders in which it finds modules.
        python: an interpreter with other packages, for which PYTHONPATH is not set from this process's; None: this one.
    """
    package = Path(__file__).resolve().parents[1]
    # Processes that multiprocessing spawns get sys.path, and may need this package where it is not installed.
    last = [str(package.parent)] if python is None else []
    users = os.environ.get("PYTHONPATH") if python is None else None
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, [users, *folders])),
        # A file math.py or json.py in the working directory is not the standard library's (Python 3.11).
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [python or sys.executable, "-c", _ALONE, str(package), module, *last],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**environment, **own, **settings},
        # Ctrl-C reaches only the run, which ends its programs; and killing the session reaches their children.
        start_new_session=True,
    )


def ending(exit_code: int) -> str:
    """The words with which a sentence about the end of a process ends."""
    return f"died of {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def adopt_orphans() -> None:
    """Make the kernel reparent to this process every descendant whose own parent ends, including those that left its session."""
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
    """Kill all descendants of `pid`, which adopts orphans or is stopped; returns their number."""
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
