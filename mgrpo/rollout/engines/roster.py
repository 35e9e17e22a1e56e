"""Registry of the run's engines. A failed engine is restarted, and its groups go to the others.

An engine keeps its number for life. Results of calls to a replaced engine are ignored.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.processes.background import Background
from mgrpo.rollout.engine import Engine, EngineError
from mgrpo.rollout.engines.members import Members, State

MOST_NAMED = 8
"""Most engines named in a message."""

Start = Callable[[int], Engine]
"""Begins the start or restart of the engine with this number. RuntimeError: the cluster has no room for it."""


class EngineListener(Protocol):
    """Sender of groups to engines; its callbacks may come from any thread."""

    def lost(self, engine: int) -> None:
        """Called when an engine is lost."""

    def serving(self, engine: int) -> None:
        """Called when a paused engine may get groups, for the first time since its start or again."""

    def ended(self, err: EngineError) -> None:
        """Called when the run cannot continue."""


class Roster:
    """The engines of a run, by number. Methods may be called from any thread."""

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: EngineSettings,
        *,
        keep_logs: Callable[[], str] = str,
        start: Start | None = None,
        max_restarts: int | None = None,
        owner: str = "",
    ) -> None:
        """
        Args:
            owner: owner of the engines in messages; "": the policy.
            keep_logs: saves the engines' output and returns a clause with the place; called on failures.
            start: None: a failed engine is not restarted.
            max_restarts: see `Members`.
        """
        self.engines, self.settings, self.keep_logs, self.owner = list(engines), settings, keep_logs, owner
        self._alive: list[Engine | None] = list(engines)
        """Engines by number; None: failed and not replaced."""
        self._open: dict[int, Engine] = {}
        self._open_numbers: Sequence[int] = ()
        self.min_engines = settings.min_engines
        self.members = Members(
            len(engines),
            max_restarts=max_restarts if start else 0,
            patience_s=settings.engine_heartbeat_timeout,
            start_s=settings.engine_start_timeout,
        )
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.has_started = False
        """True once all engines have loaded their models; before that, a failed start ends the run."""
        self.is_closed = False
        self.failure: EngineError | None = None
        """Reason why the run cannot continue."""
        self.num_deaths = 0
        self.listener: EngineListener | None = None
        """None: no requests to engines so far."""
        self.beside: Sequence[Roster] = ()
        """Rosters of other models, whose restarts are counted within the same weight syncs."""
        self._start = start
        self._starts = Background("engine-starts")
        for number in range(len(engines)):
            self._await_start(number)
        self.has_started = all(engine.ready.done() for engine in engines)

    def listen(self, listener: EngineListener) -> None:
        """Set the listener, in place of an earlier one. To be called before `open`."""
        self.listener = listener

    def named(self, number: int) -> str:
        """An engine's name in messages."""
        return f"{self.owner}'s engine {number}" if self.owner else f"engine {number}"

    def error(self, reason: str) -> EngineError:
        """The error with this reason."""
        return EngineError(f"{self.owner}: {reason}" if self.owner else reason)

    @property
    def open(self) -> dict[int, Engine]:
        """Engines that may get groups; the same object until one of them changes. A call to one of these never reaches its
        replacement."""
        assert self.listener is not None, "`listen` first: whoever gives engines groups must learn that one is lost"
        with self.lock:
            # A replaced engine was not open in between.
            if self.members.open is not self._open_numbers:
                self._open_numbers = self.members.open
                self._open = {number: self.engines[number] for number in self._open_numbers}
            return self._open

    def started(self) -> None:
        """Record that all engines have loaded their models: later failures lead to restarts."""
        with self.lock:
            self.has_started = True
        self._tend()

    def close(self) -> None:
        """Ignore the end of engines from here on."""
        with self.lock:
            self.is_closed = True

    def describe(self) -> list[dict[str, Any]]:
        """The state of each engine, in JSON."""
        with self.lock:
            return [
                {"engine": m.number, "state": m.state.value, "starts": m.generation + 1, "last_failure": m.reason}
                for m in self.members.all
            ]

    def add(self) -> int:
        """Start one more engine, which serves after a weight sync; returns its number. For one thread at a time.

        Raises:
            EngineError: the cluster has no room for it.
        """
        self._check_started()
        if self._start is None:
            raise EngineError("this run does not start engines itself")
        number = len(self.engines)
        try:
            engine = self._start(number)
        except Exception as err:
            raise EngineError(f"no engine can be added: {err}") from err
        with self.lock:
            self.engines.append(engine)
            self._alive.append(engine)
            self.members.add()
        self._await_start(number)
        say(f"{self.named(number)} is added and loads its model")
        return number

    def remove(self, number: int) -> None:
        """Remove an engine at the next weight sync, after its groups.

        Raises:
            EngineError: there is no such engine, or too few would be left.
        """
        self._check_started()
        with self.lock:
            lasting = self.members.lasting
            if number not in lasting:
                raise EngineError(f"there is no engine {number}; choose one of {listed(lasting)}")
            if len(lasting) <= self.min_engines:
                raise EngineError(
                    f"engine {number} cannot go: the run has {len(lasting)} engines, and min_engines={self.min_engines}"
                )
            is_busy = self.members.leave(number)
        if is_busy:
            say(f"{self.named(number)} is given no more groups, and goes at the next weight sync")
        else:
            self._see_off(number)

    def _check_started(self) -> None:
        if not self.has_started:
            raise EngineError("the run is still starting its first engines; ask again when it trains")

    def see_off(self) -> None:
        """Remove leaving engines, at the beginning of a weight sync."""
        for number in self.members.numbers(lambda member: member.state is State.LEAVING):
            with self.lock:
                self.members.retire(number)
            self._see_off(number)

    def _see_off(self, number: int) -> None:
        say(f"{self.named(number)} is gone")
        self._starts.submit(self.engines[number].close)
        self._tell_lost(number)

    def lost(self, number: int, engine: Engine, reason: str, *, for_good: bool = False) -> None:
        """Handle the failure of an engine, unless it is known already or the engine has been replaced."""
        with self.lock:
            if self.is_closed or not self.has_started:
                return
            if self._alive[number] is not engine or not self.members.died(number, reason, for_good=for_good):
                return
            self._alive[number] = None
            self.num_deaths += 1
            is_last = self.members[number].state is State.RETIRED
            self.changed.notify_all()
        self._starts.submit(engine.close)
        self._tell_lost(number)
        logs = ""
        with suppress(OSError):  # such as a full disk: failover must not depend on the logs
            logs = self.keep_logs()
        with self.lock:
            self.members[number].reason += logs
        fate = "given up" if is_last else "started again"
        self._tend()
        if self.failure is None:
            say(f"{self.named(number)} is dead and is {fate}: {reason}{logs}")

    def _tell_lost(self, number: int) -> None:
        if self.listener is not None:
            self.listener.lost(number)

    def tell_serving(self, number: int) -> None:
        """Report to the listener that an engine may get groups."""
        if self.listener is not None:
            self.listener.serving(number)

    def end(self, reason: str) -> None:
        """End the run with this reason."""
        with self.lock:
            failure = self.failure = self.failure or self.error(reason)
            self.changed.notify_all()
        if self.listener is not None:
            self.listener.ended(failure)

    def raise_failure(self) -> None:
        """Raise EngineError if the run cannot continue."""
        if self.failure is not None:
            raise self.failure

    def synced(self) -> None:
        """Record the end of a weight sync, and restart engines that failed before the first one."""
        for other in self.beside:
            other.members.num_syncs = self.members.num_syncs
        self._tend()

    def _tend(self) -> None:
        """Restart dead engines, or end the run if too few are left."""
        with self.lock:
            if self.failure is not None or self.is_closed or not self.has_started:
                return
            members = self.members
            dead = members.numbers(lambda member: member.state is State.DEAD)
            # If all engines failed before their first weights, restarts would fail for the same cause.
            waits = members.needs_weights and not members.num_syncs
            if len(members.lasting) >= self.min_engines and not (waits and len(dead) == len(members.lasting)):
                for number in () if waits else dead:
                    self._restart_after(members.restart(number), number)
                return
            left = f"{len(members.lasting) - len(dead)} of {len(members.all)} engines are left, min_engines={self.min_engines}"
            failed = [m for m in members.all if m.reason]
        if len(self.engines) == 1:
            self.end(failed[0].reason)
        else:
            self.end(f"{left}; {listed([f'engine {m.number}: {m.reason}' for m in failed], '; ')}")

    def _restart_after(self, seconds: float, number: int) -> None:
        begin = partial(self._starts.submit, partial(self._restart, number))
        if not seconds:
            begin()
            return
        timer = threading.Timer(seconds, begin)
        timer.daemon = True
        timer.start()

    def _restart(self, number: int) -> None:
        assert self._start is not None, "otherwise every failure is the last"
        # It may have been removed meanwhile.
        if self.is_closed or self.members[number].state is not State.STARTING:
            return
        engine = before = self.engines[number]
        why = ""
        try:
            engine = self._start(number)
        except Exception as err:  # Ray's, for example: in any case there is no engine
            why = f"could not start an engine: {err}"
        with self.lock:
            self.engines[number] = self._alive[number] = engine
        if engine is before:
            self.lost(number, engine, why)
        else:
            self._await_start(number)

    def _await_start(self, number: int) -> None:
        engine = self.engines[number]

        def started(ready: Future[None]) -> None:
            if (err := ready.exception()) is not None:
                self.lost(number, engine, f"could not start an engine: {err}")
                return
            with self.lock:
                if self._alive[number] is not engine:
                    return
                self.members.loaded(number)
                serves, is_late = number in self.members.open, self.has_started
                self.changed.notify_all()
            if is_late:
                say(f"{self.named(number)} has loaded its model" + ("" if serves else " and waits for a weight sync"))
            if is_late and serves:
                self.tell_serving(number)

        engine.ready.add_done_callback(started)


def listed(words: Sequence[object], between: str = ", ") -> str:
    """The first `MOST_NAMED` words and the number of the others, which keeps messages about a thousand engines short."""
    more = f"{between}and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return between.join(map(str, words[:MOST_NAMED])) + more


def say(text: str) -> None:
    """Print one line for the user."""
    print(f"mgrpo: {text}", file=sys.stderr, flush=True)
