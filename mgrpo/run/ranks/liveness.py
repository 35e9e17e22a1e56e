"""Heartbeats of all learners with their place in the work, so that an error names the rank that hangs.

Rank 0 has a connection to each other rank, which a thread on each end serves. A dead process closes its connection; a stopped
one sends no more heartbeats; one in an endless loop sends its place. Collectives alone would wait for hours, and then name no
rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgrpo.processes.tcp_links import MAX_STRANGERS, ROUND_S, Message, TcpLink, TcpLinks, reach

BEAT_S = 2.0
SILENCE_S = 50.0
"""Seconds without a heartbeat after which a rank counts as hung; below the time-out of rank 0's messages, which names no rank."""
MOVED_BYTES = 1 << 20
"""Bytes read or written between two heartbeats that count as progress: the rank loads or saves."""
WAITING = (
    "torch.distributed.distributed_c10d",
    "megatron.core.pipeline_parallel.p2p_communication",
    "mgrpo.sync.group",
    "mgrpo.sync.shared",
    "mgrpo.sync.joining",
    "mgrpo.sync.transport",
    "mgrpo.sync.channel",
    "mgrpo.sync.nodes.node_rounds",
    "mgrpo.sync.nodes.nodes_sender",
    "mgrpo.run.ranks.lead",
)
"""Modules whose functions wait for other ranks or for rank 0's work, with time limits of their own."""


class Pulse:
    """This rank's place in its work. The main thread calls `at`; any thread may read it."""

    def __init__(self) -> None:
        self.part = "starting"
        self.count = 0
        self._main = threading.main_thread().ident
        self._moved = 0
        self._looked = self._used = 0.0
        self._clock = time.pthread_getcpuclockid(self._main or 0)

    def at(self, part: str) -> None:
        """Record that a part of the work begins."""
        self.part = part
        self.go_on()

    def go_on(self) -> None:
        """Record progress of the work."""
        self.count += 1

    def state(self) -> dict[str, Any]:
        """Content of a heartbeat: the part, a count of progress, the main thread's line, and `waits`: it waits for other ranks."""
        moved = _bytes_moved()
        if moved - self._moved > MOVED_BYTES:
            self.count += 1
        self._moved = moved
        now, used = time.monotonic(), time.clock_gettime(self._clock)
        is_idle = used - self._used < 0.2 * (now - self._looked)
        self._looked, self._used = now, used
        place, waits = _place(self._main, is_idle=is_idle)
        return {"part": self.part, "count": self.count, "place": place, "waits": waits}


@dataclass(slots=True, kw_only=True)
class OtherRank:
    """The last known state of another rank, or of this one."""

    who: str
    pid: int
    host: str
    state: dict[str, Any] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    has_left: bool = False

    def update(self, state: dict[str, Any]) -> None:
        """Store the state of a heartbeat."""
        self.heard = time.monotonic()
        if state.get("count") != self.state.get("count"):
            self.moved = self.heard
        self.state = state

    @property
    def where(self) -> str:
        """The rank's place, for the end of a sentence."""
        return f"{self.state.get('part', 'starting')}, {self.state.get('place', 'place unknown')}"


