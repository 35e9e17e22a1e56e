"""The state of each engine. Pure: no engine is called, and there is no clock.

    STARTING -> STALE -> SERVING <-> SUSPECT -> DEAD -> STARTING, or RETIRED after too many deaths
                            \\-> LEAVING -> RETIRED

Only a weight sync that an engine has completed leads to SERVING. An engine keeps its number for life; every start after the
first begins a new generation, so that nothing of an earlier one is taken for it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

RESTART_WINDOW = 20
"""Weight syncs within which the restarts of an engine are counted: one that fails now and then stays."""
AGAIN_S = 10.0
"""Pause after a start that has failed; twice as long after a second one in a row, and so on. A process that was killed may hold a
GPU's memory for a while, and the next one would find too little."""
SUSPECT_SHARE = 0.5
"""The part of the patience after which a silent engine is suspected."""


class State(enum.Enum):
    """The state of an engine."""

    STARTING = "starting"
    """It loads its model."""
    STALE = "stale"
    """It has loaded, and takes part in the next weight sync."""
    SERVING = "serving"
    """It has the present weights, and samples."""
    SUSPECT = "suspect"
    """It has not answered for a while: it keeps its groups and is given no more."""
    LEAVING = "leaving"
    """It was asked to go: it is given no more groups, and goes at the next weight sync."""
    DEAD = "dead"
    """It has failed, and will be started again."""
    RETIRED = "retired"
    """It is gone for good."""


GONE = (State.DEAD, State.RETIRED)
LOADED = (State.STALE, State.SERVING, State.SUSPECT, State.LEAVING)


@dataclass(slots=True, kw_only=True)
class Member:
    """One engine."""

    number: int
    state: State = State.STARTING
    generation: int = 0
    silent_s: float = 0.0
    """Seconds since its last sign of life; while it starts, since the start."""
    is_trusted: bool = False
    """Whether it has the present weights. If so, SUSPECT goes back to SERVING, and otherwise to STALE."""
    is_in_transfer: bool = False
    """Whether it takes over weights, which has a time limit of its own."""
    deaths: list[int] = field(default_factory=list)
    """For each death, the weight syncs that were complete."""
    failed_starts: int = 0
    """Starts in a row that have failed."""
    reason: str = ""
    """The reason of its last death."""


