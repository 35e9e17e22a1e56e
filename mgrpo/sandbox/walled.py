"""The owner's side of a process inside walls: it starts the process, receives the state of its walls, and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from mgrpo.sandbox import wire
from mgrpo.sandbox.paths import inner_path, readable_paths, search_path
from mgrpo.sandbox.supervision import remove_folder
from mgrpo.sandbox.walls import SCRATCH
from mgrpo.sandbox.wire import Wire
from mgrpo.sandbox.zygote import Setup, Walls

PROGRAM_IDS = range(60600, 61000)
"""User ids that are not assigned on any common system."""
MARGIN_S = 60.0
"""Time beyond the limits of a run that a loaded machine may need between two frames."""
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from mgrpo.sandbox import zygote; "
    "zygote.main(zygote.Setup.read(sys.argv[2]))"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed, which implies nothing about the program."""


class LostError(SandboxError):
    """The process has ended, for instance killed from outside; another one can run the program."""


class ForbiddenError(SandboxError):
    """The kernel does not let this user set up such walls."""


class Walled:
    """One zygote. Create it in a thread that lives as long: the kernel ends it with that thread."""

    def __init__(self, walls: Walls, *, program_ids: range, serves_kernels: bool) -> None:
        """Starts the process; SandboxError with the reason where these walls are not available."""
        self._scratch = None
        if walls == "none":
            self._scratch = tempfile.TemporaryDirectory(prefix="mgrpo-sandbox-", ignore_cleanup_errors=True)
            os.chmod(self._scratch.name, 0o711)  # lets the program's user reach its folder
        scratch = os.path.join(self._scratch.name, "program") if self._scratch else SCRATCH
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours)
        setup = Setup(
            descriptor=theirs.fileno(),
            walls=walls,
            readable=readable_paths(),
            search_path=search_path() if walls == "none" else tuple(map(inner_path, search_path())),
            first_program_id=program_ids.start,
            num_program_ids=len(program_ids),
            scratch=scratch,
            serves_kernels=serves_kernels,
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
            ours.settimeout(MARGIN_S)
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

    def kill(self) -> None:
        """End the process and all its descendants."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._wire.close()
        if self._scratch:
            remove_folder(self._scratch.name)
            self._scratch.cleanup()


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
