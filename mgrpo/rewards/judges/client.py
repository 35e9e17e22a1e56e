"""Requests to one judge: attempts, a time limit for each, and counts of their usage. HTTP is the `openai` client's.

A question is one user message, and a reader makes a verdict of the reply's text. Transient failures are retried: time-outs,
broken connections, 408, 429, 5xx, and replies that cannot be read. The library's own retries are off: each attempt has its
own seed here, is counted, and has one time limit from its connection to the last byte.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from mgrpo.rewards.judges.endpoint import Endpoint
from mgrpo.rewards.judges.replies import Unreadable

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

ATTEMPTS = 3
# Bounds Retry-After: a server may request a longer wait than a training step can take.
_LONGEST_WAIT_S = 30.0
_MOST_BYTES = 4 << 20
_SHOWN = 300
# OpenAI's reasoning models refuse every temperature but their own.
_FIXED_TEMPERATURE = re.compile(r"(o[0-9]|gpt-5)")


class NoVerdict(RuntimeError):
    """The judge gave none; the message has the reason."""


class _MayPass(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(slots=True, kw_only=True)
class Usage:
    """Sums since the start over every attempt, including those without a verdict, which are billed as well."""

    requests: int = 0
    """Sent, with or without a reply."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reported: object) -> None:
        """Count the `usage` field of a reply; a server that reports none adds nothing."""
        if isinstance(reported, dict):
            self.prompt_tokens += _count(reported.get("prompt_tokens"))
            self.completion_tokens += _count(reported.get("completion_tokens"))


class ChatClient:
    """Calls one model; belongs to the event loop that first uses it. `close` it there."""

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
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Opens nothing.

        Args:
            timeout_s: for one attempt, from its connection to the last byte of the reply.
            max_connections: requests under way at once; others wait, and their time limits start after the wait.
            backoff_s: wait after the first failed attempt; twice as long after the second.
            sleep: waits so many seconds.
        """

        self.usage = Usage()
        self.endpoint = endpoint
        self.backoff_s = backoff_s
        self._sleep = sleep
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_connections)
        self._openai: openai.AsyncOpenAI | None = None

    async def ask(self, prompt: str, read: Callable[[str], T]) -> T:
        """The verdict that `read` finds in the reply's text; it raises `Unreadable` for a reply without one.

        Raises:
            NoVerdict: the server refused the request, or no attempt came to a verdict.
        """
        failure: Exception | None = None
        for attempt in range(ATTEMPTS):
            wait_s = 0.0
            try:
                return read(self._text(await self._reply(prompt, attempt)))
            except Unreadable as err:
                failure = err
            except _MayPass as err:
                failure, wait_s = err, err.wait_s
            if attempt < ATTEMPTS - 1:
                await self._sleep(max(wait_s, self.backoff_s * 2**attempt))
        raise NoVerdict(f"{self.endpoint.model} gave no verdict in {ATTEMPTS} attempts; the last one: {failure}")

    async def close(self) -> None:
        """Close the connections; the client may be used again, and then opens new ones."""
        client, self._openai = self._openai, None
        if client is not None:
            await client.close()

    async def _reply(self, prompt: str, attempt: int) -> bytes:
        """The reply's body, or its beginning if it is longer than `_MOST_BYTES`."""
        import openai

        async with self._slots:
            self.usage.requests += 1
            try:
                return await asyncio.wait_for(self._post(prompt, attempt), self._timeout_s)
            except asyncio.TimeoutError:
                raise _MayPass(f"no reply within {self._timeout_s:g} s") from None
            except openai.APIStatusError as err:
                raise self._refusal(err) from None
            except openai.APIConnectionError as err:  # replies that cannot be decoded as well
                cause = err.__cause__ or err
                raise _MayPass(self._without_key(f"{type(cause).__name__}: {cause}")) from err

    async def _post(self, prompt: str, attempt: int) -> bytes:
        create = self._open().chat.completions.with_raw_response.create
        response = await create(**self._request(prompt, attempt), extra_headers=self.endpoint.headers())
        return response.content

    def _request(self, prompt: str, attempt: int) -> dict[str, Any]:
        """The arguments; with the same seed in each attempt an unreadable reply would come back word for word."""
        request = {"model": self.endpoint.model, "messages": [{"role": "user", "content": prompt}], "seed": attempt}
        newer = self.endpoint.is_openai
        request["max_completion_tokens" if newer else "max_tokens"] = self._max_tokens
        if not (newer and _FIXED_TEMPERATURE.match(self.endpoint.model)):
            request["temperature"] = self._temperature
        return request

    def _open(self) -> openai.AsyncOpenAI:
        if self._openai is None:
            # They log every request at the level on which the program reports its steps.
            for library in ("httpx", "httpx2", "openai"):
                logging.getLogger(library).setLevel(logging.WARNING)
            self._openai = self.endpoint.client(_MOST_BYTES)
        return self._openai

    def _refusal(self, err: openai.APIStatusError) -> Exception:
        why = f"HTTP {err.status_code}: {self._message(err.response.content)}"
        if err.status_code in (408, 429) or err.status_code >= 500:
            return _MayPass(why, _retry_after_s(err.response.headers.get("retry-after", "")))
        return NoVerdict(f"{self.endpoint.model} was not asked: {why}")

    def _text(self, content: bytes) -> str:
        """The text of a chat completion; its tokens are counted also without one."""
        if len(content) > _MOST_BYTES:
            raise _MayPass(f"the reply is longer than {_MOST_BYTES:,} bytes")
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            raise _MayPass(f"the reply is not JSON: {self._message(content)}") from None
        if isinstance(reply, dict):
            self.usage.add(reply.get("usage"))
        try:
            choice = reply["choices"][0]
            text, ending = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _MayPass(f"the reply is not a chat completion: {self._message(content)}") from None
        if ending == "length":
            raise _MayPass(f"the reply was cut off after llm_judge_max_tokens={self._max_tokens}; raise it")
        if ending == "content_filter" or not isinstance(text, str):
            raise _MayPass(f"the reply has no text (finish_reason {ending})")
        return text

    def _message(self, content: bytes) -> str:
        """The server's own words about an error, at most a few lines."""
        text = content[: 1 << 16].decode(errors="replace").strip()
        try:
            reply = json.loads(text)
            error = reply.get("error", reply)
            text = str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
        except (ValueError, RecursionError, AttributeError):
            pass
        return self._without_key(text)[:_SHOWN] or "(nothing)"

    def _without_key(self, message: str) -> str:
        return message.replace(self.endpoint.key, "(key)") if self.endpoint.key else message


def _retry_after_s(value: str) -> float:
    """Seconds until the next attempt as the server requests, given as a number or a date, within bounds; 0 for anything else."""
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(wait_s, 0.0), _LONGEST_WAIT_S) if math.isfinite(wait_s) else 0.0


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) and not isinstance(value, bool) else 0
