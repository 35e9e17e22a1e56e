"""The processes of a program under any supervisor: taking their privileges, measuring their memory, ending them.

Within walls a supervisor is the first process of a PID namespace: it can kill all others at once, and when it ends the
kernel ends the rest. Without walls it adopts the processes that the program leaves behind, and kills them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mgrpo.processes.lifetime import adopt_orphans, die_with_parent, kill_descendants
from mgrpo.sandbox import linux
from mgrpo.sandbox.limits import Limits
from mgrpo.sandbox.walls import SCRATCH, become_unprivileged, enter_private_run, mount_scratch
from mgrpo.sandbox.wire import Wire

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Environment of a slot's processes."""

    has_walls: bool
    scratch: str
    """The program's folder, empty for each test: within walls its own file system, otherwise a real folder."""
    program_id: int
    """User id of programs, where this process has the privilege to change it."""
    filter: bytes | None
    """Filter of system calls."""


class Keeper:
    """A supervisor forks a program's process, which must return from every frame of this object at once."""

    def __init__(self, cell: Cell, limits: Limits, owner: Wire) -> None:
        self._cell, self._limits, self._owner = cell, limits, owner
        self._sees_processes = False
        self._socket_bytes = 0

    def _prepare(self) -> None:
        if not self._cell.has_walls:
            adopt_orphans()
        else:
            self._sees_processes = enter_private_run(self._cell.program_id)
            self._socket_bytes = socket_bytes()

    def _become_program(self, descriptors: list[int], *unused: socket.socket) -> None:
        """Keep only these descriptors, as 0, 1, ..., and no privileges, in a forked child."""
        os.setsid()
        for end in (self._owner.socket, *unused):
            end.detach()  # closed below; the object must not later close another descriptor of the same number
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(descriptors) + 10) for descriptor in descriptors]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        os.closerange(len(descriptors), os.sysconf("SC_OPEN_MAX"))
        self._limits.apply()
        become_unprivileged(self._cell.program_id)
        if not self._cell.has_walls:
            die_with_parent()
        if self._cell.filter is not None:
            linux.filter_system_calls(self._cell.filter)
        linux.set_dumpable(True)
        os.chdir(self._cell.scratch)

    def _exceeds_memory(self) -> bool:
        """True if the program's processes and full sockets together would take more memory than one process may."""
        return self._sees_processes and exceed_memory(others(), self._limits.memory_bytes, self._socket_bytes)

    def _reap(self) -> None:
        """Kill and reap the processes that the program has left behind."""
        if not self._cell.has_walls:
            reap_descendants()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _clear_scratch(self) -> None:
        scratch = self._cell.scratch
        if not self._cell.has_walls:
            remove_folder(scratch)
            os.makedirs(scratch, mode=0o700, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(scratch, self._cell.program_id, self._cell.program_id)
        elif os.listdir(SCRATCH):
            linux.unmount(SCRATCH)
            mount_scratch(self._cell.program_id)


def socket_bytes() -> int:
    """The most that one socket between processes can hold."""
    with socket.socket(socket.AF_UNIX) as one:
        # Data is accepted as long as the buffer is not full, so one message more than fits can wait.
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def others() -> list[str]:
    """Numbers of all processes of this PID namespace but the first."""
    return [entry for entry in os.listdir("/proc") if entry.isdecimal() and entry != "1"]


def exceed_memory(processes: Sequence[str], limit_bytes: int, socket_bytes: int) -> bool:
    """True if the processes take more than `limit_bytes`, with the sockets of their network namespace, each of which holds `socket_bytes`."""
    num_sockets = Path("/proc/self/net/unix").read_bytes().count(b"\n") - 1 if socket_bytes else 0
    left = limit_bytes - num_sockets * socket_bytes
    # The first sum is cheap to find, and never below the second.
    return sum(map(_resident_bytes, processes)) > left and sum(map(_used_bytes, processes)) > left


def reap_descendants() -> None:
    """Kill and reap all descendants of this process, which adopts orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_descendants(os.getpid())
            os.waitpid(-1, 0)


def remove_folder(folder: str) -> None:
    """Remove a program's folder, also if nested deeper than Python recurses or without permissions for its owner."""
    if os.path.isdir(folder):
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _resident_bytes(process: str) -> int:
    """Bytes of resident memory of the process, including shared pages."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _used_bytes(process: str) -> int:
    """Bytes of resident memory of the process outside files; of pages that several share, its part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except PermissionError:  # in a container whose root may not trace
        return _resident_bytes(process)
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
