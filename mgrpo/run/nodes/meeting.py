"""Rendezvous of a run's nodes: each has a connection to node 0, over which they agree and detect lost nodes.

A closed connection means that a launcher has ended; the kernel closes those of unreachable machines. Standard library only.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgrpo.config import ConfigError
from mgrpo.processes.tcp_links import GREETING_S, MAX_STRANGERS, Message, TcpLink, TcpLinks, reach
from mgrpo.run.nodes.place import Place

Event = tuple[int, Message | None]
"""A node and its message; None: the connection was lost."""

RETRY_S = 0.5


class MeetingError(RuntimeError):
    """Nodes did not connect, or were lost."""


class Meeting:
    """Node 0's end, which listens at `place.head`."""

    def __init__(self, place: Place, about: Mapping[str, Any], *, secret: str | None) -> None:
        """
        Args:
            about: node 0's own description; the others' are compared with it.
            secret: shared by all nodes; None: any process that reaches the port may take part.
        """
        self.place = place
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.about: dict[int, Mapping[str, Any]] = {0: about}
        """Description of each connected node."""
        self.address = _resolve(place)
        """Address of node 0 for the others."""
        self._nodes: dict[int, TcpLink] = {}
        self._lock = threading.Lock()
        self._links = TcpLinks("meeting", on_message=self._heard, on_lost=self._lost, on_error=self._broken)
        self._links.listen(self._open(), secret=secret, refusal=self._refusal)
        self._links.start()

    def _open(self) -> socket.socket:
        address = self.address
        if address.startswith("127.") and self.place.head != address and self.place.nodes > 1:
            # A machine's own name may resolve to a loopback address; the others' connections show the right one.
            address = ""
        try:
            return socket.create_server((address, self.place.port), backlog=self.place.nodes + MAX_STRANGERS)
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
        """Wait until all nodes have connected.

        Raises:
            MeetingError: naming the missing nodes, or one that was lost.
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
            if "cause" in message:
                raise MeetingError(f"{self.name(rank)}: {message['cause']}")
            if "twice" in message:
                raise MeetingError(f"node {rank} has come twice, from {self.name(rank)} and from {message['twice']}")
            self.about[rank] = message

    def name(self, rank: int) -> str:
        """A node's name in messages."""
        host = self.about.get(rank, {}).get("host")
        return f"node {rank} ({host})" if host else f"node {rank}"

    @property
    def connected(self) -> set[int]:
        """The other nodes that are connected."""
        with self._lock:
            return set(self._nodes)

    def say(self, message: Message) -> None:
        """Send a message to all other nodes."""
        with self._lock:
            links = list(self._nodes.values())
        for link in links:
            link.send(message)

    def close(self) -> None:
        """Close all connections, which the others treat as the end of node 0."""
        self._links.close()

    def _refusal(self, rank: int, is_known: bool) -> Message:
        if is_known and 0 < rank < self.place.nodes:
            return {}
        what = "RAY_AUTH_TOKEN differs from node 0's" if not is_known else f"there are {self.place.nodes} nodes"
        return {"problems": [f"node {rank} is refused: {what}"]}

    def _heard(self, link: TcpLink, message: Message) -> None:
        rank = link.number
        assert rank is not None, "it has come with its number"
        with self._lock:
            is_new, first = rank not in self._nodes, self._nodes.setdefault(rank, link)
        if first is not link:
            problem = f"node {rank} has come twice; expected one process a node, each with its own number"
            link.refuse({"problems": [problem]})
            self.events.put((rank, {"twice": message.get("host", "")}))
            return
        if is_new:
            self.address = link.own_address
        self.events.put((rank, message))

    def _broken(self, err: Exception) -> None:
        self.events.put((0, {"ended": 1, "cause": f"its connections with the other nodes have failed: {err!r}"}))

    def _lost(self, link: TcpLink) -> None:
        assert link.number is not None, "it has come with its number"
        with self._lock:
            del self._nodes[link.number]
        self.events.put((link.number, None))


class Guest:
    """The other nodes' end."""

    def __init__(self, place: Place, about: Callable[[str], dict[str, Any]], *, secret: str | None, timeout_s: float):
        """Connect to node 0, which may start later.

        Args:
            about: makes this node's description from the address of its end of the connection.
        Raises:
            MeetingError: node 0 has not answered within `timeout_s`.
            ConfigError: RAY_AUTH_TOKEN is set on node 0 and missing here.
        """
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link, nonce, is_secret = self._reach(place, timeout_s)
        if is_secret and secret is None:
            raise ConfigError(
                ["RAY_AUTH_TOKEN is set on node 0 and missing here; expected the same on all nodes, or none"]
            )
        self._link.prove(secret if is_secret else None, nonce, place.rank)
        told = about(self._link.own_address)
        self.address = told["address"]
        """Address of this node for the others."""
        self._link.send(told)
        self._links = TcpLinks(
            "node 0",
            on_message=lambda link, message: self.events.put((0, message)),
            on_lost=lambda link: self.events.put((0, None)),
            on_error=lambda err: self.events.put(
                (0, {"problems": [f"this node's connection with node 0 has failed: {err!r}"]})
            ),
        )
        self._links.join(self._link)
        self._links.start()

    @staticmethod
    def _reach(place: Place, timeout_s: float) -> tuple[TcpLink, str, bool]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return reach((place.head, place.port), timeout_s=GREETING_S)
            except (OSError, ValueError) as err:
                if time.monotonic() > deadline:
                    raise MeetingError(
                        f"node 0 has not answered at --head {place.head}:{place.port} within --timeout {timeout_s:g} s "
                        f"({err}); see its output, and whether a firewall closes the port"
                    ) from err
            time.sleep(RETRY_S)

    def say(self, message: Message) -> None:
        """Send a message to node 0."""
        self._link.send(message)

    def close(self) -> None:
        """Close the connection, which node 0 treats as the end of this node."""
        self._links.close()


def differences(about: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Problems of values under `same` of the nodes' descriptions that are not equal."""
    found = []
    for name, expected in about[0]["same"].items():
        others = {rank: told["same"].get(name) for rank, told in about.items() if told["same"].get(name) != expected}
        if others:
            values = ", ".join(
                f"{value} on node {rank} ({about[rank]['host']})" for rank, value in sorted(others.items())
            )
            found.append(f"{name} differs: {expected} on node 0, {values}; expected the same on all nodes")
    return found


def _resolve(place: Place) -> str:
    """Resolve `place.head`; a pod's name may be unknown for some seconds."""
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
