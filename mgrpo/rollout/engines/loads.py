"""The load of each engine, and the choice of the engine for a group. Pure: no engine is called."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mgrpo.rollout.engine import Sampling
from mgrpo.types import RolloutGroup


class Work(Protocol):
    """A request to an engine."""

    @property
    def tokens(self) -> np.ndarray:
        """`[len]` int32: the tokens to read."""

    @property
    def max_tokens(self) -> int:
        """Most sampled tokens of each sample."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def home(self) -> int | None:
        """The preferred engine; None: no preference."""


W = TypeVar("W", bound=Work)


@dataclass(slots=True, kw_only=True)
class Load(Generic[W]):
    """Unanswered requests of one engine."""

    requests: dict[int, tuple[W, float]] = field(default_factory=dict)
    """Requests by number, each with its cost."""
    cost: float = 0.0
    """Sum of the costs."""
    samples: int = 0


class Loads(Generic[W]):
    """The loads of all engines. A group goes to the engine with the fewest tokens to read and, as expected, to write.

    That engine is the top of a heap of (cost, number). There is one heap for each size of groups, on which an engine's room depends.
    Entries are not removed when a load changes: those with an outdated cost, or of an engine without room, are skipped. A group costs
    O(log engines) while the engines stay the same.
    """

    def __init__(self, samples_per_engine: int | None, *, on_change: Callable[[], None]) -> None:
        """
        Args:
            samples_per_engine: see `EngineQueue`.
            on_change: called when an engine's load has changed.
        """
        self.samples_per_engine, self.on_change = samples_per_engine, on_change
        self.numbers = itertools.count()
        self.by_engine: defaultdict[int, Load[W]] = defaultdict(Load)
        self.num_busy = 0
        """Number of engines with requests."""
        self.lengths = [0, 0]
        """Tokens of all answers that were trained on so far, and the number of these answers."""
        self._engines: Collection[int] = ()
        self._heaps: dict[int, list[tuple[float, int]]] = {}
        """Heaps of `_engines`, by the number of samples."""

    def give(self, request: W, engines: Collection[int]) -> tuple[int, int] | None:
        """Add the request to one of these engines; returns the engine and the request's number there. None: no engine has room.

        Args:
            engines: with fast membership; the same object as long as the engines are the same.
        """
        samples = request.sampling.num_samples
        if engines is not self._engines:
            self._engines, self._heaps = engines, {}
        home = request.home
        is_at_home = home is not None and home in engines and self._has_room(self.by_engine[home], samples)
        engine = home if is_at_home else self._idlest(samples)
        if engine is None:
            return None
        load = self.by_engine[engine]
        number, cost = next(self.numbers), self.cost(request)
        self.num_busy += not load.requests
        load.requests[number] = request, cost
        load.cost += cost
        load.samples += samples
        self._changed(engine)
        return engine, number

    def _idlest(self, samples: int) -> int | None:
        """The engine with the least cost, the first among equals, that has room for `samples`; None: none."""
        heap = self._heaps.get(samples)
        # Skipped entries leave the heap only at its top; rebuild it when it has grown too much.
        if heap is None or len(heap) > 2 * len(self._engines) + 64:
            heap = [(self.by_engine[n].cost, n) for n in self._engines if self._has_room(self.by_engine[n], samples)]
            heapq.heapify(heap)
            self._heaps[samples] = heap
        while heap:
            cost, engine = heap[0]
            load = self.by_engine[engine]
            if load.cost == cost and self._has_room(load, samples):
                return engine
            heapq.heappop(heap)
        return None

    def _changed(self, engine: int) -> None:
        load = self.by_engine[engine]
        for samples, heap in self._heaps.items():
            if engine in self._engines and self._has_room(load, samples):
                heapq.heappush(heap, (load.cost, engine))
        self.on_change()

    def _has_room(self, load: Load[W], samples: int) -> bool:
        limit = self.samples_per_engine
        return limit is None or not load.requests or load.samples + samples <= limit

    def cost(self, request: W) -> float:
        """Tokens that an engine reads and is expected to sample for a group."""
        total, count = self.lengths
        longest = request.max_tokens
        length = min(total / count, longest) if count else longest
        return len(request.tokens) + request.sampling.num_samples * length

    def has(self, engine: int, numbers: Sequence[int]) -> bool:
        """True if an engine has requests with all these numbers."""
        return self.by_engine[engine].requests.keys() >= set(numbers)

    def of(self, engine: int, numbers: Sequence[int]) -> list[W]:
        """An engine's requests under these numbers."""
        return [self.by_engine[engine].requests[number][0] for number in numbers]

    def number_of(self, engine: int, request: W) -> int | None:
        """Number of a request in an engine; None: the engine does not have it."""
        known = self.by_engine[engine].requests.items()
        return next((number for number, (each, _) in known if each is request), None)

    def finish(self, engine: int, number: int) -> None:
        """Remove an engine's answered request."""
        load = self.by_engine[engine]
        request, cost = load.requests.pop(number)
        load.samples -= request.sampling.num_samples
        # Sums are rounded.
        load.cost = load.cost - cost if load.requests else 0.0
        self.num_busy -= not load.requests
        self._changed(engine)

    def learn(self, groups: Iterable[RolloutGroup]) -> None:
        """Add the lengths of these groups' answers to the expected length."""
        for group in groups:
            self.lengths[0] += sum(len(completion.tokens) for completion in group.completions)
            self.lengths[1] += len(group.completions)

    def is_busy(self, engine: int) -> bool:
        """True if an engine has requests."""
        return bool(self.by_engine[engine].requests)

    def busy(self) -> list[int]:
        """Engines with requests."""
        return sorted(number for number, load in self.by_engine.items() if load.requests)

    def drop(self, engine: int) -> list[W]:
        """Remove and return an engine's requests."""
        requests = [request for request, _ in self.by_engine.pop(engine, Load()).requests.values()]
        self.num_busy -= bool(requests)
        self._changed(engine)
        return requests

    def clear(self) -> list[W]:
        """Remove and return the requests of all engines."""
        return [request for engine in list(self.by_engine) for request in self.drop(engine)]

    def state_dict(self) -> Mapping[str, Any]:
        """State on which the choice of an engine depends, in JSON."""
        return {"lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.lengths = list(state["lengths"])
