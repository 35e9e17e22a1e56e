"""Kernels of the code service, by the names that its clients give them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mgrpo.sandbox.interpreters import CellOutput, Kernel, Kernels

OUTPUT_BYTES = 2**16
_MAX_SESSIONS = 1024
_IDLE_LIMIT_S = 900.0


class BusyError(RuntimeError):
    """No more can be taken now."""


@dataclass(slots=True)
class _Session:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kernel: Kernel | None = None
    end: asyncio.TimerHandle | None = None


class Sessions:
    """Calls of code, in the kernel of a session or each in a new one. `close` ends all kernels."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        num_at_once: int,
        max_waiting: int,
        max_sessions: int = _MAX_SESSIONS,
        idle_limit_s: float = _IDLE_LIMIT_S,
    ) -> None:
        """`idle_limit_s`: seconds without a call after which a session ends."""
        self._kernels = kernels
        self._most_calls = num_at_once + max_waiting
        self._max_sessions, self._idle_limit_s = max_sessions, idle_limit_s
        self._places = asyncio.Semaphore(num_at_once)
        self._num_calls = 0
        self._sessions: dict[str, _Session] = {}

    async def call(self, code: str, limit_s: float, name: str | None) -> tuple[CellOutput, bool]:
        """The output of the code, and True if its session is new. BusyError; SandboxError, which ends the session."""
        if self._num_calls >= self._most_calls:
            raise BusyError(f"{self._num_calls} calls are already running or waiting")
        self._num_calls += 1
        try:
            if name is None:
                return await self._call_alone(code, limit_s), True
            return await self._call_in_session(code, limit_s, name)
        finally:
            self._num_calls -= 1

    def end(self, name: str) -> None:
        """End the session, where there is one; a call in progress is lost."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        if session.end is not None:
            session.end.cancel()
        if session.kernel is not None:
            session.kernel.close()

    def close(self) -> None:
        self._kernels.close()

    async def _call_alone(self, code: str, limit_s: float) -> CellOutput:
        async with self._places:
            kernel = await self._open()
            try:
                return await kernel.call(code, limit_s)
            finally:
                kernel.close()

    async def _call_in_session(self, code: str, limit_s: float, name: str) -> tuple[CellOutput, bool]:
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= self._max_sessions:
                raise BusyError(f"there are already {self._max_sessions} sessions")
            session = self._sessions[name] = _Session()
        # Calls that wait for their own session do not take the places of others.
        async with session.lock, self._places:
            if self._sessions.get(name) is not session:
                raise BusyError("the session has ended while the call waited for it")
            if session.end is not None:
                session.end.cancel()
            is_new = session.kernel is None
            try:
                if session.kernel is None:
                    session.kernel = await self._open()
                output = await session.kernel.call(code, limit_s)
            except BaseException:
                if self._sessions.get(name) is session:
                    self.end(name)
                raise
            if self._sessions.get(name) is session:
                session.end = asyncio.get_running_loop().call_later(self._idle_limit_s, self.end, name)
            else:  # ended in the last moment of the call
                session.kernel.close()
        return output, is_new

    async def _open(self) -> Kernel:
        return await asyncio.to_thread(self._kernels.open, output_bytes=OUTPUT_BYTES)