class Members:
    """The engines by number. For one thread at a time."""

    def __init__(self, count: int, *, max_restarts: int | None, patience_s: float, start_s: float) -> None:
        """
        Args:
            max_restarts: restarts of one engine within `RESTART_WINDOW` syncs; None: any number, where others restart it.
            patience_s: an engine that is silent for this long is dead.
            start_s: seconds that an engine may take to start.
        """
        self.max_restarts, self.patience_s, self.start_s = max_restarts, patience_s, start_s
        self.all = [Member(number=number) for number in range(count)]
        self.needs_weights = False
        """Whether engines serve only the weights of a sync."""
        self.num_syncs = 0
        """Syncs that were complete with at least one engine."""
        self._open: list[int] | None = None

    def __getitem__(self, number: int) -> Member:
        return self.all[number]

    def numbers(self, holds: Callable[[Member], bool]) -> list[int]:
        """The numbers of the engines for which this holds."""
        return [member.number for member in self.all if holds(member)]

    @property
    def open(self) -> list[int]:
        """Engines that may be given groups; the same object until one of them changes."""
        if self._open is None:
            self._open = self.numbers(lambda member: member.state is State.SERVING)
        return self._open

    def _enter(self, member: Member, state: State) -> None:
        member.state, self._open = state, None

    @property
    def sampling(self) -> list[int]:
        """Engines that have groups, or may have."""
        return self.numbers(
            lambda m: m.state in (State.SERVING, State.LEAVING) or (m.state is State.SUSPECT and m.is_trusted)
        )

    @property
    def stale(self) -> list[int]:
        """Engines that wait for weights."""
        return self.numbers(lambda member: member.state is State.STALE)

    @property
    def syncing(self) -> list[int]:
        """Engines that take part in a weight sync which begins now."""
        return self.numbers(lambda member: member.state in (State.STALE, State.SERVING))

    @property
    def lasting(self) -> list[int]:
        """Engines that serve, or will after a start."""
        return self.numbers(lambda member: member.state not in (State.LEAVING, State.RETIRED))

    @property
    def is_settled(self) -> bool:
        """Whether no engine is suspected."""
        return all(member.state is not State.SUSPECT for member in self.all)

    def add(self) -> int:
        """Add an engine, which starts. Its number."""
        self.all.append(Member(number=len(self.all)))
        return len(self.all) - 1

    def require_weights(self) -> None:
        """From here on the weights that an engine has loaded itself are not served."""
        self.needs_weights = True
        for number in self.numbers(lambda member: member.state in LOADED):
            self._enter(self.all[number], State.STALE)
            self.all[number].is_trusted = False

    def loaded(self, number: int) -> None:
        """An engine has started."""
        member = self.all[number]
        if member.state is State.STARTING:
            self._enter(member, State.STALE if self.needs_weights else State.SERVING)
            member.failed_starts = 0
            member.silent_s, member.is_trusted = 0.0, not self.needs_weights

    def begin_transfer(self, number: int) -> None:
        """An engine joins a transfer group or takes over weights, and does not answer meanwhile."""
        self.all[number].is_in_transfer = True

    def end_transfer(self, number: int, *, is_synced: bool) -> bool:
        """The transfer is over. Whether the engine serves from here on and did not before."""
        member = self.all[number]
        member.is_in_transfer, member.silent_s = False, 0.0
        if not is_synced or member.state not in (State.STALE, State.SERVING):
            return False
        is_new = member.state is State.STALE
        if is_new:
            self._enter(member, State.SERVING)
        member.is_trusted = True
        return is_new

    def heard(self, number: int) -> bool:
        """An engine has answered. Whether it was suspected."""
        member = self.all[number]
        member.silent_s = 0.0
        if member.state is not State.SUSPECT:
            return False
        self._enter(member, State.SERVING if member.is_trusted else State.STALE)
        return True

    def pass_time(self, seconds: float) -> tuple[list[int], list[int]]:
        """Time has passed. The engines that are suspected from here on, and those that have been silent for too long."""
        suspects, late = [], []
        for member in self.all:
            if member.is_in_transfer or member.state in GONE:
                continue
            member.silent_s += seconds
            if member.silent_s > (self.start_s if member.state is State.STARTING else self.patience_s):
                late.append(member.number)
            elif member.state in (State.STALE, State.SERVING) and member.silent_s > SUSPECT_SHARE * self.patience_s:
                self._enter(member, State.SUSPECT)
                suspects.append(member.number)
        return suspects, late

    def died(self, number: int, reason: str, *, for_good: bool = False) -> bool:
        """An engine has failed, and is not to be started again if that is `for_good`. Whether it was not known."""
        member = self.all[number]
        if member.state in GONE:
            return False
        member.deaths = [*(when for when in member.deaths if when > self.num_syncs - RESTART_WINDOW), self.num_syncs]
        member.failed_starts += member.state is State.STARTING
        is_last = for_good or (self.max_restarts is not None and len(member.deaths) > self.max_restarts)
        self._enter(member, State.RETIRED if is_last or member.state is State.LEAVING else State.DEAD)
        member.reason, member.is_trusted, member.is_in_transfer = reason, False, False
        return True

    def restart(self, number: int) -> float:
        """A dead engine is started again. The seconds to wait before that."""
        member = self.all[number]
        assert member.state is State.DEAD, "only a dead engine is started again"
        self._enter(member, State.STARTING)
        member.silent_s = 0.0
        member.generation += 1
        return AGAIN_S * member.failed_starts

    def leave(self, number: int) -> bool:
        """Have an engine go. Whether it stays until the next weight sync, because it may have groups."""
        member = self.all[number]
        has_groups = number in self.sampling
        self._enter(member, State.LEAVING if has_groups else State.RETIRED)
        return has_groups

    def retire(self, number: int) -> None:
        """An engine that was leaving is gone."""
        member = self.all[number]
        self._enter(member, State.RETIRED)
        member.is_trusted = member.is_in_transfer = False
