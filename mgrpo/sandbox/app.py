"""The code service over HTTP, as Open Instruct's: POST /test_program, POST /test_program_stdio, GET /health.

    {"program": text, "tests": [...], "max_execution_time": seconds}
    -> {"results": [0 or 1, ...], "runtimes": [...], "in_process": [0 or 1, ...]}

Also POST /execute, where the service has kernels; DELETE /execute/{session} ends one:

    {"code": text, "timeout": seconds, "session": name or nothing}
    -> {"output": text, "error": text or null, "success": true or false}, and "is_new_session" of a session

An error of the service is a status of 4xx or 5xx, never a list of zeros. Only this module imports FastAPI; import it
only where an app is created.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import asynccontextmanager, contextmanager

from fastapi import FastAPI, HTTPException, Request

from mgrpo.sandbox.code_requests import Question, read_code, read_question
from mgrpo.sandbox.sandbox import Sandbox, Verdicts
from mgrpo.sandbox.sessions import BusyError, Sessions

MAX_BODY_BYTES = 64 * 2**20
MAX_CODE_BYTES = 2**20
"""Longest code of a request to execute."""
MAX_HELD_BYTES = 2**30
"""All requests together that are received, waiting or running; further ones are refused with status 503."""
MAX_WAITING = 1024
"""Requests that may wait for a slot; further ones are refused with status 503."""
BODY_LIMIT_S = 60.0
"""Time for a request's body to arrive."""


def create_app(
    sandbox: Sandbox,
    *,
    sessions: Sessions | None = None,
    max_waiting: int = MAX_WAITING,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_held_bytes: int = MAX_HELD_BYTES,
    body_limit_s: float = BODY_LIMIT_S,
    start_readers: Callable[[], Executor] | None = None,
) -> FastAPI:
    """The app. A server that shuts it down closes the sandbox and the sessions; in-process, without a server, the caller does.

    `start_readers`: executor in which requests are read, for a service whose callers are not trusted; None: in threads.
    """
    holding = _Holding(max_held_bytes)
    readers: Executor | None = None
    waiting = 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if start_readers is not None:
            # The first request would otherwise wait for a process to start.
            await read(b'{"program": "", "tests": []}', is_stdio=False)
        yield
        if readers is not None:
            readers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(sandbox.close)
        if sessions is not None:
            await asyncio.to_thread(sessions.close)

    app = FastAPI(title="mgrpo code service", lifespan=lifespan)

    async def read(body: bytes, is_stdio: bool) -> Question:
        nonlocal readers
        question = functools.partial(read_question, body, is_stdio=is_stdio)
        if start_readers is None:
            return await asyncio.to_thread(question)
        for is_last_try in (False, True):
            used = readers = readers or start_readers()
            try:
                return await asyncio.get_running_loop().run_in_executor(used, question)
            except BrokenExecutor:
                if readers is used:
                    readers = None
                if is_last_try:
                    raise
        raise AssertionError("the last try returns or raises")

    async def answer(request: Request, run: Callable[..., Future], *, is_stdio: bool) -> dict[str, list]:
        nonlocal waiting
        _check_type(request)
        with holding.share() as share:
            body = await _body(request, share, max_body_bytes, body_limit_s)
            try:
                question = await read(body, is_stdio)
            except ValueError as err:
                raise HTTPException(422, str(err)) from err
            except BrokenExecutor as err:
                raise HTTPException(500, f"the process that reads requests has ended: {err}") from err
            share.set(max(len(body), question.num_bytes))
            if not question.tests:
                return Verdicts([], [], [])._asdict()
            if waiting >= max_waiting + sandbox.num_slots:
                raise _busy(f"{waiting} programs are already waiting")
            waiting += 1
            try:
                verdicts: Verdicts = await asyncio.wrap_future(run(question.program, question.tests, question.limit_s))
            except (RuntimeError, ValueError) as err:
                raise HTTPException(500, f"{type(err).__name__}: {err}") from err
            finally:
                waiting -= 1
        return verdicts._asdict()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.post("/test_program")
    async def test_program(request: Request) -> dict[str, list]:
        return await answer(request, sandbox.run_asserts, is_stdio=False)

    @app.post("/test_program_stdio")
    async def test_program_stdio(request: Request) -> dict[str, list]:
        return await answer(request, sandbox.run_stdio, is_stdio=True)

    if sessions is not None:
        _add_execute(app, sessions, holding, body_limit_s)
    return app


def _add_execute(app: FastAPI, sessions: Sessions, holding: _Holding, body_limit_s: float) -> None:
    @app.post("/execute")
    async def execute(request: Request) -> dict[str, object]:
        _check_type(request)
        with holding.share() as share:
            try:
                asked = read_code(await _body(request, share, MAX_CODE_BYTES, body_limit_s))
                output, is_new = await sessions.call(asked.code, asked.timeout, asked.session)
            except BusyError as err:
                raise _busy(str(err)) from err
            except ValueError as err:
                raise HTTPException(422, str(err)) from err
            except RuntimeError as err:
                raise HTTPException(500, f"{type(err).__name__}: {err}") from err
        reply: dict[str, object] = {"output": output.printed, "error": output.error or None}
        reply["success"] = not output.failed
        return reply if asked.session is None else reply | {"is_new_session": is_new}

    @app.delete("/execute/{session}")
    async def end(session: str) -> dict[str, object]:
        sessions.end(session)
        return {}


class _Share:
    """Bytes that one request holds."""

    def __init__(self, holding: _Holding) -> None:
        self._holding, self.num_bytes = holding, 0

    def set(self, num_bytes: int) -> None:
        """Refuse the request where all requests together would hold too much."""
        held = self._holding.num_bytes + num_bytes - self.num_bytes
        if num_bytes > self.num_bytes and held > self._holding.max_bytes:
            raise _busy(f"the requests in progress would hold more than {self._holding.max_bytes} bytes")
        self._holding.num_bytes, self.num_bytes = held, num_bytes


class _Holding:
    """Bytes that all requests together hold."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0

    @contextmanager
    def share(self) -> Iterator[_Share]:
        share = _Share(self)
        try:
            yield share
        finally:
            share.set(0)


def _check_type(request: Request) -> None:
    """Accept JSON only: a page in a browser may send some other types to any address without a preflight request."""
    if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(422, "the request needs the header Content-Type: application/json")


async def _body(request: Request, share: _Share, max_bytes: int, limit_s: float) -> bytes:
    """The body; refused as soon as it is too large, and when it does not arrive in time."""
    body = bytearray()

    async def receive() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > max_bytes:
                raise HTTPException(413, f"a request may have at most {max_bytes} bytes")
            share.set(len(body))

    try:
        await asyncio.wait_for(receive(), limit_s)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {limit_s:g} s", {"Connection": "close"}) from None
    return bytes(body)


def _busy(why: str) -> HTTPException:
    return HTTPException(503, f"{why}; try again later", {"Retry-After": "1"})
