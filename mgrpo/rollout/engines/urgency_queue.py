"""Requests for which no engine has room, in the order in which engines are given them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

R = TypeVar("R")
Urgency = tuple[int, bool]


class UrgencyQueue(Generic[R]):
    """A queue in which the smallest urgency comes first, and among equal ones whoever came first. A step costs O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, int, R]] = []
        self._first = self._next = 0
        """The places before and behind all that were given out: no two requests have the same, so that none are compared."""

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[R]:
        """In no order."""
        return (request for _, _, request in self._heap)

    @property
    def first(self) -> R:
        """The one that is next."""
        return self._heap[0][2]

    def pop(self) -> R:
        """Take the first one out."""
        return heapq.heappop(self._heap)[2]

    def add(self, request: R, urgency: Urgency) -> None:
        """Behind those that are as urgent."""
        heapq.heappush(self._heap, (urgency, self._next, request))
        self._next += 1

    def add_before(self, requests: Iterable[tuple[R, Urgency]]) -> None:
        """Before those that are as urgent, and among themselves as they are."""
        again = list(requests)
        self._first -= len(again)
        for place, (request, urgency) in enumerate(again, self._first):
            heapq.heappush(self._heap, (urgency, place, request))

    def remove(self, request: R) -> bool:
        """Take this one out; False: it is not there. Costs O(n)."""
        left = [entry for entry in self._heap if entry[2] is not request]
        was_there = len(left) < len(self._heap)
        if was_there:
            heapq.heapify(left)
            self._heap = left
        return was_there

    def clear(self) -> list[R]:
        """Take all of them out, in order."""
        heap, self._heap = sorted(self._heap), []
        return [request for _, _, request in heap]
