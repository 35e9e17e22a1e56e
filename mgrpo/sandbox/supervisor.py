"""Runs the tests of one program, from inside its walls but with the privileges to end it.

Within walls this is the first process of a PID namespace: it can kill all others at once, and when it ends the kernel
ends the rest. Without walls it adopts the processes that the program leaves behind, and kills them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from mgrpo.processes.lifetime import adopt_orphans, ending, kill_descendants
from mgrpo.sandbox import linux, wire
from mgrpo.sandbox.limits import Limits
from mgrpo.sandbox.program import FAILED_TO_LOAD, VERDICT, Job, pass_test, put_question, receive_answer
from mgrpo.sandbox.walls import SCRATCH, become_unprivileged, enter_private_run, mount_scratch
from mgrpo.sandbox.watch import Event, Watch
from mgrpo.sandbox.wire import Wire

_PAGE = os.sysconf("SC_PAGE_SIZE")
# A top level is too slow if it times out twice in a row; once may be due to a busy machine.
_MAX_SLOW_LOADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Bounds of one program's run."""

    is_stdio: bool
    num_tests: int
    test_limit_s: float
    """Time for loading the program and running one test."""
    run_limit_s: float
    """Time for all tests together; tests that have not run by then fail."""
    output_bytes: int
    """A program that prints more fails."""
    memory_bytes: int

    @classmethod
    def read(cls, text: bytes) -> Order:
        return cls(**json.loads(text))


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


