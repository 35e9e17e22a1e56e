"""From the next prompts to scored groups: data, engines and rewards of the training steps. No torch, no other ranks.

Path of a step's groups through the threads of rank 0:

    main            rank-0            rollout                                   engines           scoring
    Source.next --> take -----------> Groups.admit, from the sampler
      waits           waits           Loads.give ----------------- submit ----> sample
                                      Groups.sampled <------------ poll ------
                                      Scoring.add --------------------------------------------> Rewarder.score
                                      Groups.scored <------------------------------------------
                      Asking.add -------------------> teachers, on engines or servers
                      Groups.judged <----------------
      index, slices <-- make_batch <- Groups.choose
    hand_over ----------------------> Groups.take: room for new groups

- `rollout` is `Dispatcher.thread`. It owns the groups, the sampler, the replay buffer and the loads of the engines, so none of them needs a
  lock. It never blocks: every answer of an engine, of the rewarder or of an environment is posted to it.
- `rank-0` is the thread of `Lead.work`. It waits for the next step, at most `rollout_timeout` seconds (`Dispatcher.wait`), and packs it.
  Evaluations, with their scoring, also run in it.
- `main` waits for `rank-0` and sends heartbeats to the other ranks, which wait for rank 0. While it trains, `rollout` goes on.
- With tools, an event loop in the thread `environments` lies between `rollout` and the groups: it receives whole groups and returns a
  request for each turn.

The queues, and the limit of each:

- Groups that are out, from their admission until a step takes them: those of `async_steps + 1` steps, and the extra groups of active
  sampling (`rollout.stream`). The queues below hold no more training groups than these: when learners are slow, sampling stops here.
- `Dispatcher.waiting`: requests for which no engine has room. Evaluations come first, then turns of groups that have begun.
- The requests of an engine: `samples_per_engine`, or all at once where a run must repeat.
- `Asking.asked`: scored groups, of those whose prompt has a teacher on an engine or a server; it waits while the engines pause for a sync.
- `Scoring.waiting`: sampled groups. The rewarder is called for one batch at a time; slow rewards delay steps, and sampling only by
  the first limit.

Engines pause for a weight sync, and after every step in a run that repeats. The pause begins with `pause` after a step's training, or
with `hand_over` if sampling and training take turns, and ends with `begin` or the next `take`. Groups that have begun are sampled to
their end first, or continue after it (`inflight_updates`).

A failure of any work in `rollout`, or of too many engines, fails the step that `rank-0` waits for, and with it the run. A request that
engines refuse leaves its group's place empty; a step without any other group fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.processes.stopwatch import Stopwatch
from mgrpo.rewards.rewarder import Rewarder
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import RefusedError
from mgrpo.rollout.teachers import Teachers
from mgrpo.run.produce.asked_teachers import Asking
from mgrpo.run.produce.group_scoring import Scoring
from mgrpo.run.produce.groups import Group, Groups
from mgrpo.run.produce.lessons import Lessons, lesson_metrics
from mgrpo.run.produce.saved_rollouts import PromptOf
from mgrpo.run.records import Rollouts
from mgrpo.types import RolloutGroup, ScoredGroup


class Producer:
    """Turns prompts into scored groups. Its methods may be called from any thread."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        *,
        prompt: PromptOf,
        dispatcher: Dispatcher,
        rewarder: Rewarder,
        lessons: Lessons | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        """
        Args:
            prompt: the training prompt of an id that the sampler gives.
            lessons: builds teacher prompts; None: no teachers.
            teachers: teachers on engines or servers.
        """
        self.dispatcher, self.rewarder = dispatcher, rewarder
        self.thread = dispatcher.thread
        self.groups = Groups(
            config,
            sampler,
            prompt=prompt,
            scale=rewarder.scale,
            scores_cohorts=bool(rewarder.functions),
            lessons=lessons,
            asks=teachers is not None,
        )
        self.scoring = Scoring(config.algorithm, rewarder, lessons=lessons, post=dispatcher.post, done=self._scored)
        self.asking = teachers and Asking(
            teachers,
            config.distillation.teacher_names,
            post=dispatcher.post,
            done=self._judged,
            failed=self.failed,
        )
        self.taking: Future[Rollouts] | None = None
        self.asked_at = self.answered_at = self.scored_at = 0.0
        self.failure: Exception | None = None
        self.is_running = False
        """True while engines sample and groups may be admitted."""
        self.busy = Stopwatch()
        """Runs while engines have work."""
        dispatcher.listen(self)

    def begin(self) -> None:
        """Start or resume sampling. Returns at once; may be called repeatedly."""
        self.dispatcher.post(self._begin)

    def take(self) -> Future[Rollouts]:
        """Request the groups of the next step, for `Dispatcher.wait`. With active sampling other groups replace dropped ones.

        Neither groups nor dropped ones in the result: every prompt is solved for good.
        """
        taking: Future[Rollouts] = Future()
        self.dispatcher.post(partial(self._ask, taking, time.perf_counter()))
        return taking

    def hand_over(self, *, prepare: bool) -> None:
        """Record that the learners have the groups of `take`: a resumed run does not get them again.

        Args:
            prepare: if sampling and training take turns, queue the next step's prompts in the engines. Not before an
                evaluation, which would sample them.
        """
        self.thread.submit(partial(self._hand_over, prepare=prepare)).result()

    def pause(self) -> None:
        """Pause the engines, and wait until they are paused."""
        self.dispatcher.wait(self.thread.submit(self._pause).result())

    def abort(self) -> None:
        """Stop sampling for good; a pending step fails with an EngineError."""
        self.dispatcher.fleet.abort()

    def state_dict(self) -> dict[str, Any]:
        """See `Groups.state_dict`."""
        return self.thread.submit(
            lambda: self.groups.state_dict() | {"engines": self.dispatcher.loads.state_dict()}
        ).result()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, before the first `begin`."""
        self.thread.submit(partial(self._load, state)).result()

    def _load(self, state: Mapping[str, Any]) -> None:
        self.dispatcher.loads.load_state_dict(state.get("engines", {"lengths": [0, 0]}))
        for part in self.groups.load_state_dict(state):
            self.scoring.add(part)
        self._ask_teachers(list(self.groups.out))

    def _begin(self) -> None:
        has_paused, self.is_running = not self.is_running, True
        self.dispatcher.holds_training = False
        self.groups.stream.update()
        # Groups that are still queued begin with the present weights.
        self.groups.stream.replay(self.dispatcher.numbers_that_wait())
        self._admit()
        if has_paused:
            self._resume()
        self._advance()

    def _ask(self, taking: Future[Rollouts], asked_at: float) -> None:
        self.taking, self.asked_at = taking, asked_at
        if not self.is_running:
            self._begin()
        self._advance()

    def _pause(self) -> Future[None]:
        self.is_running, self.dispatcher.holds_training = False, not self.groups.takes_turns
        return self.dispatcher.pause()

    def _resume(self) -> None:
        self.dispatcher.resume()
        self.load_changed()

    def load_changed(self) -> None:
        """See `TrainingListener`."""
        is_sampling = self.is_running and self.dispatcher.is_sampling
        self.busy.run(is_sampling and bool(self.dispatcher.loads.num_busy))

    def _admit(self) -> None:
        self._send(self.groups.admit())

    def _send(self, numbers: Sequence[int]) -> None:
        prompts = [(number, self.groups.out[number].prompt) for number in numbers]
        requests = [
            self.dispatcher.for_training(n, prompt, partial(self._sampled, n), failed=partial(self._refused, n))
            for n, prompt in prompts
            if prompt
        ]
        self.dispatcher.send(requests)

    def _sampled(self, number: int, sampled: RolloutGroup) -> None:
        self.answered_at = time.perf_counter()
        if part := self.groups.sampled(number, sampled):
            self.scoring.add(part)

    def _refused(self, number: int, err: Exception) -> None:
        # Other failures are reported once, to `failed`.
        if isinstance(err, RefusedError):
            if part := self.groups.refused(number, err):
                self.scoring.add(part)
            self._refill()
            self._advance()

    def replayed(self, numbers: Sequence[int]) -> None:
        """See `TrainingListener`."""
        self.groups.stream.replay(numbers)

    def _scored(self, numbers: Sequence[int], scored: Sequence[ScoredGroup], kept: Sequence[bool]) -> None:
        self.scored_at = time.perf_counter()
        for number, score, is_kept in zip(numbers, scored, kept, strict=True):
            self.groups.scored(number, score, is_kept)
        self._ask_teachers(numbers)
        self._refill()
        self._advance()

    def _ask_teachers(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self.asking and self.groups.awaits_teacher(number) and (scored := self.groups.out[number].scored):
                self.asking.add(number, scored)

    def _judged(self, number: int, judged: RolloutGroup) -> None:
        self.groups.judged(number, judged)
        self._refill()
        self._advance()

    @property
    def waited_for(self) -> str:
        """See `TrainingListener`."""
        return self.asking.waited_for if self.asking else ""

    def _refill(self) -> None:
        """Admit groups in the place of those that freed their slots."""
        if not self.is_running or not self.groups.has_room:
            return
        if not self.groups.takes_turns:
            self._admit()
        elif self.groups.is_complete:
            # A batch of the engines depends on nothing but the order of the prompts.
            self.dispatcher.pause()
            self._admit()
            self._resume()

    def _advance(self) -> None:
        """Resolve the learners' pending `take` once the next step's groups are ready, or with a failure."""
        if self.taking is None or self.taking.done():
            return
        try:
            chosen = self.groups.choose() if self.failure is None else None
        except RefusedError as err:
            self.failure = err
        if self.failure is not None:
            self.taking.set_exception(self.failure)
        elif chosen is not None:
            self.taking.set_result(self._rollouts(chosen))

    def _rollouts(self, chosen: Sequence[Group]) -> Rollouts:
        scored = [(group.scored, group.is_kept) for group in chosen if group.scored]
        now = time.perf_counter()
        generate_s = max(0.0, self.answered_at - self.asked_at)
        teach_s = max(0.0, now - max(self.scored_at, self.asked_at)) if self.asking else 0.0
        teaching = self.asking.take_metrics() | {"time/teach": teach_s} if self.asking else {}
        return Rollouts(
            groups=[group for group, is_kept in scored if is_kept],
            dropped=[group for group, is_kept in scored if not is_kept],
            replayed=[stored.scored for stored in self.groups.buffer.drawn],
            replay_metrics=self.groups.buffer.metrics(),
            generate_s=generate_s,
            score_s=max(0.0, now - self.asked_at - generate_s - teach_s),
            teach_s=teach_s,
            engine_s=self.busy.seconds,
            num_admitted=self.groups.num_admitted,
            engine_metrics=self.dispatcher.take_metrics()
            | {"engines/refused_groups": sum(group.refusal is not None for group in chosen)},
            reward_metrics=self.scoring.take_metrics() | self.groups.rubrics.metrics(),
            rubrics=self.groups.rubrics.records,
            teacher_metrics=lesson_metrics([score for score, _ in scored]) | teaching,
            num_excluded=sum(group.excludes is not None for group in chosen),
        )

    def _hand_over(self, *, prepare: bool) -> None:
        self.taking = None
        self.dispatcher.loads.learn(group.sampled for group in self.groups.take() if group.sampled)
        self.busy.reset()
        if self.groups.takes_turns:
            # The engines drop their caches of the old weights while the learners train.
            self._pause()
            if prepare:
                self.groups.stream.update()
                self._admit()

    def failed(self, err: Exception) -> None:
        """See `TrainingListener`."""
        self.failure = self.failure or err
        self._advance()
