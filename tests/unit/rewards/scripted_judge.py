"""An OpenAI-compatible server that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

YES = "The values agree.\nFinal Decision: Yes"
"""A reply that decides."""


@dataclass(kw_only=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict
    connection: int
    """The client's port: equal where a connection was used again."""
    at: float

    @property
    def prompt(self) -> str:
        return self.body["messages"][0]["content"]


@dataclass(kw_only=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    wait_s: float = 0.0
    """Before anything is sent."""
    drip_s: float = 0.0
    """Between single bytes."""
    is_dropped: bool = False
    """The connection ends without a word."""


def says(text: str | None, *, finish_reason: str = "stop", usage: object = "default", **reply: object) -> Reply:
    """A chat completion as OpenAI's servers write it."""
    if usage == "default":
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    message = {"role": "assistant", "content": text}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": usage}
    return Reply(content=json.dumps(body).encode(), **reply)


class ScriptedJudge:
    """Answers each request by `script(request)`; a list of replies is given one by one, the last one for ever."""

    def __init__(self, script: Callable[[Request], Reply] | Reply | list[Reply]) -> None:
        if not callable(script):
            replies = script if isinstance(script, list) else [script]
            numbers = iter(range(10**9))
            script = lambda _: replies[min(next(numbers), len(replies) - 1)]  # noqa: E731
        self.script = script
        self.requests: list[Request] = []
        self.most_at_once = 0
        self.num_bytes = 0
        """Sent in bodies, including what the client has not read."""
        self._at_once = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def __enter__(self) -> ScriptedJudge:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                judge._serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        return [request.prompt for request in self.requests]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        request = Request(
            path=handler.path,
            headers={name.lower(): value for name, value in handler.headers.items()},
            body=json.loads(body),
            connection=handler.client_address[1],
            at=time.monotonic(),
        )
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.requests.append(request)
            reply = self.script(request)
        try:
            self._is_over.wait(reply.wait_s)
            with self._lock:
                self._at_once -= 1
            self._send(handler, reply)
        except OSError:
            handler.close_connection = True

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply.is_dropped:
            handler.close_connection = True
            return
        handler.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.content)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if not reply.drip_s:
            for start in range(0, len(reply.content), 1 << 16):
                self.num_bytes += handler.wfile.write(reply.content[start : start + (1 << 16)])
            return
        for byte in reply.content:
            if self._is_over.wait(reply.drip_s):
                return
            handler.wfile.write(bytes([byte]))
