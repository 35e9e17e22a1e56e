"""An engine without a model, which answers every prompt with the prompt's own tokens and remembers its calls, and a listener."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from mgrpo.rollout.engine import FINISH_REASONS, Completions, EngineError, Pause, PromptBatch
from mgrpo.rollout.vllm.calls import of_prompt


class ScriptedEngine:
    """Implements `mgrpo.rollout.engine.Engine`.

    Args:
        fails: the name of the call whose future raises an EngineError; "all" of them.
        hangs: the name of the call whose future is never done.
        answers: whether prompts are answered as soon as the engine samples; otherwise by `answer`.
        refuses: the reason for which a prompt is refused, by its first token.
    """

    def __init__(
        self, *, fails: str = "", hangs: str = "", answers: bool = True, refuses: Mapping[int, str] | None = None
    ) -> None:
        self.fails, self.hangs, self.answers, self.refuses = fails, hangs, answers, refuses or {}
        self.refused: dict[int, str] = {}
        self.batches: list[PromptBatch] = []
        """All that were submitted."""
        self.calls: list[tuple[Any, ...]] = []
        """The others, in order, with their arguments."""
        self.queued: dict[int, tuple[np.ndarray, int]] = {}
        """The tokens of the prompts that were not answered, by number, and how many samples are wanted."""
        self.asked: dict[int, tuple[int, int]] = {}
        """Of prompts whose tokens are asked about, by number, the first of these and how many likeliest ones are wanted."""
        self.version = 0
        self.is_paused = True
        self.is_draining: list[Future[None]] = []
        self.finished: list[Completions] = []
        self.polls: list[Future[Completions]] = []
        self.finish_reason = "stop"
        self.ready = self._future("start")

    def submit(self, batch: PromptBatch) -> Future[None]:
        self.batches.append(batch)
        for place, (number, (a, b)) in enumerate(
            zip(batch.numbers.tolist(), itertools.pairwise(batch.cu_seqlens), strict=True)
        ):
            if (reason := self.refuses.get(int(batch.tokens[a]))) is not None:
                self.refused[number] = reason
                continue
            self.queued[number] = batch.tokens[a:b], batch.sampling.num_samples
            if batch.starts is not None and batch.sampling.prompt_logprobs is not None:
                self.asked[number] = int(batch.starts[place]), batch.sampling.prompt_logprobs
        self._go_on()
        self._hand_over()
        return self._future("submit")

    def poll(self, gather_s: float = 0.0) -> Future[Completions]:
        self.gather_s = gather_s
        poll: Future[Completions] = Future()
        if self.fails in ("poll", "all"):
            poll.set_exception(EngineError("poll has failed"))
        elif self.hangs != "poll":
            self.polls.append(poll)
            self._hand_over()
        return poll

    def pause(self, how: Pause) -> Future[None]:
        self.calls.append(("pause", how))
        self.is_paused = True
        paused = self._future("pause")
        if how == "drain" and self.queued and self.hangs != "pause" and not self.answers:
            paused = Future()
            self.is_draining.append(paused)
        return paused

    def resume(self) -> Future[None]:
        self.calls.append(("resume",))
        self.is_paused = False
        self._go_on()
        return self._future("resume")

    def abort(self) -> Future[None]:
        self.calls.append(("abort",))
        self.finish_reason = "abort"
        self.answer(*self.queued)
        return self._future("abort")

    def withdraw(self, numbers: Sequence[int]) -> Future[None]:
        self.calls.append(("withdraw", *numbers))
        if self.hangs != "withdraw":
            reason, self.finish_reason = self.finish_reason, "abort"
            self.answer(*[number for number in numbers if number in self.queued])
            self.finish_reason = reason
        return self._future("withdraw")

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        self.calls.append(("join", invitation))
        return self._future("join")

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        self.calls.append(("receive_weights", version, check, seed))
        self.version = version
        return self._future("receive_weights")

    def seed(self, seed: int) -> Future[None]:
        self.calls.append(("seed", seed))
        return self._future("seed")

    def ping(self) -> Future[None]:
        return self._future("ping")

    def close(self) -> None:
        self.calls.append(("close",))

    def die(self, err: EngineError | None = None) -> None:
        """What waits fails, and so does every later call."""
        self.fails = "all"
        waiting, self.polls, self.is_draining = [*self.polls, *self.is_draining], [], []
        for future in waiting:
            future.set_exception(err or EngineError("it has died"))

    def answer(self, *numbers: int) -> None:
        """Finish these groups."""
        for number in numbers:
            tokens, num_samples = self.queued.pop(number)
            self.finished.append(self._echo(number, tokens, num_samples))
        self._hand_over()
        if not self.queued:
            draining, self.is_draining = self.is_draining, []
            for paused in draining:
                paused.set_result(None)

    def _go_on(self) -> None:
        if self.answers and not self.is_paused:
            self.answer(*self.queued)

    def _hand_over(self) -> None:
        if not self.polls or not (self.finished or self.refused):
            return
        (finished, self.finished), (refused, self.refused) = (self.finished, []), (self.refused, {})
        joined: Completions = {"numbers": np.zeros(0, np.int64)}
        if finished:
            joined = {name: np.concatenate([group[name] for group in finished]) for name in finished[0]}
            joined["cu_seqlens"] = np.concatenate(([0], np.cumsum(joined.pop("lengths"))))
        if refused:
            joined |= {"refused": np.array([*refused]), "refusals": np.array([*refused.values()])}
        self.polls.pop(0).set_result(joined)

    def _future(self, name: str, make: Callable[[], Any] = lambda: None) -> Future[Any]:
        future: Future[Any] = Future()
        if self.fails in (name, "all"):
            future.set_exception(EngineError(f"{name} has failed"))
        elif name != self.hangs:
            future.set_result(make())
        return future

    def _echo(self, number: int, tokens: np.ndarray, num_samples: int) -> Completions:
        """One group, with `lengths` instead of `cu_seqlens`."""
        total = num_samples * len(tokens)
        return self._judgement(number, tokens) | {
            "numbers": np.array([number]),
            "sizes": np.array([num_samples]),
            "tokens": np.tile(tokens, num_samples),
            "logprobs": np.zeros(total, np.float32),
            "policy_versions": np.full(total, self.version, np.int32),
            "lengths": np.full(num_samples, len(tokens), np.int64),
            "finish_reasons": np.full(num_samples, FINISH_REASONS.index(self.finish_reason), np.int8),
        }

    def _judgement(self, number: int, tokens: np.ndarray) -> Completions:
        """Where the prompt was asked about: of token t the log-probability -t, and as the likeliest ones t, t + 1, ..."""
        if number not in self.asked:
            return {}
        start, num_likeliest = self.asked.pop(number)
        ids = tokens[start:, None] + np.arange(num_likeliest, dtype=np.int32)
        own = -tokens[start:].astype(np.float32)
        return of_prompt(own, ids, -ids.astype(np.float32))


class Told:
    """Implements `mgrpo.rollout.dispatch.TrainingListener`, and remembers what it was told.

    Args:
        on_failure: called with each failure.
    """

    def __init__(self, on_failure: Callable[[Exception], object] = lambda err: None) -> None:
        self.on_failure = on_failure
        self.failure: Exception | None = None
        self.replays: list[int] = []

    def failed(self, err: Exception) -> None:
        self.failure = err
        self.on_failure(err)

    def replayed(self, numbers: Sequence[int]) -> None:
        self.replays.extend(numbers)

    def load_changed(self) -> None: ...

    waited_for = ""
