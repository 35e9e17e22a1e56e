"""Log files of the engines in the run's folder, and the last error in them.

Engines print nothing to the terminal of the run; vLLM's lines about its start are in the files.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
from datetime import datetime
from pathlib import Path

FOLDER = "engine_logs"
"""Name of the log folder in the run's folder."""
START = "mgrpo: engine started: "
"""Prefix of the line that each start of an engine writes to its file."""
MOST_BYTES = 4 << 20
"""Bytes that are read from the end of a file."""
ERROR = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b: .+")


def print_into(file: Path) -> None:
    """Append the output of this process and its children to `file` from here on.

    No-op on a machine without the file's folder, which does not share the run's folder.
    """
    if not file.parent.is_dir():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    print(f"{START}process {os.getpid()} on {socket.gethostname()}, {datetime.now():%Y-%m-%d %H:%M:%S}", flush=True)


def last_error(folder: Path) -> str:
    """Clause for messages: the last error in the logs since the engines' last starts, and the folder; "" without files."""
    files = sorted((file for file in folder.glob("*") if file.is_file()), key=lambda file: file.stat().st_mtime)
    if not files:
        return ""
    errors = []
    for file in files:
        text = tail(file).decode(errors="replace").rpartition(START)[2]
        # An EngineDeadError only follows from another error.
        errors += [line for line in ERROR.findall(text) if "EngineDeadError" not in line]
    last = f"; the last error of the engines' logs: {errors[-1][:500]}" if errors else ""
    return f"{last}; what the engines printed is in {folder}"


def tail(file: Path) -> bytes:
    """The end of a regular file; empty for anything else, such as a link."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(opened, "rb") as stream:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            return b""
        stream.seek(max(0, found.st_size - MOST_BYTES))
        return stream.read(MOST_BYTES)
