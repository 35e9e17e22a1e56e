"""The state of each engine. Pure: no engine is called, and there is no clock.

    STARTING -> STALE -> SERVING <-> SUSPECT -> DEAD -> STARTING, or RETIRED after too many deaths
                            \\-> LEAVING -> RETIRED

Only a completed weight sync leads to SERVING. An engine keeps its number for life; every start after the first begins a new
generation, which distinguishes it from earlier ones.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

RESTART_WINDOW = 20
"""Weight syncs within which the restarts of an engine are counted: occasional failures do not retire it."""
AGAIN_S = 10.0
"""Seconds of pause after a failed start, twice as many after a second one in a row, and so on. A killed process may hold a GPU's
memory for a while."""
SUSPECT_SHARE = 0.5
"""Share of the patience after which a silent engine is suspected."""


class State(enum.Enum):
    """The state of an engine."""

    STARTING = "starting"
    """Loading its model."""
    STALE = "stale"
    """Loaded; takes part in the next weight sync."""
    SERVING = "serving"
    """Sampling with the present weights."""
    SUSPECT = "suspect"
    """Silent for a while: it keeps its groups and gets no more."""
    LEAVING = "leaving"
    """Leaving at the next weight sync; gets no more groups."""
    DEAD = "dead"
    """Failed; will be restarted."""
    RETIRED = "retired"
    """Gone for good."""


GONE = (State.DEAD, State.RETIRED)
LOADED = (State.STALE, State.SERVING, State.SUSPECT, State.LEAVING)


@dataclass(slots=True, kw_only=True)
class Member:
    """One engine."""

    number: int
    state: State = State.STARTING
    generation: int = 0
    silent_s: float = 0.0
    """Seconds since its last answer; while it starts, since the start."""
    is_trusted: bool = False
    """True if it has the present weights. If so, SUSPECT goes back to SERVING, and otherwise to STALE."""
    is_in_transfer: bool = False
    """True while it receives weights, which has a time limit of its own."""
    deaths: list[int] = field(default_factory=list)
    """Number of complete weight syncs at each death."""
    failed_starts: int = 0
    """Failed starts in a row."""
    reason: str = ""
    """Reason of its last death."""


class Members:
    """The engines by number. For one thread at a time."""

    def __init__(self, count: int, *, max_restarts: int | None, patience_s: float, start_s: float) -> None:
        """
        Args:
            max_restarts: most restarts of one engine within `RESTART_WINDOW` syncs; None: no limit, if others restart it.
            patience_s: seconds of silence after which an engine is dead.
            start_s: seconds for the start of an engine.
        """
        self.max_restarts, self.patience_s, self.start_s = max_restarts, patience_s, start_s
        self.all = [Member(number=number) for number in range(count)]
        self.needs_weights = False
        """True if engines serve only the weights of a sync."""
        self.num_syncs = 0
        """Number of syncs completed by at least one engine."""
        self._open: list[int] | None = None

    def __getitem__(self, number: int) -> Member:
        return self.all[number]

    def numbers(self, holds: Callable[[Member], bool]) -> list[int]:
        """Numbers of the engines for which `holds` is true."""
        return [member.number for member in self.all if holds(member)]

    @property
    def open(self) -> list[int]:
        """Engines that may get groups; the same object until one of them changes."""
        if self._open is None:
            self._open = self.numbers(lambda member: member.state is State.SERVING)
        return self._open

    def _enter(self, member: Member, state: State) -> None:
        member.state, self._open = state, None

    @property
    def sampling(self) -> list[int]:
        """Engines that may have groups."""
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
        """True if no engine is suspected."""
        return all(member.state is not State.SUSPECT for member in self.all)

    def add(self) -> int:
        """Add a starting engine; returns its number."""
        self.all.append(Member(number=len(self.all)))
        return len(self.all) - 1

    def require_weights(self) -> None:
        """Stop serving weights that engines have loaded themselves."""
        self.needs_weights = True
        for number in self.numbers(lambda member: member.state in LOADED):
            self._enter(self.all[number], State.STALE)
            self.all[number].is_trusted = False

    def loaded(self, number: int) -> None:
        """Record that an engine has started."""
        member = self.all[number]
        if member.state is State.STARTING:
            self._enter(member, State.STALE if self.needs_weights else State.SERVING)
            member.failed_starts = 0
            member.silent_s, member.is_trusted = 0.0, not self.needs_weights

    def begin_transfer(self, number: int) -> None:
        """Record that an engine joins a transfer group or receives weights, and does not answer meanwhile."""
        self.all[number].is_in_transfer = True

    def end_transfer(self, number: int, *, is_synced: bool) -> bool:
        """Record the end of a transfer; returns True if the engine begins to serve."""
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
        """Record an engine's answer; returns True if it was suspected."""
        member = self.all[number]
        member.silent_s = 0.0
        if member.state is not State.SUSPECT:
            return False
        self._enter(member, State.SERVING if member.is_trusted else State.STALE)
        return True

    def pass_time(self, seconds: float) -> tuple[list[int], list[int]]:
        """Add to the engines' silence; returns those that are newly suspected, and those that have been silent for too long."""
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
        """Record an engine's failure, without a restart if `for_good`; returns False if it was known."""
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
        """Record the restart of a dead engine; returns the seconds to wait before it."""
        member = self.all[number]
        assert member.state is State.DEAD, "only a dead engine is started again"
        self._enter(member, State.STARTING)
        member.silent_s = 0.0
        member.generation += 1
        return AGAIN_S * member.failed_starts

    def leave(self, number: int) -> bool:
        """Remove an engine; returns True if it stays until the next weight sync, because it may have groups."""
        member = self.all[number]
        has_groups = number in self.sampling
        self._enter(member, State.LEAVING if has_groups else State.RETIRED)
        return has_groups

    def retire(self, number: int) -> None:
        """Retire an engine that was leaving."""
        member = self.all[number]
        self._enter(member, State.RETIRED)
        member.is_trusted = member.is_in_transfer = False
