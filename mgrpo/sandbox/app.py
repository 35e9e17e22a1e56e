"""The code service over HTTP, as Open Instruct's: POST /test_program, POST /test_program_stdio, GET /health.

    {"program": text, "tests": [...], "max_execution_time": seconds}
    -> {"results": [0 or 1, ...], "runtimes": [...], "in_process": [0 or 1, ...]}

An error of the service is a status of 4xx or 5xx, never a list of zeros. Only this module imports FastAPI; import it
only where an app is created.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mgrpo.sandbox.cases import assert_tests, stdio_tests
from mgrpo.sandbox.sandbox import Sandbox, Verdicts

MAX_BODY_BYTES = 64 * 2**20
MAX_WAITING = 1024
"""Requests that may wait for a slot; further ones are refused with status 503."""
_LONGEST_LIMIT_S = 300.0


class TestRequest(BaseModel):
    program: str
    tests: Any
    """A list, its JSON text, or Open Instruct's compressed form."""
    max_execution_time: float = Field(default=1.0, gt=0, le=_LONGEST_LIMIT_S)


def create_app(sandbox: Sandbox, *, max_waiting: int = MAX_WAITING, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The app. A server that shuts it down closes the sandbox; in-process, without a server, the caller closes it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(sandbox.close)

    app = FastAPI(title="mgrpo code service", lifespan=lifespan)
    app.add_middleware(_BodyLimit, max_bytes=max_body_bytes)
    waiting = 0

    async def answer(
        request: TestRequest, read: Callable[[object], list], run: Callable[..., Future]
    ) -> dict[str, list]:
        nonlocal waiting
        try:
            tests = read(request.tests)
        except ValueError as err:
            raise HTTPException(422, str(err)) from err
        if not tests:
            return Verdicts([], [], [])._asdict()
        if waiting >= max_waiting + sandbox.num_slots:
            raise HTTPException(503, f"{waiting} programs are already waiting; try again later", {"Retry-After": "1"})
        waiting += 1
        try:
            verdicts: Verdicts = await asyncio.wrap_future(run(request.program, tests, request.max_execution_time))
        except (RuntimeError, ValueError) as err:
            raise HTTPException(500, f"{type(err).__name__}: {err}") from err
        finally:
            waiting -= 1
        return verdicts._asdict()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.post("/test_program")
    async def test_program(request: TestRequest) -> dict[str, list]:
        return await answer(request, assert_tests, sandbox.run_asserts)

    @app.post("/test_program_stdio")
    async def test_program_stdio(request: TestRequest) -> dict[str, list]:
        return await answer(request, stdio_tests, sandbox.run_stdio)

    return app


class _BodyLimit:
    """Refuses a request as soon as its body is too large."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"a request may have at most {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)