class Supervisor:
    """Runs one program. It forks a process per test; the child must return from every frame of this object at once."""

    def __init__(self, cell: Cell, order: Order, source: str, owner: Wire) -> None:
        self._cell, self._order, self._source, self._owner = cell, order, source, owner
        self._sees_processes = False
        self._socket_bytes = 0
        self._slow_loads = 0
        self._skips_the_rest = False

    def supervise(self) -> Job | None:
        """Run the tests in turn. Returns None at the end; in a forked child, the job to run."""
        self._prepare()
        ends_at = time.monotonic() + self._order.run_limit_s
        for _ in range(self._order.num_tests):
            if self._skips_the_rest or time.monotonic() > ends_at:
                self._owner.send(wire.GIVEN_UP)
                break
            self._clear_scratch()
            job = self._stdio_test() if self._order.is_stdio else self._assert_test()
            if job is not None:
                return job
            self._reap()
        return None

    def _prepare(self) -> None:
        if not self._cell.has_walls:
            adopt_orphans()
        else:
            self._sees_processes = enter_private_run(self._cell.program_id)
            with socket.socket(socket.AF_UNIX) as one:
                # Data is accepted as long as the buffer is not full, so one message more than fits can wait.
                self._socket_bytes = 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def _assert_test(self) -> Job | None:
        ours, theirs = socket.socketpair()
        token = os.urandom(16)
        pid = os.fork()
        if pid == 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            self._become_program([nothing, nothing, nothing, theirs.detach()], ours)
            return Job(source=self._source, channel=3, token=token)
        theirs.close()
        with ours, Watch(pid, self._order.test_limit_s, self._exceeds_memory) as watch:
            if watch.receive(ours, len(token)) != token:
                self._note_failed_load(watch.last)
                self._owner.send(wire.FAILED, wire.timed(-1.0))
                return None
            with watch.paused():
                self._owner.send(wire.WANT)
                kind, payload = self._owner.receive()
            if kind == wire.TEST:
                self._run_inside(ours, watch, payload)
            else:
                self._answer_questions(ours, watch, kind, payload)
        return None

    def _run_inside(self, program: socket.socket, watch: Watch, test: bytes) -> None:
        """Let the program's process run the test, and report its verdict."""
        secret = os.urandom(16)
        began = time.monotonic()
        program.settimeout(max(watch.left_s, 0.001))
        # A program that does not read its test fails it.
        with contextlib.suppress(OSError):
            pass_test(program, secret, test)
        reply = watch.receive(program, VERDICT.size)
        if len(reply) == VERDICT.size and VERDICT.unpack(reply)[0] == secret:
            # The program reports this time itself; it cannot exceed the elapsed time.
            seconds = min(max(VERDICT.unpack(reply)[1], 0.0), time.monotonic() - began)
            self._owner.send(wire.PASSED, wire.timed(seconds))
        else:
            self._owner.send(wire.FAILED, wire.timed(-1.0))

    def _answer_questions(self, program: socket.socket, watch: Watch, kind: int, payload: bytes) -> None:
        """Carry the judge's questions to the program and its answers back; at the judge, the time stands still."""
        seconds = 0.0
        while kind == wire.ASK:
            began = watch.seconds
            program.settimeout(max(watch.left_s, 0.001))
            with contextlib.suppress(OSError):
                put_question(program, payload)
            answer = receive_answer(lambda size: watch.receive(program, size))
            if answer is None:
                self._owner.send(wire.FAILED, wire.timed(-1.0))
                return
            seconds += watch.seconds - began
            with watch.paused():
                self._owner.send(wire.ANSWER, wire.timed(seconds, answer))
                kind, payload = self._owner.receive()

    def _stdio_test(self) -> Job | None:
        stdin = _file_in_memory(self._ask_for_test())
        output, stdout = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_program([stdin, stdout, os.open(os.devnull, os.O_WRONLY)])
            return Job(source=self._source, channel=None, token=b"")
        os.close(stdin)
        os.close(stdout)
        with Watch(pid, self._order.test_limit_s, self._exceeds_memory) as watch:
            printed = watch.collect(output, self._order.output_bytes)
            seconds = watch.seconds
            exit_code = watch.exit_code() if watch.last is Event.ENDED else None
        os.close(output)
        self._skips_the_rest = exit_code == FAILED_TO_LOAD
        if exit_code == 0 and printed is not None:
            self._owner.send(wire.PASSED, wire.timed(seconds, printed))
        else:
            why = ending(exit_code) if exit_code is not None else self._exceeded(watch.last)
            self._owner.send(wire.FAILED, wire.timed(-1.0, why.encode()))
        return None

    def _exceeded(self, event: Event) -> str:
        """The limit that a program has exceeded, as the end of a sentence about it."""
        if event is Event.TIMEOUT:
            return f"took more than {self._order.test_limit_s:g} s"
        if event is Event.OVER_MEMORY:
            return f"used more than {self._order.memory_bytes // 2**20} MiB of memory"
        return f"printed more than {self._order.output_bytes} bytes"

    def _ask_for_test(self) -> bytes:
        self._owner.send(wire.WANT)
        return self._owner.expect(wire.TEST)

    def _note_failed_load(self, event: Event) -> None:
        """A program that fails to load fails all its tests."""
        self._slow_loads = self._slow_loads + 1 if event is Event.TIMEOUT else 0
        self._skips_the_rest = event is not Event.TIMEOUT or self._slow_loads >= _MAX_SLOW_LOADS

    def _become_program(self, descriptors: list[int], *unused: socket.socket) -> None:
        """In a forked child: keep only these descriptors, as 0, 1, ..., and no privileges."""
        os.setsid()
        for end in (self._owner.socket, *unused):
            end.detach()  # closed below; the object must not later close another descriptor of the same number
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(descriptors) + 10) for descriptor in descriptors]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        os.closerange(len(descriptors), os.sysconf("SC_OPEN_MAX"))
        cpu_s = math.ceil(self._order.test_limit_s) + 1
        Limits(memory_bytes=self._order.memory_bytes, cpu_s=cpu_s).apply()
        become_unprivileged(self._cell.program_id)
        if self._cell.filter is not None:
            linux.filter_system_calls(self._cell.filter)
        linux.set_dumpable(True)
        os.chdir(self._cell.scratch)

    def _exceeds_memory(self) -> bool:
        """Whether the program's processes and full sockets together would take more memory than one process may."""
        if not self._sees_processes:
            return False
        num_sockets = Path("/proc/self/net/unix").read_bytes().count(b"\n") - 1
        left = self._order.memory_bytes - num_sockets * self._socket_bytes
        others = [entry for entry in os.listdir("/proc") if entry.isdecimal() and entry != "1"]
        # The first sum is cheap to find, and never below the second.
        return sum(map(_resident_bytes, others)) > left and sum(map(_used_bytes, others)) > left

    def _reap(self) -> None:
        """Kill and reap the processes that the test has left behind."""
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


def _file_in_memory(data: bytes) -> int:
    """Descriptor of an immutable file in memory, which can be read and sought."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def _resident_bytes(process: str) -> int:
    """Resident memory of the process, with what it shares."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _used_bytes(process: str) -> int:
    """Resident memory of the process that is not a file's; of what several share, its part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except PermissionError:  # in a container whose root may not trace
        return _resident_bytes(process)
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
