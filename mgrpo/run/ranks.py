"""`mgrpo train --nproc-per-node N`: N ranks on this machine, without torchrun.

The ranks meet on a socket of the loopback interface. The first rank that fails decides the exit code; its own message is
all that is printed. This process imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from mgrpo.config import ConfigError
from mgrpo.processes.lifetime import ending
from mgrpo.run.environment import LAUNCHED, OPENMP, STORE_SOCKET

FLAG = "--nproc-per-node"
GRACE_S = 12.0
"""How long rank 0 may take to end after another rank has failed."""
INTERRUPT_S = 6.0
"""How long the ranks may take to end after Ctrl-C."""
POLL_S = 0.05


def num_ranks_of(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number that follows `--nproc-per-node` (None without it), and the other words.

    Raises:
        ConfigError: it is not a number of ranks, or this process is a rank itself.
    """
    words = [part for word in argv for part in (word.split("=", 1) if _is_flag(word) else (word,))]
    if not any(map(_is_flag, words)):
        return None, words
    index = next(index for index, word in enumerate(words) if _is_flag(word))
    text = words[index + 1] if index + 1 < len(words) else ""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([f"{FLAG} is the number of ranks on this machine, such as 2, got {text!r}"])
    if "RANK" in os.environ:
        raise ConfigError([f"{FLAG} starts ranks, but a launcher has started this one already; leave {FLAG} out"])
    return int(text), words[:index] + words[index + 2 :]


def _is_flag(word: str) -> bool:
    return word.split("=")[0].replace("_", "-") == FLAG


def run_ranks(num_ranks: int, argv: Sequence[str]) -> int:
    """Run `mgrpo train argv` as `num_ranks` ranks; the exit code is that of the first that fails."""
    return _Ranks(num_ranks, argv).run()


class _Ranks:
    """The ranks of this machine as processes."""

    def __init__(self, num_ranks: int, argv: Sequence[str]) -> None:
        self.signalled: int | None = None
        """The first signal that asked for the end."""
        self.deadline = float("inf")
        self.processes: list[subprocess.Popen] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as listener:
            for rank in range(num_ranks):
                self.processes.append(_start(rank, num_ranks, argv, listener))

    def run(self) -> int:
        """Wait for all; one that fails ends the others."""
        while running := [process for process in self.processes if process.poll() is None]:
            if any(process.returncode for process in self.processes):
                # Only rank 0 has something to clean up.
                self._end_within(GRACE_S if self.processes[0] in running else 0.0)
            if time.monotonic() > self.deadline:
                for process in running:
                    process.kill()
            time.sleep(POLL_S)
        codes = [process.returncode for process in self.processes]
        if self.signalled == signal.SIGINT:
            return 128 + signal.SIGINT
        if said := [code for code in codes if code > 0]:
            return said[0]
        for rank, code in enumerate(codes):
            if code < 0:  # and nobody is left to say so
                sys.stderr.write(f"mgrpo: rank {rank} (process {self.processes[rank].pid}) {ending(code)}\n")
                return 128 - code
        return 0

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C ends the ranks in seconds; SIGTERM lets rank 0 save its state, and a second one does not."""
        if self.signalled is not None or number == signal.SIGINT:
            self._end_within(INTERRUPT_S)
        self.signalled = self.signalled or number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def _start(rank: int, num_ranks: int, argv: Sequence[str], listener: socket.socket) -> subprocess.Popen:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": listener.getsockname()[1],
        LAUNCHED: 1,
        **({STORE_SOCKET: listener.fileno()} if rank == 0 else {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mgrpo.cli", "train", *argv],
        env={**OPENMP, **os.environ, **{name: str(value) for name, value in own.items()}},
        pass_fds=[listener.fileno()] if rank == 0 else [],
        # Ctrl-C reaches this process only, which passes it on once.
        start_new_session=True,
    )
