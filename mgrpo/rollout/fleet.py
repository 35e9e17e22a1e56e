"""The run's engines as one: every call goes to all of them, and their failures become one clear error.

Rank 0 makes one; it does not know what runs the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.processes.background import announced
from mgrpo.rollout.collect import sampler_seed
from mgrpo.rollout.engine import Engine, EngineError, Pause

T = TypeVar("T")


class Fleet:
    """The engines of a run."""

    def __init__(
        self,
        engines: Sequence[Engine],
        settings: EngineSettings,
        *,
        seed: int,
        seeds_prompts: bool = False,
        pauses: Pause = "drain",
        meeting_host: str | None = None,
        keep_logs: Callable[[], str] = str,
    ) -> None:
        """
        Args:
            seed: of the run.
            seeds_prompts: the engines' sampler has no stream that can be seeded, so every prompt needs its own seed.
            pauses: what becomes of completions that have begun when the engines pause.
            meeting_host: address of rank 0's machine for engines on others; None: all engines are on it.
            keep_logs: saves what the engines have printed and returns a clause that says where; called on failures.
        """
        self.engines, self.settings, self.seed, self.keep_logs = engines, settings, seed, keep_logs
        self.seeds_prompts, self.pauses, self.meeting_host = seeds_prompts, pauses, meeting_host
        self.is_aborted = False
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Called from any thread when the engines' runtime has failed and no call can succeed any more."""

    def wait_ready(self) -> None:
        """Wait until every engine has loaded its model.

        Raises:
            EngineError: with the engine's own message, or after `engine_start_timeout` seconds.
        """
        self.results(
            [engine.ready for engine in self.engines],
            what="start an engine",
            field="engine_start_timeout",
            timeout_s=self.settings.engine_start_timeout,
        )

    def fail(self, reason: str) -> None:
        """What runs the engines has failed. From any thread."""
        self.on_failure(f"{reason}{self.keep_logs()}")

    def pause(self) -> list[Future[None]]:
        """Have all engines sample no more. See `finish_sampling`."""
        return [engine.pause(self.pauses) for engine in self.engines]

    def resume(self) -> list[Future[None]]:
        """Have all engines sample."""
        return [engine.resume() for engine in self.engines]

    def sleep(self) -> None:
        """Have all engines give up their devices' memory, and wait for it; see `Engine.sleep`."""
        self.finish([engine.sleep() for engine in self.engines], "give up the device's memory")

    def receive_weights(self, version: int, *, check: bool, step: int) -> list[Future[None]]:
        """Have all engines receive what the learners send now, for sampling training step `step`. See `finish`.

        The step's random stream is its own, whatever was sampled before.
        """
        return [
            engine.receive_weights(version, check=check, seed=sampler_seed(self.seed, step, number))
            for number, engine in enumerate(self.engines)
        ]

    def reseed(self, step: int) -> None:
        """Begin the random stream of training step `step`, or of an evaluation (`EVALUATION`), and wait for it."""
        self.check_not_aborted()
        calls = [engine.seed(sampler_seed(self.seed, step, number)) for number, engine in enumerate(self.engines)]
        self.finish(calls, "seed the sampler")

    def abort(self) -> None:
        """End what is being sampled, for good and without waiting. May be called from any thread."""
        self.is_aborted = True
        for engine in self.engines:
            engine.abort()

    def check_not_aborted(self) -> None:
        """Raise EngineError after `abort`."""
        if self.is_aborted:
            raise EngineError("generation was aborted")

    def finish(self, calls: Sequence[Future[None]], what: str) -> None:
        """Wait for the engines' part of a weight sync, at most `weight_sync_timeout` seconds."""
        self.results(calls, what=what, field="weight_sync_timeout", timeout_s=self.settings.weight_sync_timeout)

    def raise_failure(self, calls: Sequence[Future[None]], what: str, *, within_s: float) -> None:
        """Raise the error of a call that fails within that time; return when none does."""
        wait(calls, within_s, FIRST_EXCEPTION)
        self._raise_first(calls, what)

    def results(self, calls: Sequence[Future[T]], *, what: str, field: str, timeout_s: float) -> list[T]:
        """Results of one call to each engine, in their order.

        Raises:
            EngineError: the first failure, or which engines have not answered within `timeout_s`, the value of `field`.
        """
        who = "the engine" if len(calls) == 1 else f"{len(calls)} engines"
        with announced(f"{who} ({what})", f"{field}={timeout_s:g} s"):
            late = wait(calls, timeout_s, FIRST_EXCEPTION).not_done
        self._raise_first(calls, what)
        if late:
            numbers = ", ".join(str(number) for number, call in enumerate(calls) if call in late)
            engines = "the engine" if len(calls) == 1 else f"engines {numbers}"
            raise EngineError(
                f"could not {what} within {field}={timeout_s:g} s: no answer from {engines}; raise {field} if the work is "
                f"that long{self.keep_logs()}"
            )
        return [call.result() for call in calls]

    def _raise_first(self, calls: Sequence[Future[T]], what: str) -> None:
        for call in calls:
            if call.done() and (err := call.exception()) is not None:
                raise EngineError(f"could not {what}: {err}{self.keep_logs()}") from err
