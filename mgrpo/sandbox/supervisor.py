"""Runs the tests of one program, from inside its walls but with the privileges to end it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import time
from dataclasses import dataclass

from mgrpo.processes.lifetime import ending
from mgrpo.sandbox import wire
from mgrpo.sandbox.child import ChildWatch, Event
from mgrpo.sandbox.limits import Limits
from mgrpo.sandbox.supervision import Cell, Keeper
from mgrpo.sandbox.untrusted_program import FAILED_TO_LOAD, VERDICT, Job, pass_test, put_question, receive_answer
from mgrpo.sandbox.wire import Wire

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


class Supervisor(Keeper):
    """Runs one program. It forks a process per test; the child must return from every frame of this object at once."""

    def __init__(self, cell: Cell, order: Order, source: str, owner: Wire) -> None:
        cpu_s = math.ceil(order.test_limit_s) + 1
        super().__init__(cell, Limits(memory_bytes=order.memory_bytes, cpu_s=cpu_s), owner)
        self._order, self._source = order, source
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

    def _assert_test(self) -> Job | None:
        ours, theirs = socket.socketpair()
        token = os.urandom(16)
        pid = os.fork()
        if pid == 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            self._become_program([nothing, nothing, nothing, theirs.detach()], ours)
            return Job(source=self._source, channel=3, token=token)
        theirs.close()
        with ours, ChildWatch(pid, self._order.test_limit_s, self._exceeds_memory) as watch:
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

    def _run_inside(self, program: socket.socket, watch: ChildWatch, test: bytes) -> None:
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

    def _answer_questions(self, program: socket.socket, watch: ChildWatch, kind: int, payload: bytes) -> None:
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
        with ChildWatch(pid, self._order.test_limit_s, self._exceeds_memory) as watch:
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


def _file_in_memory(data: bytes) -> int:
    """Descriptor of an immutable file in memory, which can be read and sought."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor
