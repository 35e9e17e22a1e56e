"""The run's engines as one: calls to several engines at once, and the weight sync. An engine whose call fails is lost.

Rank 0 makes one. It is independent of the engines' implementation; `Roster` holds the engines and restarts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import NamedTuple, TypeVar

from mgrpo.processes.background import announced
from mgrpo.rollout.engine import Engine, EngineError, Pause, WrongAnswerError
from mgrpo.rollout.engines.roster import Roster, listed, say
from mgrpo.rollout.requests import sampler_seed

T = TypeVar("T")

OWN_WORD_S = 1.0
"""Seconds for an engine's own error when learners could not reach it."""


class PendingCall(NamedTuple):
    """A call of an engine, possibly not answered yet."""

    engine: Engine
    answer: Future[None]


Calls = Mapping[int, PendingCall]
"""Calls by the engine's number."""


class Fleet:
    """The engines of a run."""

    def __init__(
        self,
        roster: Roster,
        *,
        seed: int,
        seeds_prompts: bool = False,
        pauses: Pause = "drain",
        meeting_host: str | None = None,
    ) -> None:
        """
        Args:
            seed: seed of the run.
            seeds_prompts: the engines' sampler cannot be seeded, so every prompt needs its own seed.
            pauses: treatment of completions that have begun when the engines pause.
            meeting_host: address of rank 0's machine for engines on others; None: all engines are on it.
        """
        self.roster, self.members, self.settings = roster, roster.members, roster.settings
        self.seed, self.seeds_prompts, self.pauses, self.meeting_host = seed, seeds_prompts, pauses, meeting_host
        self.is_aborted = False

    @property
    def engines(self) -> list[Engine]:
        """All engines by number, including those that are gone."""
        return self.roster.engines

    def wait_ready(self) -> None:
        """Wait until every engine has loaded its model.

        Raises:
            EngineError: with the engine's own message, or after `engine_start_timeout` seconds.
        """
        what, field, limit_s = "start an engine", "engine_start_timeout", self.settings.engine_start_timeout
        starts = {number: PendingCall(engine, engine.ready) for number, engine in enumerate(self.engines)}
        late = self._wait(starts, what, field, limit_s, return_when=FIRST_EXCEPTION)
        for call in starts.values():
            if call.answer.done() and (err := call.answer.exception()) is not None:
                raise self.roster.error(f"could not {what}: {err}{self.roster.keep_logs()}") from err
        if late:
            raise self.roster.error(f"{self._late(what, field, limit_s, late)}{self.roster.keep_logs()}")
        self.roster.started()

    def abort(self) -> None:
        """Stop all sampling for good, without waiting. From any thread."""
        self.is_aborted = True
        for engine in self.engines:
            engine.abort()

    def check_not_aborted(self) -> None:
        """Raise EngineError after `abort`."""
        if self.is_aborted:
            raise EngineError("generation was aborted")

    def call(self, number: int, engine: Engine, ask: Callable[[Engine], Future[T]], what: str) -> Future[T]:
        """Call an engine; if the call fails, the engine is lost."""
        answer = ask(engine)

        def answered(answer: Future[T]) -> None:
            if (err := answer.exception()) is not None:
                is_wrong = isinstance(err, WrongAnswerError)
                self.roster.lost(number, engine, f"could not {what}: {err}", for_good=is_wrong)

        answer.add_done_callback(answered)
        return answer

    def calls(
        self, numbers: Collection[int], ask: Callable[[int, Engine], Future[None]], what: str
    ) -> dict[int, PendingCall]:
        """Call several engines; see `finish`."""
        engines = [(number, self.engines[number]) for number in numbers]
        return {n: PendingCall(engine, self.call(n, engine, partial(ask, n), what)) for n, engine in engines}

    def pause(self, how: Pause | None = None) -> list[Future[None]]:
        """Pause the engines, by default in the way of `pauses`."""
        calls = self.calls(self.members.sampling, lambda _, engine: engine.pause(how or self.pauses), "pause")
        return [call.answer for call in calls.values()]

    def resume(self, numbers: Collection[int] | None = None) -> None:
        """Resume these engines; by default all."""
        numbers = self.members.sampling if numbers is None else numbers
        self.calls(numbers, lambda _, engine: engine.resume(), "resume")

    def sleep(self) -> None:
        """Release all engines' device memory, and wait for it; see `Engine.sleep`."""
        what = "give up the device's memory"
        self.finish(self.calls(self.members.sampling, lambda _, engine: engine.sleep(), what), what)

    def reseed(self, step: int) -> None:
        """Begin the random stream of training step `step`, or of an evaluation (`EVALUATION`), and wait for it."""
        self.check_not_aborted()

        def seed(number: int, engine: Engine) -> Future[None]:
            return engine.seed(sampler_seed(self.seed, step, number))

        what = "seed the sampler"
        self.finish(self.calls(self.members.sampling, seed, what), what)

    def receive_weights(
        self, numbers: Collection[int], version: int, *, check: bool, step: int
    ) -> dict[int, PendingCall]:
        """Receive, on these engines, the weights that the learners send now, for sampling training step `step`. See `finish`.

        The step's random stream does not depend on earlier sampling.
        """

        def receive(number: int, engine: Engine) -> Future[None]:
            return engine.receive_weights(version, check=check, seed=sampler_seed(self.seed, step, number))

        return self.calls(numbers, receive, f"receive weights, version {version}")

    def finish(self, calls: Calls, what: str, failures: Mapping[int, str] | None = None) -> list[int]:
        """Wait for engines, at most `weight_sync_timeout` seconds; engines that failed or did not answer are lost.

        Args:
            failures: reasons of the learners' failures, by engine.
        Returns:
            The engines that succeeded.
        Raises:
            EngineError: too few engines are left.
        """
        field, limit_s = "weight_sync_timeout", self.settings.weight_sync_timeout
        failures = failures or {}
        wait([call.answer for number, call in calls.items() if number in failures], OWN_WORD_S)
        rest = {number: call for number, call in calls.items() if number not in failures}
        late = self._wait(rest, what, field, limit_s)
        for number, (engine, _) in calls.items():
            if number in failures:
                self.roster.lost(number, engine, f"could not {what}: {failures[number]}")
            elif number in late:
                self.roster.lost(number, engine, self._late(what, field, limit_s, [number]))
        self.roster.raise_failure()
        return [n for n, call in rest.items() if n not in late and call.answer.exception() is None]

    def require_weights(self) -> None:
        """Require weights of a weight sync: from here on engines do not serve those that they have loaded."""
        with self.roster.lock:
            self.members.require_weights()

    @property
    def needs_sync(self) -> bool:
        """True if loaded engines wait for weights and too few serve to wait for the next ordinary weight sync."""
        with self.roster.lock:
            return bool(self.members.stale) and len(self.members.open) < self.settings.min_engines

    @property
    def are_members_there(self) -> bool:
        """True if `min_engines` can take part in a weight sync, and none is suspected."""
        with self.roster.lock:
            return self.members.is_settled and len(self.members.syncing) >= self.settings.min_engines

    def wait_for_members(self) -> None:
        """Wait until `are_members_there`.

        Raises:
            EngineError: too few engines are left.
        """
        limit = f"engine_start_timeout={self.settings.engine_start_timeout:g} s"
        with announced("engines that are starting", limit), self.roster.changed:
            while not self.are_members_there:
                self.roster.raise_failure()
                self.roster.changed.wait(0.1)

    def begin_sync(self, *, only_stale: bool = False) -> dict[int, int]:
        """Begin a weight sync; returns the engines that take part, each with its generation."""
        if not only_stale:
            self.roster.see_off()
        with self.roster.lock:
            seats = self.members.stale if only_stale else self.members.syncing
            for number in seats:
                self.members.begin_transfer(number)
            return {number: self.members[number].generation for number in seats}

    def seated(self, seats: Mapping[int, int]) -> list[int]:
        """Engines of `begin_sync` that have not failed since."""
        with self.roster.lock:
            members = self.members
            return [n for n, seat in seats.items() if members[n].is_in_transfer and members[n].generation == seat]

    def end_sync(self, version: int, calls: Calls, done: Collection[int]) -> None:
        """End a weight sync; of the called engines, those in `done` have the weights."""
        served = []
        with self.roster.lock:
            self.members.num_syncs += bool(done)
            for number, (engine, _) in calls.items():
                is_same = self.engines[number] is engine
                if is_same and self.members.end_transfer(number, is_synced=number in done):
                    served.append(number)
        for number in served:
            if self.members[number].generation or self.members.num_syncs > 1:
                say(f"engine {number} has joined and serves the weights of version {version}")
            self.roster.tell_serving(number)
        self.roster.synced()

    def _wait(self, calls: Calls, what: str, field: str, limit_s: float, return_when: str = ALL_COMPLETED) -> list[int]:
        """Engines that have not answered within `limit_s`."""
        who = "the engine" if len(calls) == 1 else f"{len(calls)} engines"
        with announced(f"{who} ({what})", f"{field}={limit_s:g} s"):
            late = wait([call.answer for call in calls.values()], limit_s, return_when).not_done
        return [number for number, call in calls.items() if call.answer in late]

    def _late(self, what: str, field: str, limit_s: float, late: Collection[int]) -> str:
        who = f"engine{'s' if len(late) > 1 else ''} {listed(list(late))}"
        who = "the engine" if len(self.engines) == 1 else who
        return f"could not {what} within {field}={limit_s:g} s: no answer from {who}; raise {field} if the work is that long"
