"""How the nodes of a run find each other, agree, and notice that one has gone: a connection of each with node 0.

Messages are JSON objects, one a line. A connection that closes is a launcher that has ended; the kernel closes that of a
machine that no longer answers (`SILENCE_S`). Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgrpo.config import ConfigError
from mgrpo.run.nodes.place import Place

Message = dict[str, Any]
Event = tuple[int, Message | None]
"""Which node, and what it says; None: it has gone."""

SILENCE_S = 30
"""How long a machine may not answer the kernel's probes."""
HANDSHAKE_S = 10.0
SEND_S = 10.0
MAX_LINE_BYTES = 1 << 20
RETRY_S = 0.5


class MeetingError(RuntimeError):
    """Nodes have not come, or went away."""


class _Link:
    """One connection. A thread reads it; the main thread writes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("rb")
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENCE_S // 3),
            ("TCP_KEEPINTVL", SILENCE_S // 6),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * SILENCE_S),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def say(self, message: Message) -> None:
        """Send; whoever has gone is noticed by the reader."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Message:
        """The next message.

        Raises:
            EOFError: the connection is closed.
            ValueError: it is not a message.
        """
        line = self.lines.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the connection was closed")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def follow(self, rank: int, events: queue.SimpleQueue[Event]) -> None:
        """Pass on what comes until the connection ends."""
        self.connection.settimeout(None)
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                events.put((rank, self.hear()))
        events.put((rank, None))

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Meeting:
    """Node 0's end: it opens the door at `place.head`."""

    def __init__(self, place: Place, about: Mapping[str, Any], *, secret: str | None) -> None:
        """
        Args:
            about: what the others are compared with, see `wait`.
            secret: known to all nodes; None: whoever reaches the port may take part.
        """
        self.place, self.secret = place, secret
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.about: dict[int, Mapping[str, Any]] = {0: about}
        """What each node that has come says of itself."""
        self.address = _resolve(place)
        """Of node 0, as the others reach it."""
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._door = self._open()
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def _open(self) -> socket.socket:
        address = self.address
        if address.startswith("127.") and self.place.head != address and self.place.nodes > 1:
            # A machine may know its own name as a loopback address: how the others reach it shows when they come.
            address = ""
        try:
            return socket.create_server((address, self.place.port), backlog=self.place.nodes)
        except OSError as err:
            remedy = (
                f"the port is taken: choose another, --head {self.place.head}:PORT"
                if err.errno == errno.EADDRINUSE
                else "expected the name or an address of node 0's own machine"
            )
            raise ConfigError(
                [f"--head={self.place.head}:{self.place.port}: cannot be opened ({err.strerror}); {remedy}"]
            ) from err

    def wait(self, timeout_s: float) -> None:
        """Wait until all nodes have come.

        Raises:
            MeetingError: naming those that have not come, or one that has gone again.
        """
        deadline = time.monotonic() + timeout_s
        while len(self.about) < self.place.nodes:
            try:
                rank, message = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(self.place.nodes)) - self.about.keys())
                raise MeetingError(
                    f"node {', '.join(map(str, missing))} of {self.place.nodes} has not come to "
                    f"{self.place.head}:{self.place.port} within --timeout {timeout_s:g} s; see its output, and whether a "
                    "firewall closes the port"
                ) from None
            if message is None:
                raise MeetingError(f"{self.name(rank)} has gone before all nodes had come")
            if "twice" in message:
                raise MeetingError(f"node {rank} has come twice, from {self.name(rank)} and from {message['twice']}")
            self.about[rank] = message

    def name(self, rank: int) -> str:
        """A node as the subject of a sentence."""
        host = self.about.get(rank, {}).get("host")
        return f"node {rank} ({host})" if host else f"node {rank}"

    @property
    def connected(self) -> set[int]:
        """The other nodes that have come and not gone."""
        with self._lock:
            return set(self._links)

    def say(self, message: Message) -> None:
        """To all other nodes."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.say(message)

    def close(self) -> None:
        """End it; the others take it for the end of node 0."""
        self._door.close()
        with self._lock:
            for link in self._links.values():
                link.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._door.accept()
                threading.Thread(target=self._greet, args=(_Link(connection),), name="node", daemon=True).start()

    def _greet(self, link: _Link) -> None:
        nonce = secrets.token_hex(16)
        link.say({"nonce": nonce, "is_secret": self.secret is not None})
        try:
            hello = link.hear()
            rank, about = int(hello["rank"]), dict(hello["about"])
            is_known = hmac.compare_digest(str(hello["proof"]), _proof(self.secret, nonce, rank))
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            link.close()  # something else that knocks at ports
            return
        if not is_known or not 0 < rank < self.place.nodes:
            what = "RAY_AUTH_TOKEN differs from node 0's" if not is_known else f"there are {self.place.nodes} nodes"
            link.say({"problems": [f"node {rank} is refused: {what}"]})
            link.close()
            return
        with self._lock:
            is_second = rank in self._links
            self._links.setdefault(rank, link)
        if is_second:
            link.say(
                {"problems": [f"node {rank} has come twice; expected one process a node, each with its own number"]}
            )
            self.events.put((rank, {"twice": about.get("host", "")}))
            link.close()
            return
        self.address = link.connection.getsockname()[0]
        self.events.put((rank, about))
        link.follow(rank, self.events)
        with self._lock:
            del self._links[rank]


class Guest:
    """The other nodes' end."""

    def __init__(self, place: Place, about: Callable[[str], dict[str, Any]], *, secret: str | None, timeout_s: float):
        """Come to node 0, which may start later.

        Args:
            about: what this node says of itself, given the address of its end of the connection.
        Raises:
            MeetingError: node 0 has not answered within `timeout_s`.
            ConfigError: it refuses this node.
        """
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link, welcome = self._reach(place, timeout_s)
        if welcome["is_secret"] and secret is None:
            raise ConfigError(
                ["RAY_AUTH_TOKEN is set on node 0 and missing here; expected the same on all nodes, or none"]
            )
        proof = _proof(secret if welcome["is_secret"] else None, welcome["nonce"], place.rank)
        told = about(self._link.connection.getsockname()[0])
        self.address = told["address"]
        """Of this node, as the others reach it."""
        self._link.say({"rank": place.rank, "proof": proof, "about": told})
        threading.Thread(target=self._link.follow, args=(0, self.events), name="node 0", daemon=True).start()

    @staticmethod
    def _reach(place: Place, timeout_s: float) -> tuple[_Link, Message]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                link = _Link(socket.create_connection((place.head, place.port), timeout=HANDSHAKE_S))
                return link, link.hear()
            except (OSError, EOFError, ValueError) as err:
                if time.monotonic() > deadline:
                    raise MeetingError(
                        f"node 0 has not answered at --head {place.head}:{place.port} within --timeout {timeout_s:g} s "
                        f"({err}); see its output, and whether a firewall closes the port"
                    ) from err
            time.sleep(RETRY_S)

    def say(self, message: Message) -> None:
        """To node 0."""
        self._link.say(message)

    def close(self) -> None:
        """Node 0 takes it for the end of this node."""
        self._link.close()


def differences(about: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What has to be equal on all nodes and is not, one sentence each, by what each says under `same`."""
    found = []
    for name, expected in about[0]["same"].items():
        others = {rank: told["same"].get(name) for rank, told in about.items() if told["same"].get(name) != expected}
        if others:
            values = ", ".join(
                f"{value} on node {rank} ({about[rank]['host']})" for rank, value in sorted(others.items())
            )
            found.append(f"{name} differs: {expected} on node 0, {values}; expected the same on all nodes")
    return found


def _proof(secret: str | None, nonce: str, rank: int) -> str:
    return hmac.digest((secret or "").encode(), f"{nonce} {rank}".encode(), "sha256").hex()


def _resolve(place: Place) -> str:
    """The address of `place.head`; a pod's name may be unknown for some seconds."""
    for is_last in (*[False] * 60, True):
        try:
            return socket.gethostbyname(place.head)
        except OSError as err:
            if is_last:
                raise ConfigError(
                    [f"--head={place.head}: {err.strerror}; expected the name or an address of node 0's machine"]
                ) from err
        time.sleep(RETRY_S)
    raise AssertionError("unreachable")
