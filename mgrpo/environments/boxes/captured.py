"""The output of an untrusted command: its last part is kept, however much is written."""

from __future__ import annotations

import asyncio
import os

_CHUNK = 2**16
_PAUSE_S = 0.004
"""Pause in seconds after each chunk beyond the kept bytes: endless output of a command must not take this process's time."""


class Captured:
    """Reader of a pipe until its end. For one event loop."""

    def __init__(self, descriptor: int, max_bytes: int, *, mark: bytes = b"") -> None:
        """Take ownership of the descriptor.

        Args:
            mark: bytes with which the output begins, if it is that of the command; they are not kept.
        """
        self._descriptor, self._max_bytes, self._mark = descriptor, max_bytes, mark
        self.is_marked = not mark
        """True once the mark has been read."""
        self._loop = asyncio.get_running_loop()
        self._kept = bytearray()
        self._is_open = True
        self._ended = asyncio.Event()
        self._pause: asyncio.TimerHandle | None = None
        self.truncated = False
        """True if more was written than is kept."""
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    @property
    def kept(self) -> bytes:
        """The last part of the output so far."""
        return bytes(self._kept[-self._max_bytes :])

    async def finish(self, grace_s: float) -> bytes:
        """The kept bytes, once all writers are gone or after `grace_s`: a command's leftover processes may hold it open."""
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            pass
        self.close()
        return self.kept

    def close(self) -> None:
        """Stop reading; a writer gets SIGPIPE."""
        if self._is_open:
            self._is_open = False
            if self._pause is not None:
                self._pause.cancel()
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._ended.set()

    def _read(self) -> None:
        try:
            piece = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close()
            return
        self._kept += piece
        if self._mark and len(self._kept) >= len(self._mark):
            if self._kept.startswith(self._mark):
                self.is_marked = True
                del self._kept[: len(self._mark)]
            self._mark = b""
        if len(self._kept) <= self._max_bytes:
            return
        self.truncated = True
        if len(self._kept) > 2 * self._max_bytes + _CHUNK:
            del self._kept[: -self._max_bytes]
        self._loop.remove_reader(self._descriptor)
        self._pause = self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read)


def in_memory(data: bytes) -> int:
    """Descriptor of a file in memory with this content, at its beginning."""
    descriptor = os.memfd_create("mgrpo")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
