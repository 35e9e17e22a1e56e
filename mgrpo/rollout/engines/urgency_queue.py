"""Priority queue of requests for which no engine has room. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

R = TypeVar("R")
Urgency = tuple[int, bool]


class UrgencyQueue(Generic[R]):
    """Queue with the smallest urgency first, and first in, first out among equal ones. An operation costs O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, R]] = []
        self._first = self._next = 0
        """Places before and behind all that are in use: places are unique, so that requests are never compared."""

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[R]:
        """Iterate in no particular order."""
        return (request for _, _, request in self._heap)

    @property
    def first(self) -> R:
        """The next request."""
        return self._heap[0][2]

    def pop(self) -> R:
        """Remove and return the next request."""
        return heapq.heappop(self._heap)[2]

    def add(self, request: R, urgency: Urgency) -> None:
        """Add a request behind equally urgent ones."""
        heapq.heappush(self._heap, (urgency, self._next, request))
        self._next += 1

    def add_before(self, requests: Iterable[tuple[R, Urgency]]) -> None:
        """Add requests, in their order, before equally urgent ones."""
        again = list(requests)
        self._first -= len(again)
        for place, (request, urgency) in enumerate(again, self._first):
            heapq.heappush(self._heap, (urgency, place, request))

    def remove(self, request: R) -> bool:
        """Remove a request; returns False if it is not in the queue. Costs O(n)."""
        left = [entry for entry in self._heap if entry[2] is not request]
        was_there = len(left) < len(self._heap)
        if was_there:
            heapq.heapify(left)
            self._heap = left
        return was_there

    def clear(self) -> list[R]:
        """Remove and return all requests, in order."""
        heap, self._heap = sorted(self._heap), []
        return [request for _, _, request in heap]
