"""One small client of OpenAI-compatible chat completions: attempts, time limits, and what they cost.

It sends one user message and gives the reply's text to a reader. Everything that may pass is tried again: timeouts,
broken connections, 429, 5xx, and replies that cannot be read. The last failure is a `NoVerdict`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from mgrpo.rewards.judges.endpoint import Endpoint
from mgrpo.rewards.judges.replies import Unreadable
from mgrpo.rewards.judges.usage import Usage

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 3
# A server may ask for more patience than a training step has.
_LONGEST_WAIT_S = 30.0
_MOST_BYTES = 4 << 20
_SHOWN = 300
# OpenAI's reasoning models refuse every temperature but their own.
_FIXED_TEMPERATURE = re.compile(r"(o[0-9]|gpt-5)")


class NoVerdict(RuntimeError):
    """The judge gave none; the message says why."""


class _MayPass(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class ChatClient:
    """Asks one model; belongs to the event loop that first uses it. `close` it there."""

    usage: Usage

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        temperature: float,
        max_tokens: int,
        timeout_s: float,
        max_connections: int,
        backoff_s: float = 1.0,
    ) -> None:
        """Nothing is opened yet.

        Args:
            timeout_s: for one attempt, from its connection to the last byte of the reply.
            max_connections: requests under way at once; others wait outside their time limit.
            backoff_s: wait after the first failed attempt; twice as long after the second.
        """
        self.usage = Usage()
        self.endpoint = endpoint
        self.backoff_s = backoff_s
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._slots = asyncio.Semaphore(max_connections)
        self._http: httpx.AsyncClient | None = None

    async def ask(self, prompt: str, read: Callable[[str], float]) -> float:
        """What `read` makes of the reply's text; it raises `Unreadable` for a reply that says nothing to it."""
        for attempt in range(ATTEMPTS):
            try:
                return read(await self._reply(prompt, attempt))
            except Unreadable as err:
                failure, wait_s = err, 0.0
            except _MayPass as err:
                failure, wait_s = err, err.wait_s
            if attempt < ATTEMPTS - 1:
                await asyncio.sleep(max(wait_s, self.backoff_s * 2**attempt))
        raise NoVerdict(f"{self.endpoint.model} gave no verdict in {ATTEMPTS} attempts; the last one: {failure}")

    async def close(self) -> None:
        """Close the connections; the client may be used again, and then opens new ones."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def _reply(self, prompt: str, attempt: int) -> str:
        import httpx

        body = json.dumps(self._request(prompt, attempt)).encode()
        async with self._slots:
            self.usage.requests += 1
            try:
                status, headers, content = await asyncio.wait_for(self._post(body), self._timeout_s)
            except asyncio.TimeoutError:
                raise _MayPass(f"no reply within {self._timeout_s:g} s") from None
            except httpx.RequestError as err:
                raise _MayPass(self._without_key(f"{type(err).__name__}: {err}")) from err
        if status != 200:
            self._complain(status, headers, content)
        return self._text(content)

    def _request(self, prompt: str, attempt: int) -> dict:
        """The body; every attempt has a seed of its own, or an unreadable reply would come back word for word."""
        request = {"model": self.endpoint.model, "messages": [{"role": "user", "content": prompt}], "seed": attempt}
        newer = self.endpoint.is_openai
        request["max_completion_tokens" if newer else "max_tokens"] = self._max_tokens
        if not (newer and _FIXED_TEMPERATURE.match(self.endpoint.model)):
            request["temperature"] = self._temperature
        return request

    async def _post(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        content = bytearray()
        async with self._open().stream("POST", self.endpoint.url, content=body) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise _MayPass(f"the reply is longer than {_MOST_BYTES:,} bytes")
            return response.status_code, response.headers, bytes(content)

    def _open(self) -> httpx.AsyncClient:
        import httpx

        if self._http is None:
            # It logs every request at the level on which the program reports its steps.
            logging.getLogger("httpx").setLevel(logging.WARNING)
            most = self._max_connections
            limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
            # No compression: a few bytes could become gigabytes.
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | self.endpoint.headers
            self._http = httpx.AsyncClient(limits=limits, timeout=None, headers=headers)
        return self._http

    def _complain(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        why = f"HTTP {status}: {self._message(content)}"
        if status in (408, 429) or status >= 500:
            raise _MayPass(why, _retry_after_s(headers.get("retry-after", "")))
        raise NoVerdict(f"{self.endpoint.model} was not asked: {why}")

    def _text(self, content: bytes) -> str:
        """The text of a chat completion; its tokens are counted whether it has one or not."""
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            raise _MayPass(f"the reply is not JSON: {self._message(content)}") from None
        if isinstance(reply, dict):
            self.usage.add(self.endpoint.model, reply.get("usage"))
        try:
            choice = reply["choices"][0]
            text, ending = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _MayPass(f"the reply is no chat completion: {self._message(content)}") from None
        if ending == "length":
            raise _MayPass(f"the reply was cut off after llm_judge_max_tokens={self._max_tokens}; raise it")
        if ending == "content_filter" or not isinstance(text, str):
            raise _MayPass(f"the reply has no text (finish_reason {ending})")
        return text

    def _message(self, content: bytes) -> str:
        """What a server says is wrong, at most a few lines of it."""
        text = content[: 1 << 16].decode(errors="replace").strip()
        try:
            reply = json.loads(text)
            error = reply.get("error", reply)
            text = str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
        except (ValueError, RecursionError, AttributeError):
            pass
        return self._without_key(text)[:_SHOWN] or "(nothing)"

    def _without_key(self, message: str) -> str:
        secret = self.endpoint.secret
        return message.replace(secret, "(key)") if secret else message


def _retry_after_s(value: str) -> float:
    """Seconds that the server wants us to wait: a number or a date, within bounds; 0 for anything else."""
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(wait_s, 0.0), _LONGEST_WAIT_S) if math.isfinite(wait_s) else 0.0