class Liveness:
    """This rank's end of the heartbeats. Call `leave` before the rank ends."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_failure: Callable[[str], None],
        on_goodbye: Callable[[], None],
    ) -> None:
        """
        Args:
            timeout_s: `learner_timeout`.
            on_failure: called at most once, from a thread, with the failed rank and the failure in words.
            on_goodbye: called from a thread when another rank ends the run and reports why itself.
        """
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.on_failure, self.on_goodbye = on_failure, on_goodbye
        self.pulse = Pulse()
        self.own = OtherRank(who=f"rank {rank}", pid=os.getpid(), host=socket.gethostname())
        self.peers: dict[TcpLink, OtherRank] = {}
        self._links = TcpLinks(
            "watch",
            on_message=self._heard,
            on_lost=self._lost,
            on_round=self._round,
            on_error=lambda err: self._fail(f"the watch of rank {rank} has failed: {err!r}", []),
            send_s=1.0,
            round_s=min(ROUND_S, BEAT_S),
        )
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._known: set[int] = set()
        self._begun = self._last_round = self._next_beat = time.monotonic()

    def listen(self, host: str) -> str:
        """Rank 0: start, and return the invitation with which the others `connect`."""
        listener = socket.create_server((host, 0), backlog=self.world_size + MAX_STRANGERS)
        secret = secrets.token_hex(16)
        self._links.listen(listener, secret=secret, refusal=self._refusal)
        self._links.start()
        return json.dumps([host, listener.getsockname()[1], secret])

    def connect(self, invitation: str) -> None:
        """The other ranks: connect to rank 0, and start.

        Raises:
            ConnectionError: rank 0 cannot be reached at the address in the message.
        """
        host, port, secret = json.loads(invitation)
        try:
            link, nonce, _ = reach((host, port), timeout_s=min(SILENCE_S, self.timeout_s))
        except (OSError, ValueError) as err:
            raise ConnectionError(
                f"rank 0 does not answer at {host}:{port}: {err}; the machines of a run must be able to connect to any port of "
                "each other"
            ) from err
        self.peers[link] = OtherRank(who="rank 0", pid=0, host="")
        self._links.join(link)
        link.prove(secret, nonce, self.rank)
        link.send(self._name())
        self._links.start()

    def leave(self, *, is_failing: bool) -> None:
        """Announce the end of this rank, which reports a failure itself. From any thread."""
        if not self._closing.is_set():
            self._closing.set()
            for link in list(self.peers):
                link.send({"bye": is_failing})
            self._links.stop()

    def has_other_cause(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; True if another rank ends the run and reports why, or its failure was reported here."""
        return self._ended.wait(timeout_s)

    def _name(self) -> dict[str, Any]:
        return {"pid": self.own.pid, "host": self.own.host}

    def _refusal(self, number: int, is_known: bool) -> Message:
        return {} if is_known and 0 < number < self.world_size else {"refused": True}

    def _round(self) -> None:
        now = time.monotonic()
        if (
            now - self._last_round > BEAT_S + 5
        ):  # this process was stopped itself: the others' messages are still unread
            for peer in self.peers.values():
                peer.heard = peer.moved = now
            self.own.moved = now
        self._last_round = now
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._beat()

    def _beat(self) -> None:
        self.own.update(self.pulse.state())
        for link, peer in list(self.peers.items()):
            if not peer.has_left:
                # A rank that does not read is found by its missing heartbeats.
                link.send({"state": self.own.state, **self._name()})
        if (failure := self._failure()) is not None:
            self._fail(*failure)

    def _failure(self) -> tuple[str, list[OtherRank]] | None:
        """Message about a failed rank, and the ranks that caused it; None: no failure."""
        now, silence = time.monotonic(), min(SILENCE_S, self.timeout_s)
        alive = [peer for peer in self.peers.values() if not peer.has_left]
        for peer in alive:
            if now - peer.heard > silence:
                return (
                    f"{_named(peer)} has not answered for {silence:g} s: its process is stopped or its machine is gone; "
                    f"it was last in {peer.where}"
                ), [peer]
        if self.rank != 0:
            return None
        if (missing := set(range(1, self.world_size)) - self._known) and now - self._begun > self.timeout_s:
            numbers = ", ".join(map(str, sorted(missing)))
            return f"rank {numbers} has not come within learner_timeout={self.timeout_s:g} s of the start", []
        ranks = (self.own, *alive)
        late = [peer for peer in ranks if now - peer.moved > self.timeout_s]
        stuck = [peer for peer in late if not peer.state.get("waits")]
        if not stuck and len(late) == len(ranks):  # all wait for each other
            stuck = late
        if not stuck:  # those that are late wait for one that works, or that will be late in a moment
            return None
        sentences = [f"{_named(peer)} is in {peer.where}" for peer in stuck]
        return (
            f"{stuck[0].who} has made no progress within learner_timeout={self.timeout_s:g} s: {'; '.join(sentences)}; raise "
            "learner_timeout if the work is that long"
        ), stuck

    def _fail(self, reason: str, culprits: list[OtherRank]) -> None:
        if self._ended.is_set() or self._closing.is_set():
            return
        self._ended.set()
        for link in list(self.peers):
            link.send({"bye": True})
        for peer in culprits:
            # A stopped process would keep the launcher waiting.
            if peer is not self.own and peer.pid and peer.host == self.own.host:
                with contextlib.suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
        self.on_failure(reason)

    def _heard(self, link: TcpLink, message: Message) -> None:
        if link not in self.peers:
            assert link.number is not None, "it has proved that it belongs to the run"
            self.peers[link] = OtherRank(who=f"rank {link.number}", pid=0, host="")
            self._known.add(link.number)
        peer = self.peers[link]
        if "pid" in message:
            peer.pid, peer.host = int(message["pid"]), str(message["host"])
        if "state" in message:
            peer.update(message["state"])
        peer.heard = time.monotonic()
        if "bye" in message:
            peer.has_left = True
            if message["bye"] and not self._ended.is_set():
                self._ended.set()
                self.on_goodbye()

    def _lost(self, link: TcpLink) -> None:
        """Handle a closed connection: after a goodbye, or because the process has died."""
        peer = self.peers.pop(link)
        # Rank 1 alone reports the end of rank 0.
        if not peer.has_left and self.rank <= 1:
            self._fail(f"{_named(peer)} has ended without a word, as if killed; it was last in {peer.where}", [])


def _named(peer: OtherRank) -> str:
    return f"{peer.who} (process {peer.pid} on {peer.host})"


def _place(thread: int | None, *, is_idle: bool) -> tuple[str, bool]:
    """The thread's innermost line outside libraries, and True if it is inside a collective.

    An idle thread whose innermost line is Megatron's or torch's also counts: Megatron waits for a collective.
    """
    frame = sys._current_frames().get(thread or 0)
    innermost = frame.f_code.co_filename if frame is not None else ""
    waits, outer = is_idle and any(name in innermost for name in ("/megatron/", "/torch/")), None
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_globals.get("__name__") in WAITING:
            waits = True
        elif not any(name in file for name in ("/site-packages/", "/lib/python3", "<frozen")):
            outer = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
            break
        frame = frame.f_back
    return outer or "place unknown", waits


def _bytes_moved() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
