"""Frames between a slot's owner and its processes: one byte for the kind, a length, that many bytes.

owner -> slot       order: the bounds of a run (JSON), then source: the program
                    test: the answer to `want`
slot  -> owner      ready: the walls are set up / forbidden: the kernel forbids them (text)
                    broken: they are not set up for another reason, or a supervisor failed (text)
                    want: request for the next test
                    inside: the program's process decides the test whose result comes next
                    passed, failed: result of a test; seconds, then the output
                    given_up: the remaining tests are not run
                    over: all processes of the program have ended

Where kernels are served, each has a connection of its own:

owner -> zygote     open: the kernel's bounds (JSON), then its end of that connection
owner -> kernel     call: the limit in seconds, then the code
kernel -> owner     passed, failed: the call's output, and its error (JSON)

Between the owner and the supervisor of assert tests is the judge, which answers `want` in its own way:

judge -> supervisor test: run it in the program's process / ask: a question to the program / done: no more questions
supervisor -> judge answer: the seconds of all answers to the test, then this one
"""

from __future__ import annotations

import socket
import struct

READY, FORBIDDEN, BROKEN, ORDER, SOURCE, WANT, TEST, PASSED, FAILED, GIVEN_UP, OVER = b"^/!rswt+-xo"
INSIDE, ASK, ANSWER, DONE = b"i?=."
OPEN, CALL = b"k>"
_HEAD = struct.Struct("<BI")
_SECONDS = struct.Struct("<d")


class Wire:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.socket.sendall(_HEAD.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[int, bytes]:
        """The next frame; EOFError when the other end is closed."""
        kind, length = _HEAD.unpack(self._read(_HEAD.size))
        return kind, self._read(length)

    def expect(self, kind: int) -> bytes:
        """Payload of the next frame, which must be of this kind."""
        received, payload = self.receive()
        assert received == kind, f"received a frame {received:c}, expected {kind:c}"
        return payload

    def send_end(self, end: socket.socket) -> None:
        """Give the other side one end of another connection."""
        socket.send_fds(self.socket, [b"e"], [end.fileno()])

    def receive_end(self) -> socket.socket:
        """The counterpart of `send_end`, next on the stream."""
        data, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        if not data or not descriptors:
            raise EOFError("the other end is closed")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        self.socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self.socket.recv(min(length - len(data), 2**20))
            if not piece:
                raise EOFError("the other end is closed")
            data += piece
        return bytes(data)


def timed(seconds: float, output: bytes = b"") -> bytes:
    """Payload of `passed`, `failed`, `answer` and `call`."""
    return _SECONDS.pack(seconds) + output


def untimed(payload: bytes) -> tuple[float, bytes]:
    """Seconds and output of such a payload."""
    return _SECONDS.unpack(payload[: _SECONDS.size])[0], payload[_SECONDS.size :]
