"""A session with an OpenEnv server: messages over one WebSocket, each answered in its turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mgrpo.processes.reply_bodies import PLAIN, plain_body

_FULL = "CAPACITY_REACHED"
_REFUSALS = (_FULL, "FACTORY_ERROR", "SESSION_ERROR")
"""Errors after which the server closes the connection."""
_MAX_MESSAGE_BYTES = 16 * 2**20
_MAX_SCHEMA_BYTES = 2**20
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class SessionLost(Exception):
    """The connection is gone, and with it the state of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvAnswer:
    """The server's answer to one message."""

    observation: Mapping[str, Any] = field(default_factory=dict)
    reward: Any = 0.0
    """Reward as the server sent it."""
    is_done: bool = False
    error: str = ""
    code: str = ""


class OpenEnvSession:
    """One environment on the server, from `connect` to `close`."""

    def __init__(self, url: str, *, capacity_timeout_s: float) -> None:
        base = url.rstrip("/").removesuffix("/ws")
        self._url = base.replace("ws", "http", 1) if base.startswith("ws") else base
        self._capacity_timeout_s = capacity_timeout_s
        self._http: Any = None
        self._socket: Any = None
        self._num_unread = 0
        """Answers still to come to cancelled requests; they precede the next one."""

    async def connect(self) -> None:
        """Open the connection if it is not open. Waits while the server has no free session; raises ConnectionError."""
        if self._socket is not None and not self._socket.closed:
            return
        if self._http is None:
            import aiohttp

            self._http = aiohttp.ClientSession()
        until, pause = time.monotonic() + self._capacity_timeout_s, _FIRST_PAUSE_S
        while (refusal := await self._opened()).code == _FULL and time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if refusal.code == _FULL:
            raise ConnectionError(
                f"openenv: {self._url} has given out all its sessions for {self._capacity_timeout_s:g} s "
                f"({refusal.error}); set its max_concurrent_envs to at least pool_size"
            )
        if refusal.code:
            raise ConnectionError(f"openenv: {self._url} opened no session: {refusal.error}")

    async def ask(self, kind: str, data: Mapping[str, Any]) -> OpenEnvAnswer:
        """The answer to one message; raises SessionLost."""
        message = {"type": kind} if kind == "state" else {"type": kind, "data": data}
        try:
            await self._socket.send_str(json.dumps(message))
        except (ConnectionError, AttributeError) as err:
            raise SessionLost("the connection is closed") from err
        self._num_unread += 1
        while True:
            answer = await self._read()
            self._num_unread -= 1
            if not self._num_unread:
                return answer

    async def action_schema(self) -> Mapping[str, Any]:
        """The JSON schema of an action; raises ConnectionError."""
        import aiohttp

        try:
            async with self._http.get(f"{self._url}/schema", headers=PLAIN, allow_redirects=False) as response:
                response.raise_for_status()
                body = await plain_body(response.headers, response.content.iter_any(), _MAX_SCHEMA_BYTES)
                return dict(json.loads(body)["action"])
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as err:
            raise ConnectionError(
                f"openenv: {self._url} has no MCP tools, and none gives the schema of its action "
                f"({type(err).__name__}: {err}); name its text field with action_field"
            ) from err

    async def close(self) -> None:
        socket, http, self._socket, self._http = self._socket, self._http, None, None
        if socket is not None and not socket.closed:
            with contextlib.suppress(ConnectionError):
                await socket.send_str('{"type": "close"}')
            await socket.close()
        if http is not None:
            await http.close()

    async def _opened(self) -> OpenEnvAnswer:
        """Open a connection, and return the server's refusal of a session; `code` is empty if it gives one."""
        import aiohttp

        self._num_unread = 0
        try:
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)
            answer = await self.ask("state", {})
        except (aiohttp.ClientError, OSError, SessionLost) as err:
            raise ConnectionError(f"openenv: no server at {self._url}: {err}") from err
        if answer.code not in _REFUSALS:
            return OpenEnvAnswer()
        await self._socket.close()
        return answer

    async def _read(self) -> OpenEnvAnswer:
        import aiohttp

        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            await self._socket.close()
            raise SessionLost("the server has closed the connection")
        try:
            return _answer(json.loads(message.data))
        except (AttributeError, RecursionError, TypeError, ValueError) as err:
            await self._socket.close()
            raise SessionLost(f"the server has sent {message.data:.80}, which is not a message") from err


def _answer(message: Mapping[str, Any]) -> OpenEnvAnswer:
    data = message.get("data") or {}
    if message.get("type") == "error":
        wrong = (f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in data.get("errors", ()))
        return OpenEnvAnswer(error="; ".join((str(data.get("message")), *wrong)), code=str(data.get("code")))
    observation = data.get("observation")
    return OpenEnvAnswer(
        observation=observation if isinstance(observation, Mapping) else {"observation": observation},
        reward=0.0 if data.get("reward") is None else data["reward"],
        is_done=bool(data.get("done")),
    )
