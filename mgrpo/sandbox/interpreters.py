"""Kernels: Python interpreters behind the sandbox's walls that keep their names from one call to the next.

One process raises the walls, which takes a moment; each kernel is a fork of it, which takes milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from mgrpo.sandbox import wire
from mgrpo.sandbox.isolation import Isolation
from mgrpo.sandbox.limits import PROCESSES
from mgrpo.sandbox.sandbox import Sandbox
from mgrpo.sandbox.session import GRACE_S, SessionBounds
from mgrpo.sandbox.walled import MARGIN_S, PROGRAM_IDS, LostError, SandboxError, Walled
from mgrpo.sandbox.zygote import Walls

_HEAD = struct.Struct("<BI")
# Each kernel of root's has a user of its own, as long as there are no more of them than ids; other users have one for all.
_SHARED_USER_PROCESSES = 64 * PROCESSES


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutput:
    """The output of a call."""

    printed: str
    error: str
    """The exception as Python prints it, or the reason why the interpreter was lost; empty where the call has succeeded."""

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def text(self) -> str:
        """Output and error as a terminal shows them."""
        is_apart = not self.printed or self.printed.endswith("\n")
        return self.printed + ("" if is_apart else "\n" if self.error else "") + self.error


class Kernel:
    """One interpreter, for one event loop and one call at a time. Closed, it ends with all that it has started."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._is_calling = False

    async def call(self, code: str, limit_s: float) -> CellOutput:
        """Run the code. After `limit_s` it is interrupted, and names are kept; if that fails, the interpreter is restarted.

        LostError where the kernel has ended, for instance killed from outside. A call that is cancelled closes the kernel.
        """
        payload = wire.timed(limit_s, code.encode("utf-8", "surrogatepass"))
        assert not self._is_calling, "one call at a time"
        self._is_calling = True
        is_answered = False
        try:
            async with asyncio.timeout(limit_s + GRACE_S + MARGIN_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._connection, _HEAD.pack(wire.CALL, len(payload)) + payload)
                _, length = _HEAD.unpack(await self._read(_HEAD.size))
                output = CellOutput(**json.loads(await self._read(length)))
            is_answered = True
            return output
        except (EOFError, OSError) as err:  # TimeoutError among them
            raise LostError(f"a kernel was lost: {err!r}") from err
        finally:
            self._is_calling = False
            if not is_answered:
                self.close()

    def close(self) -> None:
        """A call in progress is lost."""
        if self._is_calling:
            # Closed while the loop waits for it, its number could soon mean another connection.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        else:
            self._connection.close()

    async def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = await asyncio.get_running_loop().sock_recv(self._connection, length - len(data))
            if not piece:
                raise EOFError("the other end is closed")
            data += piece
        return bytes(data)


class _Zygote(Walled):
    """A process inside walls that forks kernels."""

    def __init__(self, walls: Walls, program_ids: range) -> None:
        super().__init__(walls, program_ids=program_ids, serves_kernels=True)
        self._wire.socket.settimeout(MARGIN_S)

    def open(self, bounds: SessionBounds) -> Kernel:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._wire.send(wire.OPEN, json.dumps(asdict(bounds)).encode())
                self._wire.send_end(theirs)
            except BaseException:
                ours.close()
                raise
        return Kernel(ours)

    def close(self) -> None:
        """End the kernels; without walls the process itself does so once its owner's connection is closed."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._wire.socket.shutdown(socket.SHUT_RDWR)
            if self._scratch:
                self._process.wait(MARGIN_S)
        super().close()


class Kernels:
    """Opens kernels. Thread-safe; `close` ends all of them."""

    def __init__(
        self, *, memory_mb: int = 512, accept_risk: bool = False, walls: Sequence[Walls] | None = None
    ) -> None:
        """Starts no process. `memory_mb`: of a kernel; `walls`: kinds to try, in order (default: all)."""
        self._memory_mb, self._accept_risk, self._walls = memory_mb, accept_risk, walls
        is_root = os.geteuid() == 0
        self._program_ids = PROGRAM_IDS if is_root else PROGRAM_IDS[:1]
        self._num_user_processes = PROCESSES if is_root else _SHARED_USER_PROCESSES
        self._isolation: Isolation | None = None
        self._zygote: _Zygote | None = None
        self._lock = threading.Lock()
        # The kernel ends a process together with the thread that started it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")

    def start(self) -> Isolation:
        """Choose the walls and measure them, as a sandbox does. ValueError where a layer is missing and that is not accepted."""
        with self._lock:
            if self._isolation is None:
                with Sandbox(
                    memory_mb=self._memory_mb, num_slots=1, accept_risk=self._accept_risk, walls=self._walls
                ) as sandbox:
                    isolation = sandbox.start()
                self._zygote = self._started(isolation)
                self._isolation = isolation
            return self._isolation

    def open(self, *, output_bytes: int) -> Kernel:
        """A fresh interpreter; longer outputs are cut in the middle. SandboxError where none can be started."""
        isolation = self.start()
        bounds = SessionBounds(
            memory_bytes=self._memory_mb * 2**20,
            output_bytes=output_bytes,
            num_user_processes=self._num_user_processes,
        )
        with self._lock:
            for may_repeat in (True, False):
                if self._zygote is None:
                    self._zygote = self._started(isolation)
                try:
                    return self._zygote.open(bounds)
                except (ConnectionError, TimeoutError) as err:  # its process has ended, and all its kernels
                    self._close_zygote()
                    if not may_repeat:
                        raise SandboxError(f"no kernel can be opened: {err!r}") from err
                except OSError as err:  # too many open files, for example
                    raise SandboxError(f"no kernel can be opened: {err}") from err
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        with self._lock:
            self._close_zygote()
        self._thread.shutdown()

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self, isolation: Isolation) -> _Zygote:
        return self._thread.submit(_Zygote, isolation.walls, self._program_ids).result()

    def _close_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()
