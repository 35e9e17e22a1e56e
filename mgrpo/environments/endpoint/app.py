"""The endpoint's HTTP contract, as an ASGI application: the session of each call, and the API of its answer.

    GET  /health                                no key
    GET  /tasks/next                            the run's key for workers; ?alive=1 of those that will POST alive, &wait_s=S for a
                                                shorter wait for a task
    POST /s/{session}/v1/chat/completions, /v1/messages, /v1/messages/count_tokens, /v1/responses
    GET  /s/{session}/v1/models, /v1/models/{id}
    POST /s/{session}/reward                    {"reward": number, "metrics": {name: number}}, with the key of rewards
    POST /s/{session}/alive                     its worker still plays it; with any of its keys
    POST /s/{session}/end                       how the agent ended, see `tasks.left_by`, or nothing; with any of its keys, but
                                                "gone", "lost" and "late" with the worker's alone

The path names the session and its key must fit. A turn counts as delivered once it was written to a client that was still there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from mgrpo.environments.endpoint import anthropic, chat, responses
from mgrpo.environments.endpoint.calls import name_of
from mgrpo.environments.endpoint.exchange import ClientGone, Event, Exchange, Receive, Send, parsed
from mgrpo.environments.endpoint.messages import BadRequest, Fault
from mgrpo.environments.endpoint.session import Session, Turned, TurnRequest, finite, over
from mgrpo.environments.endpoint.sessions import OpenSession, Sessions, is_same
from mgrpo.environments.endpoint.tasks import ASK_S, BY_WORKERS, Tasks, left_by
from mgrpo.environments.offered.agent import checked_metrics

MODEL = "policy"
_LONGEST_MODEL = 256
"""Most characters of a client's name for the model, which each event of an answer repeats."""


class Dialect(Protocol):
    """The adapter of one API: a module."""

    def request(self, body: Mapping[str, Any], /) -> TurnRequest:
        """The turn request in a body."""

    def reply(self, turned: Turned, body: Mapping[str, Any], /) -> dict[str, Any]:
        """The answer."""

    def events(self, turned: Turned, body: Mapping[str, Any], /) -> Iterator[bytes]:
        """The answer as a stream."""

    def error(self, fault: Fault, /) -> dict[str, Any]:
        """The answer to a call that is refused."""

    def error_event(self, fault: Fault, /) -> bytes:
        """The end of a stream that has begun."""


DIALECTS: Mapping[str, Dialect] = {"v1/chat/completions": chat, "v1/messages": anthropic, "v1/responses": responses}


