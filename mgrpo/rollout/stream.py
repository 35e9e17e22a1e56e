"""The groups that may be sampled, and those of the next step: one rule for synchronous and asynchronous runs.

Pure: no clock, no engine, no prompt. A group gets a number when it is admitted, and is out until a step takes it or its place
is given back. Its birth is the number of steps whose weights the engines have at least when it begins, its age at a step the
number of steps trained since. The rule promises, for every order in which groups finish:

- no step trains on a group older than `bound`, and none is thrown away for its age: a step waits for groups that could become too old;
- when all groups that are out have finished, a step can be taken: no deadlock;
- with the least `bound` and no extra groups, steps take groups in the order of their admission;
- with `ahead == 0` as well, generation and training take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Stream:
    """The groups that are out. For one thread."""

    group_count: int
    """Groups of a step."""
    num_steps: int
    """Steps of the run."""
    ahead: int = 0
    """Steps that generation may run ahead of training (`async_steps`)."""
    bound: int = 0
    """Greatest age of a group at its training (`max_staleness`); at least `ahead`, the steps that `extra` fills, and
    `sync_steps` - 1."""
    extra: int = 0
    """Groups that are sampled in addition, in case others are given back."""
    sync_steps: int = 1
    """The engines receive the weights of every step whose number is a multiple of this, and perhaps of others."""
    steps: int = 0
    """Steps taken."""
    updates: int = 0
    """Steps after which the engines have gone on, with new weights if these were due."""
    born: dict[int, int] = field(default_factory=dict)
    """The birth of every group that is out, by number."""
    finished: set[int] = field(default_factory=set)
    """Groups that a step may take."""
    next_number: int = 0

    @property
    def is_ordered(self) -> bool:
        """Whether steps take groups in the order of their admission."""
        return self.bound == self.ahead + self.sync_steps - 1 and not self.extra

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        steps_ahead = min(self.updates + self.ahead + 1, self.num_steps) - self.steps
        return steps_ahead * self.group_count + (self.extra if steps_ahead > 0 else 0) - len(self.born)

    @property
    def birth(self) -> int:
        """That of a group that begins now."""
        return self.updates - self.updates % self.sync_steps

    def update(self) -> None:
        """The engines go on after the last step taken."""
        self.updates = self.steps

    def admit(self, count: int) -> range:
        """Admit groups, which begin now. Their numbers."""
        numbers = range(self.next_number, self.next_number + count)
        self.next_number += count
        self.born.update((number, self.birth) for number in numbers)
        return numbers

    def replay(self, numbers: Collection[int]) -> None:
        """These groups begin again."""
        self.born.update((number, self.birth) for number in numbers)
        self.finished.difference_update(numbers)

    def finish(self, number: int) -> None:
        """A step may take this group."""
        self.finished.add(number)

    def give_back(self, number: int) -> None:
        """This group will not be taken, and another may be admitted in its place."""
        del self.born[number]

    def choose(self) -> list[int] | None:
        """The groups of the next step, in order; None while it has to wait."""
        if self.is_ordered:
            chosen = sorted(self.born)[: self.group_count]
            return chosen if len(chosen) == self.group_count and self.finished.issuperset(chosen) else None
        oldest_first = sorted(self.finished, key=lambda number: (self.born[number], number))
        chosen = sorted(oldest_first[: self.group_count])
        # When all have finished, waiting gains nothing; a run that was resumed with other settings may have too many out.
        can_go = self.finished.issuperset(self.born) or self._can_follow(chosen)
        return chosen if len(chosen) == self.group_count and can_go else None

    def _can_follow(self, chosen: Sequence[int]) -> bool:
        """Whether all other groups that are out can still be taken in time, if these are taken now."""
        births = sorted(self.born[number] for number in self.born.keys() - set(chosen))
        return all(born + self.bound >= self.steps + 1 + place // self.group_count for place, born in enumerate(births))

    def take(self, numbers: Collection[int]) -> None:
        """The next step trains on these groups."""
        for number in numbers:
            del self.born[number]
        self.finished.difference_update(numbers)
        self.steps += 1
