"""What ranks say to each other over the channel between learners."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from mgrpo.layout import Layout


def broadcast_messages(message: str) -> list[Any]:
    """What a rank receives over the channel: a heartbeat, arrays, and an error."""
    from mgrpo.parallel.broadcast import Action, BroadcastChannel

    channel = BroadcastChannel(timeout_s=20)
    is_head = dist.get_rank() == 0
    sent = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((0, 4), np.float32), "c": np.array([True])}
    received = [channel.action(Action.HEARTBEAT if is_head else None), channel.action(Action.RUN if is_head else None)]
    received += [{name: array.tolist() for name, array in channel.arrays(sent if is_head else None).items()}]
    for expected in (channel.action, channel.arrays):
        try:
            channel.action(Action.ERROR, message) if is_head else expected()
            received.append("")
        except RuntimeError as err:
            received.append(str(err))
    return received


class Count:
    """A part of `size` bytes that count up from `first`."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.num_bytes = first, size

    def fill(self, data: np.ndarray) -> None:
        data[:] = self.first + np.arange(self.num_bytes)


def scatter_parts(layout: dict[str, Any], sizes: list[int], message: str) -> tuple[list[bytes], str]:
    """The parts that a rank receives in two steps, in chunks of 5 bytes, and the error that it receives for a third."""
    from unittest import mock

    from mgrpo.parallel import broadcast

    channel, whole = broadcast.BroadcastChannel(timeout_s=20), Layout(world_size=dist.get_world_size(), **layout)
    is_head = dist.get_rank() == 0
    received = []
    with mock.patch.multiple(broadcast, CHUNK_BYTES=5, SENDERS=2):
        for step in range(2):
            parts = [Count(100 * step + 10 * number, size) for number, size in enumerate(sizes)]
            received.append(channel.scatter(whole, parts if is_head else ()).tobytes())
    try:
        channel.action(broadcast.Action.ERROR, message) if is_head else channel.scatter(whole)
    except RuntimeError as err:
        return received, str(err)
    return received, ""


def wait_for_a_rank_0_that_died() -> str:
    """The error of a rank that waits for its part when rank 0 fails after the header."""
    from unittest import mock

    from mgrpo.parallel.broadcast import BroadcastChannel

    channel, layout = BroadcastChannel(timeout_s=1), Layout(world_size=2)
    with mock.patch.object(dist, "isend", side_effect=RuntimeError("died")):
        try:
            channel.scatter(layout, [Count(0, 8), Count(0, 8)] if dist.get_rank() == 0 else ())
        except RuntimeError as err:
            return str(err)
    return ""
