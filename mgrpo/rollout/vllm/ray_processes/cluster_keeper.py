"""Environment of a private Ray cluster: its folder, the reaper that removes it, and the monitoring of Ray's daemons."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mgrpo.processes.lifetime import ending
from mgrpo.rollout.vllm.printed import last_error, tail
from mgrpo.rollout.vllm.ray_processes.reaper import LIMIT_S, MARK, processes_of

DAEMONS = ("raylet", "gcs_server", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes without which Ray cannot continue; unmonitored, their end would appear as failures of engines, after minutes."""
COMM_CHARACTERS = 15
"""Length to which the kernel truncates a process's name."""
POLL_S = 0.5
STOPPED_S = 30.0
"""Seconds after which a stopped (SIGSTOP) daemon counts as failed."""


class ClusterKeeper:
    """Folder, reaper and monitoring of one cluster. Always `close` it."""

    def __init__(self) -> None:
        # Ray opens its own folder to all users, so it lies inside one that only rank 0's user can enter. Paths of Unix sockets are
        # short, so this one must also be short.
        self.folder = tempfile.mkdtemp(prefix="mgrpo-", dir="/tmp")
        self.ray_folder = f"{self.folder}/ray"
        self.scratch = f"{self.folder}/tmp"
        """TMPDIR of the cluster's processes, whose sockets would otherwise stay in /tmp when they are killed."""
        os.mkdir(self.scratch, 0o700)
        self.mark = {MARK: self.folder}
        """Environment that marks the cluster's processes for the reaper."""
        self.daemons: dict[int, str] = {}
        """Names of the monitored daemons, by process id."""
        self._stopped: dict[int, float] = {}
        self._closed = threading.Event()
        self._reaper = self._start_reaper()
        self._thread: threading.Thread | None = None

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Begin to monitor the daemons that run now, and the reaper, which is replaced if it dies.

        Args:
            on_failure: called at most once, from a thread, with the reason.
        """
        for pid in processes_of(self.folder):
            name = _read(f"/proc/{pid}/comm").strip()
            for daemon in DAEMONS:
                if name == daemon[:COMM_CHARACTERS]:
                    self.daemons[pid] = daemon.removeprefix("ray::")
        self._thread = threading.Thread(target=self._watch, args=(on_failure,), name="ray-watch", daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        """Reason why Ray itself cannot continue; None: it can."""
        for pid, name in self.daemons.items():
            state = _read(f"/proc/{pid}/stat").rpartition(") ")[2][:1]
            if state in ("", "Z"):
                return f"Ray's {name} (process {pid}) {_how(pid)}"
            if state != "T":
                self._stopped.pop(pid, None)
            elif time.monotonic() - self._stopped.setdefault(pid, time.monotonic()) > STOPPED_S:
                return f"Ray's {name} (process {pid}) has been stopped for {STOPPED_S:g} s; continue it with kill -CONT"
        return None

    @property
    def processes(self) -> set[int]:
        """The reaper and the monitored daemons."""
        return {self._reaper.pid, *self.daemons}

    def keep_logs(self, kept: Path) -> str:
        """Copy the last output of Ray's processes from Ray's folder to `kept`; returns the clause of `last_error`."""
        logs = Path(self.ray_folder).glob("session_latest/logs/worker-*.*")
        for log in sorted(logs, key=lambda log: log.lstat().st_mtime):
            text = tail(log)
            # Ray's own lines begin with a colon.
            if any(line and not line.startswith(b":") for line in text.splitlines()):
                kept.mkdir(parents=True, exist_ok=True)
                (kept / log.name).write_bytes(text)
        return last_error(kept)

    def close(self) -> None:
        """Make the reaper end the remaining processes and remove the folder."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * POLL_S + 1)
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()

    def wait(self) -> None:
        """After `close`: wait until all processes have ended and the folder is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(2 * LIMIT_S)

    def _start_reaper(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "mgrpo.rollout.vllm.ray_processes.reaper", self.folder]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def _watch(self, on_failure: Callable[[str], None]) -> None:
        is_told = False
        while not self._closed.wait(POLL_S):
            if self._reaper.poll() is not None:
                self._reaper = self._start_reaper()
            if not is_told and (failure := self.failure()) is not None and not self._closed.is_set():
                is_told = True
                on_failure(failure)


def _how(pid: int) -> str:
    """The end of a child of this process in words; its status stays available to Ray."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        status = None
    if status is None:
        return "has ended"
    return ending(status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
