"""One verifier process as the pool sees it: what was asked, what was answered, and how it is ended."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mgrpo.processes.lifetime import ending, kill_descendants, start_program

_SECRET = re.compile(r"^RAY_|_KEY$|_KEY_ID$|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class Item(NamedTuple):
    """One completion to score; the fields after the first are `verifier.Answer`'s."""

    verifier: str
    completion: str
    ground_truth: object
    prompt: str = ""
    num_tokens: int | None = None


class Worker:
    """One worker process and what is on the way to and from it. Its pipes never block."""

    def __init__(self, folders: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            folders: where modules of the user's own are found.
        """
        self.process = start_program(
            "mgrpo.rewards.worker",
            # Not the secrets of the run: what it reads is untrusted.
            environment={name: value for name, value in os.environ.items() if not _SECRET.search(name)},
            settings={},
            folders=folders,
            buffering=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to = self.process.stdin.fileno()
        self._from = self.process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._outgoing = bytearray()
        self._incoming = b""
        self.asked: deque[int] = deque()
        """Items without an answer, in the order they were asked."""
        self.num_loading = 0
        """Load requests without an answer."""
        self.heard_at = time.monotonic()
        """When the worker last said something, or was given work when it had none."""
        self.is_over = False
        """Its output has ended."""

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        return ending(self.process.returncode)

    def load(self, verifiers: Sequence[str], settings: dict, *, memory_mb: int | None = None) -> None:
        self._mark_busy()
        self.num_loading += 1
        self._send({"verifiers": list(verifiers), "settings": settings, "memory_mb": memory_mb})
        self._write()

    def ask(self, items: Sequence[tuple[int, Item]]) -> None:
        self._mark_busy()
        for index, item in items:
            self._send({"id": index, **item._asdict(), "verifier": item.verifier.lower()})
            self.asked.append(index)
        self._write()

    def exchange(self) -> None:
        """Move what the pipes take and give now."""
        self._write()
        self._read()

    def answers(self) -> list[dict]:
        """What the worker has said since the last call."""
        *lines, self._incoming = self._incoming.split(b"\n")
        if lines:
            self.heard_at = time.monotonic()
        return [json.loads(line) for line in lines]

    def events(self) -> dict[int, int]:
        """Its descriptors and what to wait for on each now; 0 is nothing."""
        return {self._from: selectors.EVENT_READ, self._to: selectors.EVENT_WRITE if self._outgoing else 0}

    def end(self) -> None:
        """Kill the process with all it started, and read the answers it gave before; a second call does nothing."""
        if self.process.stdout.closed:
            return
        # Not waited for yet, so the number cannot have gone to another process.
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGSTOP)
            kill_descendants(self.process.pid)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._read()
        self.close_pipes()

    def close_pipes(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()

    def _mark_busy(self) -> None:
        if not self.asked and not self.num_loading:
            self.heard_at = time.monotonic()

    def _send(self, message: dict) -> None:
        self._outgoing += json.dumps(message).encode() + b"\n"

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._to, self._outgoing[: 1 << 16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            # It died; its output, which ends now, says when the pool sees it.
            self._outgoing.clear()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._from, 1 << 16):
                self._incoming += chunk
            self.is_over = True
        except BlockingIOError:
            pass
