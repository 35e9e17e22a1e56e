"""`python -m mgrpo.rollout.vllm.reaper FOLDER`: ends what a run's private Ray cluster leaves behind, then removes its folder.

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
from collections.abc import Container
from pathlib import Path

GRACE_S = 2.0
LIMIT_S = 30.0


def processes_of(folder: str, spared: Container[int] = ()) -> list[int]:
    """Processes that name the cluster's folder in their command line or hold a file in it open (Ray renames its agents)."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) not in spared and _belongs(entry, folder)
    ]


def _belongs(process: Path, folder: str) -> bool:
    try:
        if folder.encode() in (process / "cmdline").read_bytes():
            return True
        return any(os.readlink(link).startswith(folder) for link in (process / "fd").iterdir())
    except OSError:
        return False  # it ended while we looked, or is not ours


def main() -> None:
    """Wait for the end of input, then kill what is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = sys.argv[1]
    # After a clean end the parent goes on, perhaps with a log of the cluster still open.
    spared = {os.getpid(), os.getppid()}
    sys.stdin.buffer.read()
    deadline = time.monotonic() + LIMIT_S
    time.sleep(GRACE_S)
    while (left := processes_of(folder, spared)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
