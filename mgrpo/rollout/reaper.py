"""`python -m mgrpo.rollout.reaper FOLDER`: ends what a run's private Ray cluster leaves behind, then removes its folder.

Rank 0 starts it and holds the other end of its standard input, which closes when rank 0 ends, however it ends. Ray's own
daemons watch each other but take tens of seconds, and some outlive a kill -9. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 2.0
LIMIT_S = 30.0


def processes_of(folder: str) -> list[int]:
    """Processes whose command line names the cluster's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if folder.encode() in command:
            found.append(int(entry.name))
    return found


def main() -> None:
    """Wait for the end of input, then kill what is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    deadline = time.monotonic() + LIMIT_S
    time.sleep(GRACE_S)
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
