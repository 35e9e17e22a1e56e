"""A page that follows runs, served on this machine: made again for a request after their files have changed.

GET / is the page, GET /version identifies the page that GET / would return now. No other path exists, so none can name a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mgrpo.telemetry.report.compare import comparison
from mgrpo.telemetry.report.page import page, whole
from mgrpo.telemetry.report.run import FOLLOWED, STATES, state_of
from mgrpo.telemetry.report.text import text

REST = 10.0
"""Pause between two pages, in multiples of the first one's CPU time: pages must not slow down a long run."""
MIN_REST_S = 1.0


class Pages:
    """The newest page about some runs. For any thread."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._lock = threading.Lock()
        self._version, self._page = "", ""
        self._due = 0.0

    def version(self) -> str:
        """A hash that identifies the page; it changes with the files, but not before the next page may be made."""
        found = hashlib.sha256()
        for folder in self.folders:
            found.update(state_of(folder)[0].encode())
            for name in FOLLOWED:
                with contextlib.suppress(OSError):
                    place = (folder / name).stat()
                    found.update(f"{name} {place.st_mtime_ns} {place.st_size} ".encode())
        with self._lock:
            return found.hexdigest() if time.monotonic() >= self._due or not self._version else self._version

    def page(self) -> str:
        """The page, made again if its files have changed."""
        version = self.version()
        with self._lock:
            if version != self._version:
                began = time.thread_time()
                self._page, self._version = self._make(version), version
                self._due = time.monotonic() + max(MIN_REST_S, REST * (time.thread_time() - began))
            return self._page

    def _make(self, version: str) -> str:
        missing = [folder for folder in self.folders if not (folder / "metrics.jsonl").is_file()]
        if missing:
            made = _waiting(missing)
        else:
            one = len(self.folders) == 1
            made = page(self.folders[0], follow="poll") if one else comparison(self.folders, follow="poll")
        return made.replace("data-follow='poll'", f"data-follow='poll' data-version='{version}'", 1)


def _waiting(folders: Sequence[Path]) -> str:
    lines = "".join(f"<li><code>{text(folder)}</code> {text(STATES[state_of(folder)[0]])}</li>" for folder in folders)
    header = (
        "<header><div class='title'><h1>Nothing to show yet</h1><span class='pill waiting'>waiting</span></div>"
        f"<p>This page goes on by itself when the first metrics are there:</p><ul>{lines}</ul></header>"
    )
    return whole("waiting for a run", header, {}, follow="poll")


class PageServer(ThreadingHTTPServer):
    """Serves the pages about some runs.

    Raises:
        OSError: the server cannot listen at the address.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = Pages(folders)
        super().__init__((host, port), Handler)
        self.is_loopback = ipaddress.ip_address(str(self.server_address[0])).is_loopback
        """True if only this machine can reach the server: then a request that names another host is an attack."""

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: a browser may close the connection."""


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    timeout = 30.0
    server_version, sys_version = "mgrpo", ""

    def do_GET(self) -> None:
        """Answer with the page or its version."""
        # A page of another site whose name leads here would otherwise read this one (DNS rebinding).
        if self.server.is_loopback and not _is_local(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine")
        elif self.path == "/":
            self._answer(self.server.pages.page, "text/html; charset=utf-8")
        elif self.path == "/version":
            self._answer(self.server.pages.version, "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, make: Callable[[], str], kind: str) -> None:
        try:
            content = make().encode()
        except Exception as err:  # files that are being written: the browser asks again
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the page cannot be made", f"{type(err).__name__}: {err}")
            return
        self.send_response(HTTPStatus.OK)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there is a request every two seconds."""


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
