"""Frames between a slot's owner and its processes: a byte that says what it is, a length, that many bytes.

owner -> slot       order: the bounds of a run (JSON), then source: the program
                    test: what `want` asked for
slot  -> owner      ready: the walls stand (JSON) / broken: they do not (text)
                    want: the next test is about to run
                    passed, failed: how it went; seconds, then what was printed
                    given_up: the other tests need not run
                    over: nothing of the program is left
"""

from __future__ import annotations

import socket
import struct

READY, BROKEN, ORDER, SOURCE, WANT, TEST, PASSED, FAILED, GIVEN_UP, OVER = b"^!rswt+-xo"
_HEAD = struct.Struct("<BI")
_SECONDS = struct.Struct("<d")


class Wire:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.socket.sendall(_HEAD.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[int, bytes]:
        """The next frame; EOFError when the other end is gone."""
        kind, length = _HEAD.unpack(self._read(_HEAD.size))
        return kind, self._read(length)

    def expect(self, kind: int) -> bytes:
        """The next frame, which can only be this one."""
        found, payload = self.receive()
        assert found == kind, f"a frame {found:c} came, {kind:c} was expected"
        return payload

    def close(self) -> None:
        self.socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self.socket.recv(min(length - len(data), 2**20))
            if not piece:
                raise EOFError("the other end is gone")
            data += piece
        return bytes(data)


def timed(seconds: float, output: bytes = b"") -> bytes:
    """Payload of `passed` and `failed`."""
    return _SECONDS.pack(seconds) + output


def untimed(payload: bytes) -> tuple[float, bytes]:
    return _SECONDS.unpack(payload[: _SECONDS.size])[0], payload[_SECONDS.size :]
