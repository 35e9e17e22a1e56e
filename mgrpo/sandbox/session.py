"""Supervises the interpreter of one kernel: runs its owner's calls in it, within limits, and replaces it when it is lost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from dataclasses import dataclass

from mgrpo.processes.lifetime import ending
from mgrpo.sandbox import wire
from mgrpo.sandbox.child import ChildWatch, Event
from mgrpo.sandbox.clipped import Clipped
from mgrpo.sandbox.interpreter import HEAD, Interpreter
from mgrpo.sandbox.limits import PROCESSES, Limits
from mgrpo.sandbox.supervision import Cell, Keeper, remove_folder
from mgrpo.sandbox.wire import Wire

GRACE_S = 1.0
"""Seconds in which code that was interrupted at its limit must end."""
_CPU_S = 600
_PIECE = 2**16
# More than a pipe and a socket can hold.
_MOST_WAITING = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBounds:
    """Limits of a kernel."""

    memory_bytes: int
    """Memory of all its processes together."""
    output_bytes: int
    """Longest output of a call, and longest error; more is cut in the middle."""
    num_user_processes: int
    """Processes of its user, which may have other kernels."""

    @classmethod
    def read(cls, text: bytes) -> SessionBounds:
        return cls(**json.loads(text))


class Session(Keeper):
    """A kernel's side of the connection with its owner. A forked child must return from every frame of this object at once."""

    def __init__(self, cell: Cell, bounds: SessionBounds, owner: Wire) -> None:
        limits = Limits(memory_bytes=bounds.memory_bytes, cpu_s=_CPU_S, processes=bounds.num_user_processes)
        super().__init__(cell, limits, owner)
        self._bounds = bounds

    def supervise(self) -> Interpreter:
        """Serve until the owner leaves (EOFError, ConnectionError); returns only in a forked child, with its interpreter."""
        self._prepare()
        try:
            while True:
                self._clear_scratch()
                job = self._serve_one()
                if job is not None:
                    return job
                self._reap()
        except (EOFError, ConnectionError):
            self._reap()
            if not self._cell.has_walls:
                remove_folder(self._cell.scratch)
            raise

    def _serve_one(self) -> Interpreter | None:
        """Serve with one interpreter until it is lost."""
        ours, theirs = socket.socketpair()
        output, into_output = os.pipe()
        pid = os.fork()
        if pid == 0:
            nothing = os.open(os.devnull, os.O_RDONLY)
            self._become_program([nothing, into_output, into_output, theirs.detach()], ours)
            os.environ.update(dict.fromkeys(("HOME", "TMPDIR"), self._cell.scratch))
            return Interpreter(channel=3, output_bytes=self._bounds.output_bytes)
        os.close(into_output)
        theirs.close()
        os.set_blocking(output, False)
        try:
            with ours, ChildWatch(pid, 0.0, self._exceeds_a_limit) as watch:
                run = _Run(pid, watch, ours, output)
                while not run.is_lost:
                    limit_s, code = wire.untimed(self._owner.expect(wire.CALL))
                    self._signal_all(signal.SIGCONT)
                    printed = Clipped(self._bounds.output_bytes)
                    error = run.call(code, limit_s, printed)
                    self._signal_all(signal.SIGSTOP)
                    run.drain(printed)
                    if not run.is_lost and self._exceeds_a_limit():
                        error = run.lose(Event.OVER_MEMORY)
                    answer = {"printed": printed.text(), "error": error}
                    self._owner.send(wire.FAILED if error else wire.PASSED, json.dumps(answer).encode())
        finally:
            os.close(output)
        return None

    def _signal_all(self, number: int) -> None:
        """Send a signal to all processes of the kernel, if it has walls. Stopped between calls, they use no CPU and no further memory."""
        if self._cell.has_walls:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)

    def _exceeds_a_limit(self) -> bool:
        """True if the kernel has too many processes, or they take too much memory; EOFError where the owner has left."""
        if select.select([self._owner.socket], [], [], 0)[0]:
            raise EOFError("the owner has left during a call")
        if self._sees_processes and sum(map(str.isdecimal, os.listdir("/proc"))) - 1 > PROCESSES:
            return True
        return self._exceeds_memory()


