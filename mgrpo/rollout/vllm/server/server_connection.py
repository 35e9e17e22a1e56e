"""HTTP to one vLLM server, within one event loop."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

from mgrpo.processes.reply_bodies import PLAIN, plain_body
from mgrpo.rollout.engine import EngineError

TOKEN = "MGRPO_VLLM_SERVER_TOKEN"
"""Variable with the token of every request: vLLM's --api-key, or that of a proxy in front of it."""
KEEP_ALIVE_S = 2.0
"""Seconds in which an idle connection is reused. vLLM closes it after 5 s, and a request at that moment would be lost."""
CONNECT_S = 30.0
ANSWER_S = 30.0
"""Least time limit of an answer in seconds; servers of the policy use `weight_sync_timeout` if that is longer."""
ANSWER_BYTES = 16 << 20
"""Most bytes of an answer without tokens."""
SILENCE_S = 60
"""Seconds without data before the system checks that the other end is still there (TCP keep-alive)."""


OF_THE_REQUEST = (400, 413, 422)
"""Statuses that refuse a request for its content, as every server would."""


class ServerRefusal(EngineError):
    """The server's answer is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


class ServerConnection:
    """A server's endpoints. Create it in the event loop that uses it; always `close` it."""

    def __init__(self, url: str, *, token: str = TOKEN) -> None:
        """
        Args:
            token: name of the variable with the token.
        """
        self.url = url.rstrip("/")
        self.limit_s = ANSWER_S
        """Seconds for an answer, from the connection to the last byte; samples have no limit of their own."""
        secret = os.environ.get(token)
        self._session = aiohttp.ClientSession(
            headers=PLAIN | ({"Authorization": f"Bearer {secret}"} if secret else {}),
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_socket),
        )

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The answer, parsed from JSON; None: empty. Raises the errors of `post`."""
        body = await self._ask("GET", path, timeout_s=timeout_s or self.limit_s)
        try:
            return json.loads(body) if body else None
        except (ValueError, RecursionError) as err:
            raise EngineError(f"{path}: the answer is not JSON: {_shown(body)}") from err

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The server's answer.

        Raises:
            ServerRefusal: the answer is an error.
            EngineError: there is no answer, or it is too long or compressed.
        """
        return await self._ask("POST", path, timeout_s=self.limit_s, json=body or {})

    async def sample(self, path: str, body: Mapping[str, Any], *, most_bytes: int) -> bytes:
        """The server's answer to a prompt, which arrives when all completions have ended. Raises the errors of `post`."""
        return await self._ask("POST", path, timeout_s=None, most_bytes=most_bytes, json=body)

    async def _ask(
        self, method: str, path: str, *, timeout_s: float | None, most_bytes: int = ANSWER_BYTES, **more: Any
    ) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            # A redirect would carry the token elsewhere.
            async with self._session.request(
                method, self.url + path, allow_redirects=False, timeout=limit, **more
            ) as answer:
                body = await plain_body(answer.headers, answer.content.iter_any(), most_bytes)
                if answer.status != 200:
                    # After some errors vLLM closes the connection, and the next request would be lost in it.
                    answer.close()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as err:
            reason = _shown(str(err)) or (f"no answer within {timeout_s:g} s" if timeout_s else "no answer")
            raise EngineError(f"{path}: {reason}") from err
        if answer.status != 200:
            raise ServerRefusal(answer.status, _message(body))
        return body

    async def close(self) -> None:
        """Close the connections; the server aborts all requests that came over them."""
        await self._session.close()


def _socket(address: Any) -> socket.socket:
    """A socket with keep-alive, which detects a dead peer, or a router in between that has dropped the connection."""
    family, kind, protocol = address[:3]
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _shown(text: str | bytes) -> str:
    """The beginning of a text, in one line."""
    text = text[:1000].decode(errors="replace") if isinstance(text, bytes) else text
    return " ".join(text.split())[:200]


def _message(body: bytes) -> str:
    """The server's error text, without vLLM's wrapping."""
    text = body[: 1 << 16].decode(errors="replace").strip()
    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", found))
        text = str(found["message"] if isinstance(found, dict) and "message" in found else found)
    except (ValueError, RecursionError, AttributeError):
        pass
    return text.removeprefix("Call to collective_rpc method failed: ")[:2000] or "(nothing)"
