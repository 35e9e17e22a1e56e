"""Messages and rounds of the slices that are sent; both ends compute the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from mgrpo.models.placement.boxes import Box

T = TypeVar("T")


def messages(
    boxes: Sequence[Box], num_sources: int, *, itemsize: int, bucket_bytes: int, limit: int | None = None
) -> list[list[Box]]:
    """The boxes from one rank to a worker, message by message.

    Args:
        num_sources: ranks that send to the worker.
        bucket_bytes: most bytes of one message from each rank together; a message has an even share of it, or one row.
        limit: most bytes of a message, if less than its share.
    """
    share = bucket_bytes // num_sources
    return buckets(boxes, itemsize=itemsize, bucket_bytes=min(limit or share, share))


def rounds(queues: Mapping[int, Sequence[T]]) -> list[dict[int, T]]:
    """Rounds of messages that are under way at the same time: at most one with each peer, in the order of `queues`."""
    return [
        {peer: queue[number] for peer, queue in queues.items() if number < len(queue)}
        for number in range(max(map(len, queues.values()), default=0))
    ]


def buckets(boxes: Iterable[Box], *, itemsize: int, bucket_bytes: int) -> list[list[Box]]:
    """Cut a pair's boxes into messages of at most `bucket_bytes` (or one row); both ends compute the same cut."""
    limit = max(bucket_bytes // itemsize, 1)
    cut: list[list[Box]] = []
    room = 0
    for box in boxes:
        for part in _rows(box, limit):
            if part.size > room:
                cut.append([])
                room = limit
            cut[-1].append(part)
            room -= part.size
    return cut


def _rows(box: Box, limit: int) -> Iterable[Box]:
    """Parts of the box of at most `limit` elements, or of one row."""
    if box.size <= limit:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    length = box.shape[dim]
    step = max(limit * length // box.size, 1)
    for row in range(0, length, step):
        start, shape = list(box.start), list(box.shape)
        start[dim] += row
        shape[dim] = min(step, length - row)
        yield Box(box.name, tuple(start), tuple(shape))
