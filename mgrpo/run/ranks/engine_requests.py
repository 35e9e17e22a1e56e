"""Rank 0's server for `mgrpo engines` during a run: list, add or remove engines.

It listens on a Unix socket, whose name is in the run's folder: only processes of the same user on the same machine can connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgrpo.processes import local_socket
from mgrpo.rollout.engine import EngineError
from mgrpo.rollout.engines.roster import Roster

NAME = "engines.json"
"""File with the socket's name in the run's folder, during the run."""
QUESTION_S = 5.0


@contextmanager
def controllable(roster: Roster, output_dir: str | Path) -> Iterator[None]:
    """Serve `mgrpo engines` commands for the run in this folder within the block."""
    file = Path(output_dir) / NAME
    listener, name = local_socket.listen(backlog=4)
    with contextlib.closing(listener):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"socket": name, "host": socket.gethostname(), "pid": os.getpid()}))
        threading.Thread(target=_serve, args=(listener, roster), name="engines-command", daemon=True).start()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _serve(listener: socket.socket, roster: Roster) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # The listener is closed.
        with connection, contextlib.suppress(OSError, ValueError, RecursionError):
            if local_socket.is_own(connection):
                connection.settimeout(QUESTION_S)
                with connection.makefile("rw") as lines:
                    lines.write(json.dumps(_answer(roster, json.loads(lines.readline()))) + "\n")


def _answer(roster: Roster, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        match question:
            case {"command": "add"}:
                return {"engine": roster.add()}
            case {"command": "remove", "engine": int(number)}:
                roster.remove(number)
                return {"engine": number}
            case {"command": "list"}:
                others = [
                    {"name": other.named(row["engine"]), **row} for other in roster.beside for row in other.describe()
                ]
                return {"engines": roster.describe(), "teachers": others}
    except EngineError as err:
        return {"error": str(err)}
    return {"error": "the run does not know this command; is it of another version of mgrpo?"}
