"""Dispatch of prompts to the policy's engines and of finished groups back: for training and evaluations, whole or turn by turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.processes.background import Background, announced
from mgrpo.rollout.engine import Completions, EngineError, NotFiniteError, PromptBatch, RefusedError
from mgrpo.rollout.engines.engine_queue import EngineQueue
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import listed
from mgrpo.rollout.interaction import Interaction
from mgrpo.rollout.requests import (
    EVALUATION,
    Decode,
    Request,
    RequestBounds,
    Unfinished,
    evaluation_requests,
    evaluation_sampling,
    prompt_batch,
    to_groups,
    training_sampling,
)
from mgrpo.types import Prompt, RolloutGroup

T = TypeVar("T")


class TrainingListener(Protocol):
    """Sender of training groups; its callbacks run in the dispatcher's thread."""

    def failed(self, err: Exception) -> None:
        """Called when no engine is left, or work in the dispatcher's thread has failed."""

    def replayed(self, numbers: Sequence[int]) -> None:
        """Called with groups that begin again, because their engine has failed or left."""

    def load_changed(self) -> None:
        """Called when an engine's load has changed."""

    @property
    def waited_for(self) -> str:
        """Teachers that scored groups wait for; "": none. From any thread."""


class Dispatcher(EngineQueue[Request]):
    """Queue of all requests to the policy's engines. The `Turns` of an interaction."""

    def __init__(
        self,
        fleet: Fleet,
        rollout: Rollout,
        *,
        run_seed: int,
        decode: Decode,
        stop_token_ids: Sequence[int],
        samples_per_engine: int | None = None,
        interaction: Interaction | None = None,
        bounds: RequestBounds | None = None,
    ) -> None:
        """
        Args:
            bounds: a request beyond them is refused before it is queued; None: the engines refuse it.
            interaction: turns a group into requests of one turn each; None: each answer is one request.
            samples_per_engine: see `EngineQueue`.
        """
        self.rollout, self.run_seed, self.decode = rollout, run_seed, decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.bounds = bounds
        self.interaction = interaction
        self.unfinished = Unfinished()
        self.listener: TrainingListener | None = None
        """None: no groups to train on so far."""
        self.num_replayed = 0
        """Training groups of engines that failed or left, since `take_metrics`."""
        self.num_deaths = 0
        """Engine deaths at the last `take_metrics`."""
        self.drafts = np.zeros(3, np.int64)
        """The engines' counts of drafts, see `Completions`, since `take_metrics`."""
        self.holds_training = False
        """True while training prompts stay here, because the engines are paused."""
        super().__init__(fleet, Background("rollout"), samples_per_engine=samples_per_engine)
        if interaction is not None:
            interaction.start(self)

    def listen(self, listener: TrainingListener) -> None:
        """Set the listener, in place of an earlier one. To be called before `for_training`."""
        self.listener = listener

    def for_training(
        self,
        number: int,
        prompt: Prompt,
        done: Callable[[RolloutGroup], None],
        *,
        failed: Callable[[Exception], None],
    ) -> Request:
        """A request for a group to train on.

        Args:
            number: the group's number for the listener.
            failed: see `Request`; failures of all groups are also reported to the listener.
        """
        assert self.listener is not None, (
            "`listen` first: whoever trains must learn that a group begins again or never comes"
        )
        sampling = training_sampling(self.rollout, self.stop_token_ids)
        return Request(prompt=prompt, sampling=sampling, stream=0, done=done, failed=failed, number=number)

    def sample_evaluation(self, prompts: Sequence[Prompt]) -> Future[list[RolloutGroup]]:
        """The groups of held-out prompts, in order, sampled with the settings of evaluations. From any thread."""
        whole, requests = evaluation_requests(prompts, evaluation_sampling(self.rollout, self.stop_token_ids))
        self.post(partial(self.send, requests))
        return whole

    def wait(self, future: Future[T]) -> T:
        """Wait for a future that needs answers of the engines, and return its result. From any thread except the dispatcher's own.

        Raises:
            EngineError: an engine has failed, the fleet was aborted, or `rollout_timeout` seconds have passed.
            NotFiniteError: a sampled token has a log-probability that is not finite.
        """
        limit = f"rollout_timeout={self.rollout.rollout_timeout:g} s"
        engines = len(self.fleet.engines)
        with announced("the engine (generate)" if engines == 1 else f"{engines} engines (generate)", limit):
            try:
                return future.result(self.rollout.rollout_timeout)
            except TimeoutError:
                if future.done():
                    raise
        teachers = self.listener.waited_for if self.listener else ""
        others = "the environments" if self.unfinished.groups else teachers or "the rewards"
        busy = listed(self.loads.busy())
        sampling = "the engine" if engines == 1 else f"engines {busy}"
        whose = (f"{sampling} and {teachers}" if teachers else sampling) if busy else others
        raise EngineError(
            f"could not generate within {limit}: no answer from {whose}; raise rollout_timeout if the work is that long"
            f"{self.fleet.roster.keep_logs()}"
        )

    def take_metrics(self) -> dict[str, float]:
        """Metrics of engines and environments since the last call. In the dispatcher's thread."""
        deaths, self.num_deaths = self.fleet.roster.num_deaths - self.num_deaths, self.fleet.roster.num_deaths
        replayed, self.num_replayed = self.num_replayed, 0
        (times, drafted, accepted), self.drafts = self.drafts.tolist(), np.zeros(3, np.int64)
        return {
            "engines/serving": len(self.fleet.members.open),
            "engines/failed": deaths,
            "engines/replayed_groups": replayed,
            **(
                {"engines/draft_acceptance": accepted / drafted, "engines/accepted_a_draft": accepted / times}
                if drafted
                else {}
            ),
            **(self.interaction.take_metrics() if self.interaction else {}),
        }

    def send(self, requests: Sequence[Request]) -> None:
        """Sample these prompts, those of an evaluation first. In the dispatcher's thread."""
        if self.interaction is None:
            self.queue(requests)
        elif requests:
            self.unfinished.groups.update(requests)
            self.interaction.begin(requests)

    def queue(self, requests: Sequence[Request]) -> None:
        """See `EngineQueue`. Requests that every engine would refuse are not queued, and fail alone."""
        found = [(request, request.problem(self.bounds)) for request in requests]
        super().queue([request for request, problem in found if not problem])
        self.refuse([(request, problem) for request, problem in found if problem])

    def send_turns(self, requests: Sequence[Request], *, together: bool) -> None:
        """Sample these turns of groups that were sent before. In the dispatcher's thread.

        Args:
            together: nothing else is being sampled, and the engines' work must depend on these requests alone, not on their times of
                arrival.
        """
        if not (together and self.is_sampling):
            self.queue(requests)
            return
        self.fleet.pause("keep")  # the cache of the earlier turns
        self.queue(requests)
        self.fleet.resume()

    def withdraw_turn(self, request: Request) -> None:
        """Cancel a turn that was sent. In the dispatcher's thread."""
        self.withdraw(request, request.engine)

    def end(self, request: Request, group: RolloutGroup) -> None:
        """Complete a group of several turns. In the dispatcher's thread."""
        self.unfinished.end(request)
        request.done(group)

    def give_up(self, request: Request, err: Exception) -> None:
        """Fail a group of several turns, and with it the run unless it is a RefusedError. In the dispatcher's thread."""
        self.unfinished.end(request)
        request.failed(err)
        if not isinstance(err, RefusedError):
            self._fail(err)

    def numbers_that_wait(self) -> list[int]:
        """Training groups that no engine has begun. In the dispatcher's thread."""
        groups = self.unfinished.groups if self.interaction else self.waiting
        return sorted(group.number for group in groups if group.is_training and not group.has_begun)

    def pause(self) -> Future[None]:
        """Pause the engines; done when none of them samples. In the dispatcher's thread.

        Draining engines first sample all turns of the groups that they have begun.
        """
        if self.fleet.pauses == "drain" and self.is_sampling:
            return self.unfinished.then(self._pause)
        return self._pause()

    def _pause(self) -> Future[None]:
        self.is_sampling = False
        return _settled(self.fleet.pause())

    def _taken(self, requests: Sequence[Request]) -> None:
        numbers = [request.number for request in requests if request.is_training and request.is_beginning]
        for turn in [request.turn for request in requests if request.turn and request.is_beginning]:
            turn.whole.has_begun = False
        self.unfinished.review()
        self.num_replayed += len(numbers)
        if self.listener is not None:
            self.listener.replayed(numbers)

    def _given(self, request: Request, engine: int) -> None:
        request.engine = engine
        if request.turn is not None:
            whole = request.turn.whole
            whole.has_begun = True
            # All samples go to the engine of the first: their contexts begin alike. One that had no room there does not move the others.
            if whole.engine not in self.fleet.roster.open:
                whole.engine = engine

    def _urgency(self, request: Request) -> tuple[int, bool]:
        """Urgency of a request: evaluations first, then groups that have begun."""
        return request.stream, request.is_beginning

    def _is_held(self, request: Request) -> bool:
        """True if the request stays here while engines are paused, or about to be."""
        may_end = self.fleet.pauses == "drain" and not request.is_beginning
        return self.holds_training and request.is_training and not may_end

    def _batch(self, numbered: Sequence[tuple[int, Request]]) -> PromptBatch:
        sampling, stream = numbered[0][1].batch_key
        # An evaluation must not depend on concurrent training, nor a turn on the time at which a tool answers another one.
        is_beside_training = stream == EVALUATION and self.fleet.pauses != "drain"
        is_free = self.interaction is not None and not self.interaction.in_rounds
        seeds = self.fleet.seeds_prompts or sampling.is_timed or is_beside_training or is_free
        return prompt_batch(numbered, sampling, run_seed=self.run_seed if seeds else None)

    def _read(self, requests: Sequence[Request], arrays: Completions) -> list[RolloutGroup]:
        self.drafts += arrays.get("drafts", 0)
        groups = to_groups([request.prompt for request in requests], arrays, self.decode)
        read = [group for request, group in zip(requests, groups, strict=True) if request not in self.withdrawn]
        if problem := next(filter(None, map(_problem, read)), None):
            raise problem
        return groups

    def _tell_failure(self, err: Exception) -> None:
        self.unfinished.fail(err)
        if self.listener is not None:
            self.listener.failed(err)

    def _load_changed(self) -> None:
        if self.listener is not None:
            self.listener.load_changed()


def _settled(calls: Sequence[Future[None]]) -> Future[None]:
    """A future that is done when all these calls of engines have succeeded or failed."""
    whole: Future[None] = Future()
    left = set(calls)

    def done(call: Future[None]) -> None:
        with lock:
            left.discard(call)
            is_last = not left and not whole.done()
        if is_last:
            whole.set_result(None)

    lock = threading.Lock()
    if not calls:
        whole.set_result(None)
    for call in calls:
        call.add_done_callback(done)
    return whole


def _problem(group: RolloutGroup) -> EngineError | None:
    if any(completion.finish_reason == "abort" for completion in group.completions):
        return EngineError("generation was aborted")
    broken = [completion for completion in group.completions if not np.isfinite(completion.logprobs).all()]
    if not broken:
        return None
    version = int(broken[0].policy_versions[0])
    whose = "the model's weights" if version < 0 else f"the weights of policy version {version}"
    return NotFiniteError(
        f"{len(broken)} of {len(group.completions)} completions of a prompt have log-probabilities that are not finite, so "
        f"{whose} are broken or have diverged; look at the model, or lower learning_rate"
    )
