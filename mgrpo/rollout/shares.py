"""What each engine has to do, and which one gets the next group. Pure: no engine is called."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgrpo.rollout.requests import Request
from mgrpo.types import RolloutGroup


@dataclass(slots=True, kw_only=True)
class _Share:
    """What one engine has."""

    requests: dict[int, tuple[Request, float]] = field(default_factory=dict)
    """By number, with the cost of each."""
    cost: float = 0.0
    samples: int = 0


class Shares:
    """Who samples what. A group goes to the engine with the fewest tokens to read and, as expected, to write."""

    def __init__(self, samples_per_engine: int | None) -> None:
        """
        Args:
            samples_per_engine: see `Dispatcher`.
        """
        self.samples_per_engine = samples_per_engine
        self.numbers = itertools.count()
        self.shares: defaultdict[int, _Share] = defaultdict(_Share)
        """By engine."""
        self.lengths = [0, 0]
        """Tokens of all answers that were trained on so far, and how many they are."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when an engine has more or less to do."""

    def give(self, request: Request, engines: Iterable[int]) -> tuple[int, int] | None:
        """Which of these engines gets this request, and the number under which; None: none of them has room."""
        samples = request.sampling.num_samples
        open_ones = [number for number in engines if self._has_room(self.shares[number], samples)]
        if not open_ones:
            return None
        own = None if request.turn is None else request.turn.engine
        engine = min(open_ones, key=lambda number: (number != own, self.shares[number].cost, number))
        share = self.shares[engine]
        number, cost = next(self.numbers), self.cost(request)
        share.requests[number] = request, cost
        share.cost += cost
        share.samples += samples
        self.on_change()
        return engine, number

    def _has_room(self, share: _Share, samples: int) -> bool:
        limit = self.samples_per_engine
        return limit is None or not share.requests or share.samples + samples <= limit

    def cost(self, request: Request) -> float:
        """Tokens that an engine reads and is expected to write for a group."""
        total, count = self.lengths
        longest = request.max_tokens
        length = min(total / count, longest) if count else longest
        return len(request.tokens) + request.sampling.num_samples * length

    def has(self, engine: int, numbers: Sequence[int]) -> bool:
        """Whether an engine was given all this."""
        return self.shares[engine].requests.keys() >= set(numbers)

    def of(self, engine: int, numbers: Sequence[int]) -> list[Request]:
        """What an engine was given under these numbers."""
        return [self.shares[engine].requests[number][0] for number in numbers]

    def finish(self, engine: int, number: int) -> None:
        """An engine has sampled what it was given under this number."""
        share = self.shares[engine]
        request, cost = share.requests.pop(number)
        share.samples -= request.sampling.num_samples
        # Sums are rounded.
        share.cost = share.cost - cost if share.requests else 0.0
        self.on_change()

    def learn(self, groups: Iterable[RolloutGroup]) -> None:
        """Expect answers as long as these and those before."""
        for group in groups:
            self.lengths[0] += sum(len(completion.tokens) for completion in group.completions)
            self.lengths[1] += len(group.completions)

    def busy(self) -> list[int]:
        """The engines that have something to do."""
        return sorted(number for number, share in self.shares.items() if share.requests)

    def drop(self, engine: int) -> list[Request]:
        """Take away what an engine has."""
        return [request for request, _ in self.shares.pop(engine, _Share()).requests.values()]

    def clear(self) -> list[Request]:
        """Take away what all engines have."""
        return [request for engine in list(self.shares) for request in self.drop(engine)]

    def state_dict(self) -> Mapping[str, Any]:
        """What the choice of an engine depends on, in JSON."""
        return {"lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.lengths = list(state["lengths"])
