"""Messages from rank 0 to the other learners: a small header before every step, arrays for all, and for each its part.

No pickled objects.

They have their own gloo group, so that a rank stops waiting for rank 0 after `timeout_s` and not after the hours that a
collective of the training may take.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from mgrpo.layout import Layout

CHUNK_BYTES = 1 << 22
"""Ranks pass one chunk on while the next arrives."""
SENDERS = 4
"""Threads of rank 0, each of which sends a part at a time."""

Sending = dist.Work | None


class BroadcastPart(Protocol):
    """A part for its holders from rank 0: bytes that are filled in just before they are sent."""

    num_bytes: int

    def fill(self, data: np.ndarray) -> None:
        """Write the part into `data`, `[num_bytes]` uint8."""


class Action(enum.IntEnum):
    """The learners' next action."""

    RUN = 0
    """The data that the others wait for follows."""
    HEARTBEAT = 1
    """Rank 0 is alive but not ready yet."""
    ERROR = 2
    """The run is over; a message follows."""
    STOP = 3
    """The run saves its state and ends."""
    REJOIN = 4
    """An engine that was started again gets the weights, while rank 0's work goes on."""


class BroadcastChannel:
    """A one-way channel from rank 0 to all learners. All ranks make theirs in the same order and call the same methods."""

    def __init__(self, *, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def action(self, action: Action | None = None, message: str = "") -> Action:
        """Rank 0 sends the next action, the others (`None`) receive it; ERROR raises RuntimeError(message) on them."""
        return self._header(action, message.encode())[0]

    def arrays(self, arrays: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Rank 0's named arrays, on every rank, in two collectives; the other ranks pass None. For small ones.

        Raises:
            RuntimeError: on the other ranks, rank 0's message when it sends ERROR instead.
        """
        if self.rank == 0:
            assert arrays is not None
            flat = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            index = json.dumps([[name, str(array.dtype), array.shape] for name, array in flat.items()]).encode()
            body = b"".join(array.tobytes() for array in flat.values())
            self._header(Action.RUN, sizes=(len(index), len(body)))
            self._bytes(index + body, len(index) + len(body))
            return flat
        _, index_size, body_size = self._header()
        data = self._bytes(None, index_size + body_size)
        received, offset = {}, index_size
        for name, dtype, shape in json.loads(data[:index_size]):
            count = int(np.prod(shape, dtype=np.int64))
            received[name] = np.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)
            offset += received[name].nbytes
        return received

    def scatter(self, layout: Layout, parts: Sequence[BroadcastPart] = ()) -> np.ndarray:
        """On every rank the part of its data-parallel rank, `[bytes]` uint8; rank 0 passes all of them, the others none.

        Rank 0 sends every part once, about in order, to the first of its holders, who pass it on along a binary tree. The last
        one has to begin within the time-out.

        Raises:
            RuntimeError: on the other ranks, rank 0's message when it sends ERROR instead.
        """
        self._header(Action.RUN)
        sent = np.array([part.num_bytes for part in parts], dtype=np.int64).tobytes() if self.rank == 0 else None
        sizes = np.frombuffer(self._bytes(sent, 8 * layout.data), np.int64).tolist()
        data = layout.coordinate(self.rank).data
        holders = layout.holders(data)
        place = holders.index(self.rank)
        children, own = holders[2 * place + 1 : 2 * place + 3], np.empty(sizes[data], np.uint8)
        if self.rank == 0:
            parts[0].fill(own)
            sending = self._send(own, children)
            self._deal(layout, parts)
        else:
            sending = []
            for chunk in chunks(own):
                dist.recv(chunk, holders[(place - 1) // 2] if place else 0, group=self.group)
                sending += [dist.isend(chunk, child, group=self.group) for child in children]
        wait(sending)
        return own

    def _deal(self, layout: Layout, parts: Sequence[BroadcastPart]) -> None:
        """Rank 0's part in `scatter`, in several threads: a part's bytes are written, and copied into sockets, by one of them."""
        largest = max((part.num_bytes for part in parts[1:]), default=0)
        own = threading.local()

        def deal(number: int) -> None:
            if not hasattr(own, "buffer"):
                own.buffer = np.empty(largest, np.uint8)
            data = own.buffer[: parts[number].num_bytes]
            parts[number].fill(data)
            wait(self._send(data, layout.holders(number)[:1]))

        with ThreadPoolExecutor(SENDERS, "sender") as senders:
            for dealt in [senders.submit(deal, number) for number in range(1, len(parts))]:
                dealt.result()

    def _send(self, data: np.ndarray, ranks: Sequence[int]) -> list[Sending]:
        return [dist.isend(chunk, rank, group=self.group) for chunk in chunks(data) for rank in ranks]

    def fail(self, message: str, timeout_s: float = 5.0) -> None:
        """On rank 0: send an ERROR to ranks that wait for an action or arrays; returns after `timeout_s` where none does."""
        if self.rank == 0:
            sender = threading.Thread(target=self._send_error, args=(message,), daemon=True)
            sender.start()
            sender.join(timeout_s)

    def _send_error(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.action(Action.ERROR, message)

    def _header(
        self, action: Action | None = None, message: bytes = b"", *, sizes: tuple[int, int] = (0, 0)
    ) -> tuple[Action, int, int]:
        """The head of every message: an action and two sizes; after ERROR its message."""
        sent = [action or 0, len(message), 0] if message else [action or 0, *sizes]
        header = torch.tensor(sent if self.rank == 0 else [0, 0, 0], dtype=torch.int64)
        dist.broadcast(header, 0, group=self.group)
        number, first, second = header.tolist()
        if Action(number) is Action.ERROR:
            text = self._bytes(message if self.rank == 0 else None, first)
            if self.rank != 0:
                raise RuntimeError(text.decode())
        return Action(number), first, second

    def _bytes(self, data: bytes | None, size: int) -> bytes:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(buffer, 0, group=self.group)
        return data if data is not None else buffer.numpy().tobytes()


def chunks(data: np.ndarray) -> Iterator[torch.Tensor]:
    """Parts of `data` of at most CHUNK_BYTES, without a copy."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield torch.from_numpy(data[start : start + CHUNK_BYTES])


def wait(sending: Sequence[Sending]) -> None:
    """Wait until all have been sent, each for as long as the group's time-out."""
    for work in sending:
        assert work is not None, "a rank of the group"
        work.wait()
