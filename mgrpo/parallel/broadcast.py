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
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from mgrpo.layout import Layout

CHUNK_BYTES = 1 << 22
"""What travels to a rank at once. Ranks pass one chunk on while the next arrives, and none waits long for its own."""


class Action(enum.IntEnum):
    """What the learners do next."""

    RUN = 0
    """The data that the others wait for follows."""
    HEARTBEAT = 1
    """Rank 0 is alive but not ready yet."""
    ERROR = 2
    """The run is over; a message follows."""
    STOP = 3
    """The run saves its state and ends."""


class Channel:
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

    def scatter(self, layout: Layout, slices: Sequence[np.ndarray] = ()) -> np.ndarray:
        """On every rank its data-parallel rank's part of rank 0's `slices`, each `[bytes]` uint8; the others pass none.

        Rank 0 sends every slice once, to the first of its holders, who pass it on along a binary tree.

        Raises:
            RuntimeError: on the other ranks, rank 0's message when it sends ERROR instead.
        """
        self._header(Action.RUN)
        sizes = np.array([len(data) for data in slices], dtype=np.int64)
        sizes = np.frombuffer(self._bytes(sizes.tobytes() or None, 8 * layout.data), np.int64)
        data = layout.coordinate(self.rank).data
        holders = layout.holders(data)
        place = holders.index(self.rank)
        own = torch.from_numpy(slices[data]) if self.rank == 0 else torch.empty(int(sizes[data]), dtype=torch.uint8)
        targets = [(child, own) for child in holders[2 * place + 1 : 2 * place + 3]]
        if self.rank == 0:
            targets += [(layout.holders(other)[0], torch.from_numpy(slices[other])) for other in range(1, layout.data)]
        sender = holders[(place - 1) // 2] if place else 0
        sending: list[dist.Work | None] = []
        for start in range(0, int(sizes.max()), CHUNK_BYTES):
            if self.rank != 0 and start < len(own):
                dist.recv(own[start : start + CHUNK_BYTES], sender, group=self.group)
            self._finish(sending)
            sending = [
                dist.isend(part[start : start + CHUNK_BYTES], rank, group=self.group)
                for rank, part in targets
                if start < len(part)
            ]
        self._finish(sending)
        return own.numpy()

    def _finish(self, sending: list[dist.Work | None]) -> None:
        for work in sending:
            assert work is not None, "a rank of the group"
            work.wait()

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
        """What comes before everything: an action and two sizes; after ERROR its message."""
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