class _Run:
    """Calls to one interpreter."""

    def __init__(self, pid: int, watch: ChildWatch, channel: socket.socket, output: int) -> None:
        self._pid, self._watch, self._channel, self._output = pid, watch, channel, output
        self._limit_s = 0.0
        self._sources = [channel.fileno(), output]
        self.is_lost = False

    def call(self, code: bytes, limit_s: float, printed: Clipped) -> str:
        """Run the code, and collect its output; returns its error, or ""."""
        self._limit_s = limit_s
        self._watch.restart(limit_s)
        self._channel.settimeout(limit_s)
        with contextlib.suppress(OSError):  # one that does not read its code will not answer either
            self._channel.sendall(HEAD.pack(wire.SOURCE, len(code)) + code)
        self._channel.setblocking(False)
        reply = _Reply(printed.most_bytes)
        is_late = False
        while True:
            event = self._watch.wait(*self._sources)
            if event is Event.DATA:
                self._read_output(printed)
                self._read_channel(reply)
                if reply.is_too_long:
                    return self.lose(Event.ENDED)
                if reply.is_complete:
                    break
                # A process that writes without end must not keep its limits from being looked at.
                event = self._watch.exceeded() or event
            if event is Event.TIMEOUT and not is_late:
                is_late = True
                self._watch.restart(GRACE_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGINT)
            elif event is not Event.DATA:
                return self.lose(event)
        if is_late:
            return f"{reply.text}The call took more than {limit_s:g} s and was interrupted. Names are kept.\n"
        return reply.text

    def lose(self, event: Event) -> str:
        """Mark the interpreter as lost; returns the reason, for the author of the code."""
        self.is_lost = True
        if event is Event.TIMEOUT:
            why = f"The call took more than {self._limit_s:g} s and could not be interrupted"
        elif event is Event.OVER_MEMORY:
            why = "The code used more memory or processes than it may"
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            why = f"The interpreter {ending(self._watch.exit_code())}"
        return f"{why}. It was restarted: all names and files are lost.\n"

    def drain(self, printed: Clipped) -> None:
        """Collect the output printed until now."""
        for _ in range(_MOST_WAITING // _PIECE):
            if not self._read_output(printed):
                break

    def _read_output(self, printed: Clipped) -> bool:
        """Read a piece of output; True if there was any."""
        try:
            data = os.read(self._output, _PIECE)
        except BlockingIOError:
            return False
        if not data and self._output in self._sources:
            self._sources.remove(self._output)
        printed.add(data)
        return bool(data)

    def _read_channel(self, reply: _Reply) -> None:
        try:
            data = self._channel.recv(_PIECE)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data and self._channel.fileno() in self._sources:
            self._sources.remove(self._channel.fileno())
        reply.add(data)


class _Reply:
    """An interpreter's answer, as far as it has arrived."""

    def __init__(self, most_bytes: int) -> None:
        self._data = bytearray()
        # A character that was cut in two takes more, and so does the note of the omission.
        self._most_bytes = 2 * most_bytes + 100

    def add(self, data: bytes) -> None:
        self._data += data

    @property
    def _length(self) -> int | None:
        return HEAD.unpack_from(self._data)[1] if len(self._data) >= HEAD.size else None

    @property
    def is_too_long(self) -> bool:
        return (self._length or 0) > self._most_bytes

    @property
    def is_complete(self) -> bool:
        return self._length is not None and len(self._data) >= HEAD.size + self._length

    @property
    def text(self) -> str:
        """The error; nothing where there was none."""
        if self._data[0] == wire.PASSED:
            return ""
        return self._data[HEAD.size :].decode("utf-8", "replace") or "Error\n"
