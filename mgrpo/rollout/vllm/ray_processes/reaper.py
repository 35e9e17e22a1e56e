"""`python -m mgrpo.rollout.vllm.ray_processes.reaper FOLDER`: ends all processes that a run's private Ray cluster leaves, then removes its folder.

Rank 0 starts it and holds the other end of its standard input, which closes when rank 0 ends in any way. Ray's daemons
watch each other but take tens of seconds, and some survive a kill -9. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "MGRPO_CLUSTER"
"""Variable with the cluster's folder in the environment of its processes, which their children inherit."""
GRACE_S = 2.0
LIMIT_S = 30.0


def processes_of(folder: str) -> list[int]:
    """Processes that were started with the folder's mark, or write into the folder; mere readers do not count.

    Ray's agents rename themselves, which overwrites their environment, but they have a log open. Excludes this process and its
    parent: after a clean end rank 0 may continue, with a log still open.
    """
    mark, spared = f"\0{MARK}={folder}\0".encode(), {os.getpid(), os.getppid()}
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) not in spared
        if mark in b"\0" + _environment(entry) + b"\0" or _writes_into(entry, f"{folder}/")
    ]


def end_engine(pid: int) -> None:
    """Kill an engine's actor on this machine `GRACE_S` seconds after Ray's request to end, unless it has ended.

    Ray reports and prints the death of an actor as a failure if it comes before its own request.
    """
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(OSError):
        while b"EngineActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)


def _writes_into(process: Path, folder: str) -> bool:
    try:
        opened = [link.name for link in (process / "fd").iterdir() if os.readlink(link).startswith(folder)]
        return any(_is_writable((process / "fdinfo" / number).read_text()) for number in opened)
    except OSError:
        return False  # it ended while we looked, or is not ours


def _is_writable(fdinfo: str) -> bool:
    flags = next(line.split()[1] for line in fdinfo.splitlines() if line.startswith("flags:"))
    return bool(int(flags, 8) & os.O_ACCMODE)


def _environment(process: Path) -> bytes:
    """Environment at the start of a process."""
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""  # it ended while we looked, or is not ours


def main() -> None:
    """Wait for the end of input, then kill the remaining processes and remove the folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    deadline = time.monotonic() + LIMIT_S
    grace = time.monotonic() + GRACE_S
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left if time.monotonic() > grace else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
