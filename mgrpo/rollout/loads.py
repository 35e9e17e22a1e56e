"""The load of each engine, and which one gets the next group. Pure: no engine is called."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        """The most that are written for each sample."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def home(self) -> int | None:
        """The engine that should be given it."""


W = TypeVar("W", bound=Work)


@dataclass(slots=True, kw_only=True)
class Load(Generic[W]):
    """The requests that one engine has been given and has not answered."""

    requests: dict[int, tuple[W, float]] = field(default_factory=dict)
    """By number, with the cost of each."""
    cost: float = 0.0
    """The sum of the costs."""
    samples: int = 0


class Loads(Generic[W]):
    """The loads of all engines. A group goes to the engine with the fewest tokens to read and, as expected, to write."""

    def __init__(self, samples_per_engine: int | None, *, on_change: Callable[[], None]) -> None:
        """
        Args:
            samples_per_engine: see `EngineQueue`.
            on_change: called when an engine has more or less to do.
        """
        self.samples_per_engine, self.on_change = samples_per_engine, on_change
        self.numbers = itertools.count()
        self.by_engine: defaultdict[int, Load[W]] = defaultdict(Load)
        self.lengths = [0, 0]
        """The tokens of all answers that were trained on so far, and the number of these answers."""

    def give(self, request: W, engines: Iterable[int]) -> tuple[int, int] | None:
        """The one of these engines that gets the request, and the request's number there; None: none of them has room."""
        samples = request.sampling.num_samples
        open_ones = [number for number in engines if self._has_room(self.by_engine[number], samples)]
        if not open_ones:
            return None
        engine = min(open_ones, key=lambda number: (number != request.home, self.by_engine[number].cost, number))
        load = self.by_engine[engine]
        number, cost = next(self.numbers), self.cost(request)
        load.requests[number] = request, cost
        load.cost += cost
        load.samples += samples
        self.on_change()
        return engine, number

    def _has_room(self, load: Load[W], samples: int) -> bool:
        limit = self.samples_per_engine
        return limit is None or not load.requests or load.samples + samples <= limit

    def cost(self, request: W) -> float:
        """Tokens that an engine reads and is expected to write for a group."""
        total, count = self.lengths
        longest = request.max_tokens
        length = min(total / count, longest) if count else longest
        return len(request.tokens) + request.sampling.num_samples * length

    def has(self, engine: int, numbers: Sequence[int]) -> bool:
        """Whether an engine has requests under all these numbers."""
        return self.by_engine[engine].requests.keys() >= set(numbers)

    def of(self, engine: int, numbers: Sequence[int]) -> list[W]:
        """An engine's requests under these numbers."""
        return [self.by_engine[engine].requests[number][0] for number in numbers]

    def finish(self, engine: int, number: int) -> None:
        """An engine has answered its request of this number."""
        load = self.by_engine[engine]
        request, cost = load.requests.pop(number)
        load.samples -= request.sampling.num_samples
        # Sums are rounded.
        load.cost = load.cost - cost if load.requests else 0.0
        self.on_change()

    def learn(self, groups: Iterable[RolloutGroup]) -> None:
        """Expect answers as long as these and those before."""
        for group in groups:
            self.lengths[0] += sum(len(completion.tokens) for completion in group.completions)
            self.lengths[1] += len(group.completions)

    def busy(self) -> list[int]:
        """The engines that have something to do."""
        return sorted(number for number, load in self.by_engine.items() if load.requests)

    def drop(self, engine: int) -> list[W]:
        """Take away an engine's requests, which are returned."""
        return [request for request, _ in self.by_engine.pop(engine, Load()).requests.values()]

    def clear(self) -> list[W]:
        """Take away the requests of all engines, which are returned."""
        return [request for engine in list(self.by_engine) for request in self.drop(engine)]

    def state_dict(self) -> Mapping[str, Any]:
        """The facts that the choice of an engine depends on, in JSON."""
        return {"lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.lengths = list(state["lengths"])
