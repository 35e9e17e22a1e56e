"""What rank 0 tells the other learners: a small header that opens every step, and arrays. No pickled objects.

All of it runs over a gloo group of its own, so that a rank that waits for rank 0 gives up after `timeout_s` and not after
the hours a collective of the training may take.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist


class Action(enum.IntEnum):
    """What the learners do next."""

    RUN = 0
    """Rank 0 has what the others wait for."""
    HEARTBEAT = 1
    """It has not yet, but is alive."""
    ERROR = 2
    """The run is over; a message follows."""
    STOP = 3
    """The run saves its state and ends."""


class Channel:
    """One way, from rank 0 to all learners. Every rank makes one, in the same order, and calls the same methods."""

    def __init__(self, *, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def action(self, action: Action | None = None, message: str = "") -> Action:
        """Rank 0 gives the next action, the others (`None`) receive it; ERROR raises RuntimeError(message) on them."""
        head = torch.tensor([action if self.rank == 0 else 0, len(message.encode())], dtype=torch.int64)
        dist.broadcast(head, 0, group=self.group)
        received = Action(int(head[0]))
        if received is Action.ERROR:
            text = self._bytes(message.encode() if self.rank == 0 else None, int(head[1]))
            if self.rank != 0:
                raise RuntimeError(text.decode())
        return received

    def arrays(self, arrays: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Rank 0's named arrays, on every rank: two collectives, whatever their number."""
        if self.rank == 0:
            flat = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            index = json.dumps([[name, str(array.dtype), array.shape] for name, array in flat.items()]).encode()
            body = b"".join(array.tobytes() for array in flat.values())
            head = torch.tensor([len(index), len(body)], dtype=torch.int64)
            dist.broadcast(head, 0, group=self.group)
            self._bytes(index + body, len(index) + len(body))
            return flat
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, 0, group=self.group)
        index_size, body_size = head.tolist()
        data = self._bytes(None, index_size + body_size)
        received, offset = {}, index_size
        for name, dtype, shape in json.loads(data[:index_size]):
            count = int(np.prod(shape, dtype=np.int64))
            received[name] = np.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)
            offset += received[name].nbytes
        return received

    def fail(self, message: str, patience_s: float = 5.0) -> None:
        """Rank 0, on its way out: tell whoever waits for an action why; gives up soon where nobody does."""
        if self.rank == 0:
            teller = threading.Thread(target=self._tell, args=(message,), daemon=True)
            teller.start()
            teller.join(patience_s)

    def _tell(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.action(Action.ERROR, message)

    def _bytes(self, data: bytes | None, size: int) -> bytes:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(buffer, 0, group=self.group)
        return data if data is not None else buffer.numpy().tobytes()
