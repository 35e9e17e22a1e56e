"""The tool python: code runs in an interpreter of the trajectory's own, behind the sandbox's walls or at a code service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.processes.reply_bodies import KEEP_ALIVE_S, PLAIN, plain_body
from mgrpo.sandbox.clipped import Clipped
from mgrpo.sandbox.interpreters import CellOutput, Kernel
from mgrpo.sandbox.local import borrow_kernels, give_back_kernels
from mgrpo.sandbox.walled import LostError

_LONGEST_LIMIT_S = 300.0
# Beside the call's own limit: to open an interpreter, and to wait for a place at a busy service.
_REPLY_MARGIN_S = 60.0
_REPLY_BYTES = 2**20
_PAUSES_S = (0.3, 0.6, 1.2)
_STARTED_ANEW = "A new interpreter is used: all names and files of earlier calls are lost.\n"


class Python(Environment):
    """Runs Python code. By default names last for the trajectory, and a call is interrupted at its limit."""

    name = "python"

    def __init__(
        self,
        *,
        stateful: bool | None = None,
        timeout: float = 5.0,
        memory_mb: int = 512,
        output_limit: int = 4000,
        accept_risk: bool = False,
        endpoint: str = "",
        api_endpoint: str = "",
    ) -> None:
        """
        Args:
            stateful: True keeps names from call to call; None: True, except for a code service without sessions.
            timeout: seconds of a call.
            memory_mb: of the interpreter and the processes that it starts.
            output_limit: most bytes of printed output, and of an error; the middle of longer text is cut.
            accept_risk: run code even where this machine cannot isolate it.
            endpoint: URL of a code service, .../execute; none: this machine.
            api_endpoint: the same, as Open Instruct's tools call it.
        """
        for setting, value, low, high in (
            ("timeout", timeout, 0.01, _LONGEST_LIMIT_S),
            ("memory_mb", memory_mb, 64, 2**20),
            ("output_limit", output_limit, 100, _REPLY_BYTES // 4),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{setting}={value!r}, expected a number from {low:g} to {high:g}")
        self._url = endpoint or api_endpoint
        if self._url and not self._url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint={self._url!r}, expected an address, for example http://localhost:1234/execute")
        self._stateful = stateful
        self._limit_s, self._output_limit = float(timeout), int(output_limit)
        self._memory_mb, self._accept_risk = int(memory_mb), accept_risk
        self._runner: _Runner | None = None

    async def setup(self) -> None:
        if self._url:
            service = _CodeService(self._url, self._limit_s, self._output_limit)
            try:
                self._stateful = await service.choose(self._stateful)
            except BaseException:
                await service.close()
                raise
            self._runner = service
        else:
            self._stateful = self._stateful is not False
            self._runner = await asyncio.to_thread(
                _LocalKernel, self._limit_s, self._output_limit, self._memory_mb, self._accept_risk
            )

    def tools(self) -> Sequence[Tool]:
        memory = "Names are kept between calls." if self._stateful else "Nothing is kept between calls: print results."
        description = (
            f"Run Python code. What it prints is returned, and the value of a last expression. {memory} "
            f"A call may take {self._limit_s:g} seconds; there is no network."
        )
        code = {"type": "string", "description": "The Python code to run."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        return [Tool(name=self.name, description=description, parameters=parameters)]

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> None:
        await self._started.forget()

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        return [await self._answer(call.arguments.get("code")) for call in calls]

    async def end(self) -> None:
        await self._started.forget()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()
            self._runner = None

    @property
    def _started(self) -> _Runner:
        assert self._runner is not None, "setup comes first"
        return self._runner

    async def _answer(self, code: object) -> Observation:
        if not isinstance(code, str) or not code.strip():
            return Observation(text="The code is empty; expected Python code.\n", failed=True)
        try:
            output = await self._started.run(code)
        except RuntimeError as err:  # of the sandbox or the service
            return Observation(text=f"The code was not run: {err}\n", failed=True)
        if not self._stateful:
            await self._started.forget()
        return Observation(text=output.text or "(no output)\n", failed=output.failed)


class _Runner(Protocol):
    """Runs code, in at most one interpreter at a time."""

    async def run(self, code: str) -> CellOutput: ...
    async def forget(self) -> None: ...
    async def close(self) -> None: ...


class _LocalKernel:
    """A kernel of this machine, opened for the first call."""

    def __init__(self, limit_s: float, output_bytes: int, memory_mb: int, accept_risk: bool) -> None:
        self._limit_s, self._output_bytes = limit_s, output_bytes
        self._memory_mb, self._accept_risk = memory_mb, accept_risk
        self._kernels = borrow_kernels(memory_mb, accept_risk=accept_risk)
        self._kernel: Kernel | None = None

    async def run(self, code: str) -> CellOutput:
        if self._kernel is None:
            self._kernel = await asyncio.to_thread(self._kernels.open, output_bytes=self._output_bytes)
        kernel, self._kernel = self._kernel, None  # a call that is cancelled ends it
        try:
            output = await kernel.call(code, self._limit_s)
        except LostError:
            return CellOutput(printed="", error=f"The interpreter was lost during the call. {_STARTED_ANEW}")
        self._kernel = kernel
        return output

    async def forget(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    async def close(self) -> None:
        await self.forget()
        await asyncio.to_thread(give_back_kernels, self._memory_mb, accept_risk=self._accept_risk)


class _CodeService:
    """A session of a code service; a service without sessions runs each call for itself."""

    def __init__(self, url: str, limit_s: float, output_bytes: int) -> None:
        import aiohttp

        self._url, self._limit_s, self._output_bytes = url, limit_s, output_bytes
        timeout = aiohttp.ClientTimeout(total=limit_s + _REPLY_MARGIN_S)
        connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
        self._client = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._has_sessions = False
        self._session = ""
        """Id of the session; "" before the first call."""

    async def choose(self, stateful: bool | None) -> bool:
        """Ask the service whether it has sessions, and decide whether to use them. ValueError where it does not answer as it should."""
        session = secrets.token_hex(16)
        try:
            reply = await self._ask({"code": "None", "timeout": self._limit_s, "session": session})
        except RuntimeError as err:
            raise ValueError(f"endpoint={self._url}: {err}") from err
        can_be = "is_new_session" in reply
        if stateful and not can_be:
            raise ValueError(f"endpoint={self._url}: the service has no sessions; set stateful=false")
        if can_be:
            await self._end(session)
        self._has_sessions = can_be and stateful is not False
        return self._has_sessions

    async def run(self, code: str) -> CellOutput:
        code = code.encode("utf-8", "replace").decode()  # half a surrogate is no text for a service
        question: dict[str, Any] = {"code": code, "timeout": self._limit_s}
        is_first = not self._session
        if self._has_sessions:
            self._session = self._session or secrets.token_hex(16)
            question["session"] = self._session
        reply = await self._ask(question)
        output, error = (_clipped(reply.get(part) or "", self._output_bytes) for part in ("output", "error"))
        if self._has_sessions and not is_first and reply.get("is_new_session"):
            error += f"The session was lost before this call. {_STARTED_ANEW}"
        return CellOutput(printed=output, error=error)

    async def forget(self) -> None:
        session, self._session = self._session, ""
        if session:
            await self._end(session)

    async def close(self) -> None:
        await self.forget()
        await self._client.close()

    async def _end(self, session: str) -> None:
        """End the service's session; without this the service ends it later."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5.0), self._client.delete(f"{self._url}/{session}", allow_redirects=False):
                pass

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The service's answer; where it is too busy or cannot be reached, it is asked again: the code has not run."""
        import aiohttp

        for pause_s in (*_PAUSES_S, None):
            try:
                status, data = await self._post(question)
                if status == 200:
                    return _read(data)
                problem = f"the code service answered {status}: {data[:300].decode('utf-8', 'replace')}"
                may_repeat = status == 503
            except (aiohttp.ClientError, TimeoutError) as err:
                problem = f"the code service cannot be reached: {type(err).__name__}: {err}"
                may_repeat = isinstance(err, aiohttp.ClientConnectorError)
            if pause_s is None or not may_repeat:
                raise RuntimeError(problem)
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _post(self, question: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._client.post(self._url, json=question, headers=PLAIN, allow_redirects=False) as response:
            try:
                return response.status, await plain_body(response.headers, response.content.iter_any(), _REPLY_BYTES)
            except ValueError as err:
                raise RuntimeError(f"the code service's reply cannot be read: {err}") from None


def _read(data: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except ValueError:
        reply = None
    if not isinstance(reply, dict) or not all(isinstance(reply.get(part) or "", str) for part in ("output", "error")):
        raise RuntimeError(f"the code service answered {data[:100]!r}, expected output and error as texts in JSON")
    return reply


def _clipped(text: str, most_bytes: int) -> str:
    clipped = Clipped(most_bytes)
    clipped.add(text.encode("utf-8", "replace"))
    return clipped.text()
