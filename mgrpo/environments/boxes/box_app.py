"""Boxes over HTTP, for runs of other machines: a plain ASGI app. Every request is a POST with a JSON object and the token.

    /boxes                {"bounds"}                              -> {"box", "folder", "scratch"}
    /boxes/ID/exec        {"argv", "env", "cwd", "stdin", "timeout_s"}, /start {"argv", "env", "cwd"}  -> {"process"}
    /boxes/ID/wait        {"process", "limit_s"}                  -> the fields of `Done`, or {} where it still runs
    /boxes/ID/kill        {"process"}; /put {"path", "data", "mode"}; /get {"path", "max_bytes"} -> {"data"}
    /boxes/ID/url         {"url"} -> {"url"}; /end; /alive -> {"alive"}; /close

Bytes are in base64. Errors are {"error", "text"} with a status of 4xx or 5xx. A box that is not heard of for `LEASE_S` is closed:
its run may have been killed.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mgrpo.environments.boxes.box import Bounds, Box, BoxError, BoxLost, Done, Process

LEASE_S = 60.0
MAX_BODY_BYTES = 64 * 2**20
MOST_PROCESSES = 1024
"""Commands of a box over its life whose ends were not asked for."""
_BODY_LIMIT_S = 60.0
_WAIT_LIMIT_S = 30.0


@dataclasses.dataclass
class _Held:
    box: Box
    heard: float
    ends: dict[int, asyncio.Future[Done]] = dataclasses.field(default_factory=dict)
    started: dict[int, Process] = dataclasses.field(default_factory=dict)
    number: int = 0


class _Refused(Exception):
    def __init__(self, status: int, error: str, text: str, **more: Any) -> None:
        super().__init__(text)
        self.status, self.answer = status, {"error": error, "text": text, **more}


class BoxApp:
    """For one event loop; `close` it."""

    def __init__(
        self, open_box: Callable[[Bounds], Awaitable[Box]], *, token: str, max_boxes: int, lease_s: float = LEASE_S
    ) -> None:
        """`open_box`: decides what of the bounds a client gets; it raises as `opening.open_box`."""
        self._open_box, self._token, self._max_boxes, self._lease_s = open_box, token.encode(), max_boxes, lease_s
        self._held: dict[str, _Held] = {}
        self._num_opening = 0
        self._sweeping: asyncio.Task[None] | None = None
        self._asks = {
            "exec": self._exec,
            "start": self._start,
            "wait": self._wait,
            "kill": self._kill,
            "put": self._put,
            "get": self._get,
            "url": self._url,
            "end": self._end,
            "alive": self._alive,
        }

    async def __call__(self, scope: Mapping[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            status, answer = 200, await self._answer(scope, receive)
        except _Refused as err:
            status, answer = err.status, err.answer
        except BoxLost as err:
            status, answer = 410, {"error": "lost", "text": str(err)}
        except BoxError as err:
            status, answer = 503, {"error": "box", "text": str(err)}
        except OSError as err:
            status, answer = (
                422,
                {
                    "error": "file",
                    "text": err.strerror or str(err),
                    "number": err.errno or 0,
                    "path": str(err.filename),
                },
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
            status, answer = 422, {"error": "value", "text": str(err) or type(err).__name__}
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def close(self) -> None:
        """Close all boxes."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*(self._close(name) for name in list(self._held)))

    async def _live(self, receive: Callable, send: Callable) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
            else:
                await self.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._lease_s / 4))
            before = time.monotonic() - self._lease_s
            await asyncio.gather(*(self._close(name) for name, held in list(self._held.items()) if held.heard < before))

    async def _answer(self, scope: Mapping[str, Any], receive: Callable) -> dict[str, Any]:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise _Refused(401, "value", "the token is missing or wrong (MGRPO_BOX_TOKEN)")
        if scope["method"] != "POST":
            raise _Refused(405, "value", "every request is a POST")
        words = json.loads(await _body(receive))
        if not isinstance(words, dict):
            raise _Refused(422, "value", "the body must be a JSON object")
        match scope["path"].split("/")[1:]:
            case ["boxes"]:
                return await self._open(words)
            case ["boxes", name, "close"]:
                await self._close(name)
                return {}
            case ["boxes", name, kind] if kind in self._asks:
                if (held := self._held.get(name)) is None:
                    raise BoxLost("the server has no such box; it was closed, or not heard of for too long")
                held.heard = time.monotonic()
                try:
                    return await self._asks[kind](held, words)
                finally:
                    held.heard = time.monotonic()
        raise _Refused(404, "value", f"no such path: {scope['path']}")

    async def _open(self, words: dict[str, Any]) -> dict[str, Any]:
        if len(self._held) + self._num_opening >= self._max_boxes:
            raise BoxError(f"all of the server's {self._max_boxes} boxes are in use")
        given = dict(words["bounds"])
        bounds = Bounds(**{**given, "readable": ()})  # these name files of the client's machine
        self._num_opening += 1
        try:
            box = await self._open_box(bounds)
        finally:
            self._num_opening -= 1
        name = secrets.token_urlsafe(16)
        self._held[name] = _Held(box, time.monotonic())
        return {"box": name, "folder": box.folder, "scratch": getattr(box, "scratch", "/tmp")}

    async def _close(self, name: str) -> None:
        if (held := self._held.pop(name, None)) is not None:
            await held.box.close()
            for end in held.ends.values():
                end.cancel()

    async def _exec(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        stdin = base64.b64decode(words["stdin"])
        work = held.box.exec(
            _argv(words), env=words["env"], cwd=words["cwd"], stdin=stdin, timeout_s=float(words["timeout_s"])
        )
        return self._number(held, work, None)

    async def _start(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        process = await held.box.start(_argv(words), env=words["env"], cwd=words["cwd"])
        return self._number(held, process.wait(), process)

    def _number(self, held: _Held, work: Any, process: Process | None) -> dict[str, Any]:
        if len(held.ends) >= MOST_PROCESSES:
            work.close()
            raise BoxError(f"more than {MOST_PROCESSES} commands of a box whose ends nobody has asked for")
        held.number += 1
        held.ends[held.number] = end = asyncio.ensure_future(work)
        end.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if process is not None:
            held.started[held.number] = process
        return {"process": held.number}

    async def _wait(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        end = held.ends[words["process"]]
        await asyncio.wait([end], timeout=min(max(float(words["limit_s"]), 0.0), _WAIT_LIMIT_S))
        if not end.done():
            return {}
        if end.cancelled():
            raise BoxLost("the command was ended with its box")
        found = dataclasses.asdict(end.result())
        return found | {name: base64.b64encode(found[name]).decode() for name in ("stdout", "stderr")}

    async def _kill(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        number = words["process"]
        if (process := held.started.get(number)) is not None:
            await process.kill()
        else:
            held.ends[number].cancel()
        return {}

    async def _put(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        await held.box.put(str(words["path"]), base64.b64decode(words["data"]), mode=int(words["mode"]))
        return {}

    async def _get(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        data = await held.box.get(str(words["path"]), max_bytes=min(int(words["max_bytes"]), MAX_BODY_BYTES))
        return {"data": base64.b64encode(data).decode()}

    async def _url(self, held: _Held, words: dict[str, Any]) -> dict[str, Any]:
        return {"url": await held.box.url_for(str(words["url"]))}

    async def _end(self, held: _Held, _: dict[str, Any]) -> dict[str, Any]:
        await held.box.end_processes()
        return {}

    async def _alive(self, held: _Held, _: dict[str, Any]) -> dict[str, Any]:
        return {"alive": await held.box.alive()}


def _argv(words: dict[str, Any]) -> list[str]:
    argv, env = words["argv"], words["env"]
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise ValueError(f"argv={argv!r} must be a list of strings")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ValueError("env must be an object of strings")
    return argv


async def _body(receive: Callable) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_LIMIT_S):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _Refused(413, "value", f"a request may have at most {MAX_BODY_BYTES} bytes")
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise _Refused(408, "value", f"the request did not arrive within {_BODY_LIMIT_S:g} s") from None
