"""A slot: it runs one program at a time, in a process inside walls that waits for the next program."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mgrpo.sandbox import wire
from mgrpo.sandbox.keeper import remove_folder
from mgrpo.sandbox.paths import inner_path, readable_paths, search_path
from mgrpo.sandbox.supervisor import Order
from mgrpo.sandbox.walls import SCRATCH
from mgrpo.sandbox.wire import Wire
from mgrpo.sandbox.zygote import SlotSetup, Walls

# User ids that are not assigned on any common system.
_PROGRAM_IDS = range(60600, 61000)
# Time beyond the limits of a run that a loaded machine may need between two frames.
_MARGIN_S = 60.0
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from mgrpo.sandbox import zygote; "
    "zygote.main(zygote.SlotSetup.read(sys.argv[2]))"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed, which implies nothing about the program."""


class LostError(SandboxError):
    """The slot's process has ended, for instance killed from outside; another slot can run the program."""


class ForbiddenError(SandboxError):
    """The kernel does not let this user set up such walls."""


class Result(NamedTuple):
    """Result of one test."""

    passed: bool
    seconds: float
    """-1 for a test that did not pass."""
    output: bytes = b""
    """What a stdio test has printed; of one that did not pass, why, as the end of a sentence about the program."""
    is_inside: bool = False
    """Whether the program's own process has decided: such a verdict can be forged."""


FAILURE = Result(passed=False, seconds=-1.0)


class Slot:
    """The owner's side of one zygote. Create it in a thread that lives as long: the kernel ends it with that thread."""

    def __init__(self, number: int, walls: Walls) -> None:
        """Starts the process; SandboxError with the reason where these walls are not available."""
        self._scratch = None
        if walls == "none":
            self._scratch = tempfile.TemporaryDirectory(prefix="mgrpo-sandbox-", ignore_cleanup_errors=True)
            os.chmod(self._scratch.name, 0o711)  # lets the program's user reach its folder
        scratch = os.path.join(self._scratch.name, "program") if self._scratch else SCRATCH
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        setup = SlotSetup(
            descriptor=theirs.fileno(),
            walls=walls,
            readable=readable_paths(),
            search_path=search_path() if walls == "none" else tuple(map(inner_path, search_path())),
            program_id=_PROGRAM_IDS[number % len(_PROGRAM_IDS)],
            scratch=scratch,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-c", _BOOT, _PACKAGE_PARENT, setup.text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env=_environment(scratch),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            ours.settimeout(_MARGIN_S)
            kind, text = self._wire.receive()
        except (EOFError, OSError) as err:
            self.close()
            raise SandboxError(
                f"a sandbox process ended before it was ready ({err}); see its message on stderr"
            ) from err
        if kind != wire.READY:
            self.close()
            raise (ForbiddenError if kind == wire.FORBIDDEN else SandboxError)(text.decode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, order: Order, program: str, tests: Sequence[str]) -> list[Result]:
        """One result per test. SandboxError when the slot's process is lost; the slot must then be closed."""
        try:
            return self._run(order, program, tests)
        except (EOFError, ConnectionError) as err:
            raise LostError(f"a sandbox process was lost: {err!r}") from err
        except OSError as err:
            raise SandboxError(f"a sandbox process does not answer: {err!r}") from err

    def kill(self) -> None:
        """End the process and all its descendants; a `run` in progress fails."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._wire.close()
        if self._scratch:
            remove_folder(self._scratch.name)
            self._scratch.cleanup()

    def _run(self, order: Order, program: str, tests: Sequence[str]) -> list[Result]:
        self._wire.socket.settimeout(order.test_limit_s + _MARGIN_S)
        self._wire.send(wire.ORDER, json.dumps(asdict(order)).encode())
        self._wire.send(wire.SOURCE, program.encode("utf-8", "surrogatepass"))
        results: list[Result] = []
        is_inside = False
        while True:
            kind, payload = self._wire.receive()
            if kind == wire.WANT:
                self._wire.send(wire.TEST, tests[len(results)].encode("utf-8", "surrogatepass"))
            elif kind == wire.INSIDE:
                is_inside = True
            elif kind in (wire.PASSED, wire.FAILED):
                results.append(Result(kind == wire.PASSED, *wire.untimed(payload), is_inside))
                is_inside = False
            elif kind == wire.BROKEN:
                raise SandboxError("a supervisor failed; see its message on stderr")
            elif kind == wire.OVER:
                break
        # Missing results: tests that were given up, or the program has killed its supervisor.
        return results + [FAILURE] * (order.num_tests - len(results))


def _environment(scratch: str) -> dict[str, str]:
    """No variable of ours. Hashes are the same in every process, so no verdict depends on the order of a set."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "HOME": scratch,
        "TMPDIR": scratch,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(threads, "1"),
    }