class EndpointApp:
    """The application."""

    def __init__(self, sessions: Sessions, *, tasks: Tasks | None = None) -> None:
        self._sessions, self._tasks = sessions, tasks

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "neither a lifespan nor websockets are asked for"
        exchange = Exchange(scope, receive, send)
        dialect = _dialect(exchange.parts)
        try:
            try:
                await self._route(exchange)
            except (Fault, ClientGone):
                raise
            except Exception as err:
                # A client's request must not end the run. Its values are not shown: they may be secret.
                sys.stderr.write("".join(traceback.format_tb(err.__traceback__)) + f"{type(err).__name__}\n")
                raise Fault(500, "server_error", "The server had an error while processing your request.") from None
        except Fault as fault:
            await exchange.refuse(fault, dialect.error(fault), dialect.error_event(fault))
        except ClientGone:
            pass

    async def _route(self, exchange: Exchange) -> None:
        match exchange.parts:
            case ["health"]:
                _check_method(exchange, "GET")
                await exchange.answer(200, {"status": "ok"})
            case ["tasks", "next"] if self._tasks is not None:
                _check_method(exchange, "GET")
                await self._next_task(exchange, self._tasks)
            case ["s", name, *rest]:
                tail = "/".join(rest)
                is_reward = tail == "reward"
                opened = self._sessions.find(
                    name, exchange.key, also_others=tail in ("end", "alive"), must_reward=is_reward
                )
                try:
                    await self._serve(exchange, opened, tail)
                except Fault as fault:
                    opened.session.counts.refused[fault.code or str(fault.status)] += 1
                    raise
            case _:
                raise _unknown(exchange)

    async def _serve(self, exchange: Exchange, opened: OpenSession, tail: str) -> None:
        session = opened.session
        if tail in DIALECTS:
            _check_method(exchange, "POST")
            with opened.calls.request():
                await self._turn(exchange, opened, tail, DIALECTS[tail])
        elif tail == "v1/messages/count_tokens" and "v1/messages" in DIALECTS:
            _check_method(exchange, "POST")
            with opened.calls.request():
                await self._count(exchange, opened, DIALECTS["v1/messages"])
        elif tail == "reward":
            _check_method(exchange, "POST")
            with opened.calls.request():
                await self._reward(exchange, opened)
        elif tail == "alive" and self._tasks is not None:
            _check_method(exchange, "POST")
            if session.why_over is not None:
                raise over("it is no longer played")
            self._tasks.alive(session.name)
            await exchange.answer(200, {})
        elif tail == "end":
            _check_method(exchange, "POST")
            async with self._body(exchange, opened) as raw:
                left = left_by(parsed(raw) if raw else {})
                if left["ended"] in BY_WORKERS and not is_same(exchange.key, opened.task_key):
                    raise Fault(
                        403,
                        "permission_error",
                        f"ended={left['ended']!r} is said by the worker that has the task, with the task's task_key.",
                        "invalid_api_key",
                    )
                if session.why_over is None:
                    session.left = left
                opened.close("ended")
                await exchange.answer(200, {})
        elif tail == "v1/models" or tail.startswith("v1/models/"):
            _check_method(exchange, "GET")
            await exchange.answer(200, _models(session, tail))
        else:
            raise _unknown(exchange)

    async def _turn(self, exchange: Exchange, opened: OpenSession, tail: str, dialect: Dialect) -> None:
        session = opened.session
        async with self._body(exchange, opened) as raw:
            body = parsed(raw)
            request = dialect.request(body)
            if not isinstance(model := body.get("model"), str | None) or len(model or "") > _LONGEST_MODEL:
                why = f"expected a string of at most {_LONGEST_MODEL} characters"
                raise BadRequest(f"Invalid value for 'model': {why}.", "invalid_value", "model")
            session.counts.plain["other_model"] += model not in (None, MODEL)
            is_stream = body.get("stream") is True
            name, kind = name_of(tail, raw, exchange.headers)
            num_bytes = len(raw)
            with opened.calls.call(name, kind, lambda: session.turn(request, num_bytes=num_bytes)) as call:
                watch = await exchange.wait(call.task, comment_s=session.limits.comment_s if is_stream else None)
                try:
                    turned = call.turned
                    if is_stream:
                        data = b"".join(dialect.events(turned, body))
                    else:
                        data = json.dumps(dialect.reply(turned, body)).encode()
                    await exchange.deliver(data, watch, is_stream=is_stream)
                    turned.node.delivered = True
                finally:
                    watch.cancel()

    async def _count(self, exchange: Exchange, opened: OpenSession, dialect: Dialect) -> None:
        async with self._body(exchange, opened) as raw:
            request = dialect.request({"max_tokens": 1, **parsed(raw)})
            ask = await opened.session.ask(request, num_bytes=len(raw))
            await exchange.answer(200, {"input_tokens": ask.length})

    async def _reward(self, exchange: Exchange, opened: OpenSession) -> None:
        session = opened.session
        async with self._body(exchange, opened) as raw:
            body = parsed(raw)
            reward = finite(body.get("reward"), "reward")
            try:
                found = checked_metrics(body.get("metrics") or {})
            except ValueError as err:
                raise BadRequest(str(err), "invalid_value", "metrics") from None
            if session.why_over is not None:
                raise over("its reward can no longer be set")
            session.reward, session.metrics = reward, found
            await exchange.answer(200, {"reward": reward})

    async def _next_task(self, exchange: Exchange, tasks: Tasks) -> None:
        query = urllib.parse.parse_qs(exchange.query.decode("latin1"))
        asking = asyncio.create_task(tasks.next(exchange.key or None, _wait_s(query)))
        try:
            watch = await exchange.wait(asking, comment_s=None)
        except ClientGone:
            if asking.done() and not asking.exception() and (found := asking.result()) is not None:
                tasks.put_back(found[0])
            raise
        finally:
            asking.cancel()
        try:
            found = asking.result()
            data = json.dumps({"task": None if found is None else found[1]}).encode()
            await exchange.deliver(data, watch, is_stream=False)
        except ClientGone:
            if found is not None:
                tasks.put_back(found[0])
            raise
        finally:
            watch.cancel()
        if found is not None:
            tasks.begun(found[0], says_alive=query.get("alive") == ["1"])

    def _body(self, exchange: Exchange, opened: OpenSession) -> Any:
        limits = self._sessions.limits
        return exchange.body(opened.held, max_bytes=limits.body_bytes, limit_s=limits.body_s)


def _dialect(parts: list[str]) -> Dialect:
    """The API adapter of a path."""
    tail = "/".join(parts[2:4])
    return DIALECTS.get(tail, chat)


def _wait_s(query: Mapping[str, list[str]]) -> float:
    """Seconds for which a worker waits for a task, `ASK_S` at most."""
    try:
        wait_s = float(query.get("wait_s", [str(ASK_S)])[-1])
    except ValueError:
        wait_s = -1.0
    if not wait_s >= 0:
        raise BadRequest("Invalid value for 'wait_s': expected seconds.", "invalid_value", "wait_s")
    return min(wait_s, ASK_S)


def _check_method(exchange: Exchange, method: str) -> None:
    if exchange.method != method:
        raise Fault(
            405,
            "invalid_request_error",
            f"{exchange.method} is not possible here; expected {method}",
            "method_not_allowed",
        )


def _unknown(exchange: Exchange) -> Fault:
    path = "/" + "/".join(exchange.parts)
    return Fault(
        404,
        "invalid_request_error",
        f"Unknown request URL: {exchange.method} {path:.200}. Turns are asked for at /s/SESSION/v1/chat/completions, "
        "/v1/messages or /v1/responses.",
        "unknown_url",
    )


def _models(session: Session, tail: str) -> dict[str, Any]:
    """The list of models, for OpenAI's and Anthropic's clients."""
    model = {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "mgrpo",
        "type": "model",
        "display_name": MODEL,
        "created_at": "1970-01-01T00:00:00Z",
        "max_model_len": session.bounds.max_model_length,
    }
    if tail != "v1/models":
        return model
    return {"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
