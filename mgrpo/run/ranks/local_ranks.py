"""`mgrpo train --nproc-per-node N`: N ranks on this machine, without torchrun.

They meet on a socket of the loopback interface. The failed rank's own message is all that is printed, and the exit code is the
lowest failed rank's. This process imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from mgrpo.config import ConfigError
from mgrpo.processes.lifetime import ending
from mgrpo.run.ranks.process import LAUNCHED, OPENMP, STORE_SOCKET

FLAG = "--nproc-per-node"
GRACE_S = 12.0
"""Seconds for rank 0 to end after another rank has failed."""
INTERRUPT_S = 6.0
"""Seconds for the ranks to end after Ctrl-C."""
POLL_S = 0.05


def num_ranks_of(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The value of `--nproc-per-node` (None without it), and the other words.

    Raises:
        ConfigError: the value is not a number of ranks, or this process is a rank itself.
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
    """Run `mgrpo train argv` as `num_ranks` ranks; returns the exit code, see `Ranks.poll`."""
    ranks = Ranks()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ranks.pass_on(number))
    with socket.create_server(("127.0.0.1", 0), backlog=num_ranks) as listener:
        ranks.start(range(num_ranks), argv, world_size=num_ranks, meeting=listener.getsockname(), listener=listener)
    while (code := ranks.poll()) is None:
        time.sleep(POLL_S)
    return code


class Ranks:
    """The ranks of this machine as processes."""

    def __init__(self) -> None:
        self.signalled: int | None = None
        """The first signal to end the run."""
        self.deadline = float("inf")
        self.processes: list[subprocess.Popen] = []
        self.numbers = range(0)
        self.code: int | None = None

    def start(
        self,
        numbers: range,
        argv: Sequence[str],
        *,
        world_size: int,
        meeting: tuple[str, int],
        listener: socket.socket | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks with these numbers.

        Args:
            world_size: ranks on all machines.
            meeting: host and port of rank 0's store.
            listener: the socket of that address, which rank 0 inherits.
            environment: further variables of this machine's ranks.
        """
        self.numbers = numbers
        for rank in numbers:
            own = {
                **OPENMP,
                **os.environ,
                **(environment or {}),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - numbers.start),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(len(numbers)),
                "MASTER_ADDR": meeting[0],
                "MASTER_PORT": str(meeting[1]),
                LAUNCHED: "1",
            }
            self.processes.append(_start(argv, own, listener if rank == 0 else None))

    def poll(self) -> int | None:
        """Exit code once all ranks have ended, else None. A failed rank ends the others.

        The code is 130 after Ctrl-C, else the first positive one in the order of ranks, else 128 + number of the first rank's signal.
        """
        running = [process for process in self.processes if process.poll() is None]
        if not running:
            if self.code is None:
                self.code = self._exit_code()
            return self.code
        if any(process.returncode for process in self.processes):
            # Only rank 0 has something to clean up.
            self.end_within(GRACE_S if 0 in self.numbers and self.processes[0] in running else 0.0)
        if time.monotonic() > self.deadline:
            for process in running:
                process.kill()
        return None

    def end_within(self, seconds: float) -> None:
        """Kill the ranks that still run in `seconds` from now."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def kill(self) -> None:
        """Kill all ranks now, without a report."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []

    def pass_on(self, number: int) -> None:
        """Forward a signal: Ctrl-C ends the ranks in `INTERRUPT_S`; SIGTERM lets rank 0 save its state, a second one does not."""
        if self.signalled is not None or number == signal.SIGINT:
            self.end_within(INTERRUPT_S)
        self.signalled = self.signalled or number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _exit_code(self) -> int:
        codes = [process.returncode for process in self.processes]
        if self.signalled == signal.SIGINT:
            return 128 + signal.SIGINT
        if said := [code for code in codes if code > 0]:
            return said[0]
        for rank, process in zip(self.numbers, self.processes, strict=True):
            if process.returncode < 0:  # it could not report that itself
                sys.stderr.write(f"mgrpo: rank {rank} (process {process.pid}) {ending(process.returncode)}\n")
                return 128 - process.returncode
        return 0


def _start(argv: Sequence[str], environment: dict[str, str], listener: socket.socket | None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "mgrpo.cli", "train", *argv],
        env=environment if listener is None else {**environment, STORE_SOCKET: str(listener.fileno())},
        pass_fds=[] if listener is None else [listener.fileno()],
        # Ctrl-C reaches this process only, which passes it on once.
        start_new_session=True,
    )
