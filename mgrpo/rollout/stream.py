"""Admission of groups, and choice of those of the next step: one rule for synchronous and asynchronous runs.

Pure: no clock, no engine, no prompt. A group gets a number when it is admitted, and is out until a step takes it or it frees its
slot. Its birth is the least number of steps in the engines' weights when it begins, its age at a step the number of steps trained
since. The rule guarantees, for every order in which groups finish:

- no step trains on a group older than `bound`, and none is discarded for its age: a step waits for groups that could become too old;
- when all groups that are out have finished, a step can be taken: no deadlock;
- with the least `bound` and no extra groups, steps take groups in the order of their admission;
- with `ahead == 0` as well, generation and training take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice


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
    """Groups sampled in addition, in case others free their slots."""
    sync_steps: int = 1
    """Engines receive the weights of every step whose number is a multiple of this, and possibly of others."""
    steps: int = 0
    """Steps taken."""
    updates: int = 0
    """Steps after which the engines have resumed, with new weights if these were due."""
    born: dict[int, int] = field(default_factory=dict)
    """Birth of every group that is out, by number, in order."""
    finished: set[int] = field(default_factory=set)
    """Groups that a step may take."""
    births: Counter[int] = field(default_factory=Counter)
    """Number of groups that are out, by birth."""
    births_finished: Counter[int] = field(default_factory=Counter)
    """Number of finished groups, by birth."""
    next_number: int = 0

    @property
    def is_ordered(self) -> bool:
        """True if steps take groups in the order of their admission."""
        return self.bound == self.ahead + self.sync_steps - 1 and not self.extra

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now."""
        steps_ahead = min(self.updates + self.ahead + 1, self.num_steps) - self.steps
        return steps_ahead * self.group_count + (self.extra if steps_ahead > 0 else 0) - len(self.born)

    @property
    def birth(self) -> int:
        """Birth of a group that begins now."""
        return self.updates - self.updates % self.sync_steps

    def update(self) -> None:
        """Record that the engines resume after the last step taken."""
        self.updates = self.steps

    def admit(self, count: int) -> range:
        """Admit groups, which begin now; returns their numbers."""
        numbers = range(self.next_number, self.next_number + count)
        self.next_number += count
        for number in numbers:
            self.restore(number, self.birth)
        return numbers

    def restore(self, number: int, born: int) -> None:
        """Add a group with this birth. Its number must be the greatest so far."""
        self.born[number] = born
        self.births[born] += 1

    def replay(self, numbers: Collection[int]) -> None:
        """Begin these groups again, with the present birth."""
        for number in numbers:
            self._unfinish(number)
            self.births[self.born[number]] -= 1
            self.restore(number, self.birth)

    def finish(self, number: int) -> None:
        """Mark a group that a step may take."""
        if number not in self.finished:
            self.finished.add(number)
            self.births_finished[self.born[number]] += 1

    def _unfinish(self, number: int) -> None:
        if number in self.finished:
            self.finished.remove(number)
            self.births_finished[self.born[number]] -= 1

    def give_back(self, number: int) -> None:
        """Remove a group, so that another may be admitted in its place."""
        self._unfinish(number)
        self.births[self.born.pop(number)] -= 1

    def choose(self) -> list[int] | None:
        """Groups of the next step, in order; None: not enough have finished. Called after every group, so that sorting comes last."""
        count = self.group_count
        if len(self.finished) < count:
            return None
        if self.is_ordered:
            chosen = list(islice(self.born, count))
            return chosen if self.finished.issuperset(chosen) else None
        # When all have finished, waiting is pointless; a run resumed with other settings may have too many out.
        if len(self.finished) < len(self.born) and not self._can_follow():
            return None
        return sorted(sorted(self.finished, key=lambda number: (self.born[number], number))[:count])

    def _can_follow(self) -> bool:
        """True if all other groups can still be taken in time when the oldest finished ones are taken now."""
        to_take, left = self.group_count, 0
        for birth in sorted(self.births):
            taken = min(to_take, self.births_finished[birth])
            to_take -= taken
            left += self.births[birth] - taken
            steps_before_last = (left - 1) // self.group_count
            if left and birth + self.bound < self.steps + 1 + steps_before_last:
                return False
        return True

    def take(self, numbers: Collection[int]) -> None:
        """Remove the groups of the next step."""
        for number in numbers:
            self.give_back(number)
        self.births, self.births_finished = +self.births, +self.births_finished
        self.steps += 1
