"""JSON messages over TCP, one object a line, between the processes of a run; one thread reads all connections of a process.

The listening process has the number 0, the others further numbers. It sends each connection a welcome, and the other
end answers with its number and a proof that it holds the secret. Until a first message has followed, the connection is a
stranger's: there are at most `MAX_STRANGERS`, the oldest is closed for a new one, each has `GREETING_S` in all, and only the
proof is read of its first `MAX_PROOF_BYTES`. Standard library only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Refusal = Callable[[int, bool], Message]
"""Number and validity of its proof -> the answer to a refused connection; empty: it is admitted."""

MAX_LINE_BYTES = 1 << 20
"""A longer message ends its connection."""
MAX_PROOF_BYTES = 128
MAX_STRANGERS = 128
GREETING_S = 10.0
ROUND_S = 0.5
SILENCE_S = 30
"""Seconds without an answer to the kernel's probes after which a connection is closed."""
_PROOF = re.compile(rb"([0-9]{1,9}) ([0-9a-f]{64})")
_CHUNK = 1 << 16


class TcpLink:
    """One connection. Any thread may `send`; received messages go to the `TcpLinks` that made it."""

    def __init__(self, connection: socket.socket, number: int | None = None) -> None:
        """
        Args:
            number: the other end's; None until its proof.
        """
        self.connection, self.number = connection, number
        self.buffer = bytearray()
        self.nonce, self.deadline = secrets.token_hex(16), time.monotonic() + GREETING_S
        self.is_refused = False
        self._is_writable, self._lock = True, threading.Lock()
        notice_silence(connection)

    @property
    def own_address(self) -> str:
        """The address of this end."""
        return self.connection.getsockname()[0]

    def send(self, message: Message) -> None:
        """Send; errors are left to the reader, which notices an end of the connection."""
        self._write(json.dumps(message).encode())

    def prove(self, secret: str | None, nonce: str, number: int) -> None:
        """Answer a welcome."""
        self._write(f"{number} {_proof(secret, nonce, number)}".encode())

    def refuse(self, answer: Message) -> None:
        """Send a last message. Later input is not read as messages."""
        self.is_refused = True
        self.send(answer)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End the connection in both directions; its reader closes it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _write(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            # Part of a line may have gone before an error.
            if self._is_writable:
                self._is_writable = False
                self.connection.sendall(line + b"\n")
                self._is_writable = True


class TcpLinks:
    """The connections of one process. Call `listen` or `join`, then `start`."""

    def __init__(
        self,
        name: str,
        *,
        on_message: Callable[[TcpLink, Message], None],
        on_lost: Callable[[TcpLink], None],
        on_round: Callable[[], None] = lambda: None,
        on_error: Callable[[Exception], None] | None = None,
        send_s: float = 10.0,
        round_s: float = ROUND_S,
    ) -> None:
        """All functions are called in the thread that reads. An error of `on_message` ends that connection.

        Args:
            name: the thread's.
            on_lost: called with an admitted or joined connection that has ended.
            on_round: called after each round of reading, at least every `round_s` seconds.
            on_error: called with the error that ended the thread; None: the thread raises it.
            send_s: limit of one `send`.
        """
        self.on_message, self.on_lost, self.on_round, self.on_error = on_message, on_lost, on_round, on_error
        self.send_s, self.round_s = send_s, round_s
        self._listener: socket.socket | None = None
        self._secret: str | None = None
        self._refusal: Refusal = lambda number, is_known: {}
        self._selector = selectors.DefaultSelector()
        self._links: dict[TcpLink, None] = {}
        self._strangers: dict[TcpLink, None] = {}
        """Links that have not been admitted, the oldest first."""
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(self, listener: socket.socket, *, secret: str | None, refusal: Refusal) -> None:
        """Take connections.

        Args:
            secret: shared by all processes of the run; None: any process that reaches the port may take part.
        """
        listener.setblocking(False)
        self._listener, self._secret, self._refusal = listener, secret, refusal
        self._selector.register(listener, selectors.EVENT_READ)

    def join(self, link: TcpLink) -> None:
        """Read a connection of `reach`."""
        link.connection.settimeout(self.send_s)
        self._links[link] = None
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more. The connections stay open, so that the last messages arrive. Any thread may call."""
        self._has_stopped.set()

    def close(self) -> None:
        """Close all connections. Not from the thread that reads."""
        self.stop()
        for link in list(self._links):
            link.shut()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # which ends the wait of the thread
        self._thread.join(2 * self.round_s)
        for connection in filter(None, (self._listener, *(link.connection for link in list(self._links)))):
            connection.close()

    def _run(self) -> None:
        try:
            while not self._has_stopped.is_set():
                for key, _ in self._selector.select(self.round_s):
                    self._accept() if key.data is None else self._read(key.data)
                for link in [link for link in self._strangers if time.monotonic() > link.deadline]:
                    self._drop(link)
                self.on_round()
        except Exception as err:
            if self.on_error is None:
                raise
            self.on_error(err)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            link = TcpLink(self._listener.accept()[0])
        except OSError:  # it has gone again, or this process has too many files open
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self.join(link)
        self._strangers[link] = None
        link.send({"nonce": link.nonce, "is_secret": self._secret is not None})

    def _read(self, link: TcpLink) -> None:
        if link not in self._links:
            return  # dropped for a new stranger in this round
        limit = MAX_PROOF_BYTES if link.number is None else MAX_LINE_BYTES
        try:
            data = link.connection.recv(min(_CHUNK, limit + 1 - len(link.buffer)))
        except OSError:
            data = b""
        if not data:
            self._drop(link)
            return
        try:
            self._take(link, data, limit)
        except Exception:  # no input may end the thread
            self._drop(link)

    def _take(self, link: TcpLink, data: bytes, limit: int) -> None:
        if link.is_refused:
            return
        link.buffer += data
        while (end := link.buffer.find(b"\n")) >= 0 and not link.is_refused:
            line = bytes(link.buffer[:end])
            del link.buffer[: end + 1]
            if link.number is None:
                self._greet(link, line)
                continue
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            self.on_message(link, message)
            if not link.is_refused:
                self._strangers.pop(link, None)
        if len(link.buffer) > limit:
            raise ValueError(f"a line of more than {limit} bytes")

    def _greet(self, link: TcpLink, line: bytes) -> None:
        """Take the proof, which is compared as it came."""
        link.number = number = number_of(line)
        is_known = is_proof(line, self._secret, link.nonce)
        if answer := self._refusal(number, is_known):
            link.refuse(answer)

    def _drop(self, link: TcpLink) -> None:
        is_stranger = link in self._strangers
        self._strangers.pop(link, None)
        del self._links[link]
        self._selector.unregister(link.connection)
        link.connection.close()
        if not is_stranger:
            self.on_lost(link)


def reach(address: tuple[str, int], *, timeout_s: float) -> tuple[TcpLink, str, bool]:
    """Connection with the process that listens there, the nonce of its welcome, and True if it has a secret.

    Raises:
        OSError: it does not answer in that time.
        ValueError: another kind of server answers.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        line = b""
        while not line.endswith(b"\n"):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            # One at a time: later bytes are not for this function.
            data = connection.recv(1)
            if not data:
                raise ConnectionResetError("the connection was closed")
            line += data
            if len(line) > MAX_PROOF_BYTES:
                raise ValueError("no welcome")
        welcome = json.loads(line)
        return TcpLink(connection, number=0), str(welcome["nonce"]), bool(welcome["is_secret"])
    except (KeyError, TypeError, RecursionError) as err:
        connection.close()
        raise ValueError("no welcome") from err
    except (OSError, ValueError):
        connection.close()
        raise


def number_of(line: bytes) -> int:
    """Number in the other end's proof; ValueError if it is not a proof."""
    found = _PROOF.fullmatch(line)
    if found is None:
        raise ValueError("no proof")
    return int(found[1])


def is_proof(line: bytes, secret: str | None, nonce: str) -> bool:
    """True if an answer to the welcome proves that the other end holds the secret."""
    found = _PROOF.fullmatch(line)
    return found is not None and hmac.compare_digest(found[2], _proof(secret, nonce, int(found[1])).encode())


def notice_silence(connection: socket.socket) -> None:
    """Make the kernel close it `SILENCE_S` seconds after the other machine has gone silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S // 3),
        ("TCP_KEEPINTVL", SILENCE_S // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(secret: str | None, nonce: str, number: int) -> str:
    return hmac.digest((secret or "").encode(), f"{nonce} {number}".encode(), "sha256").hex()
