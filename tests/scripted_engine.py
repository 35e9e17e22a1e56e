"""An engine without a model: it answers every prompt with the prompt's own tokens, and remembers what it was asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from mgrpo.rollout.engine import FINISH_REASONS, Completions, EngineError, PromptBatch


class ScriptedEngine:
    """Implements `mgrpo.rollout.engine.Engine`.

    Args:
        fails: the name of the call whose future raises an EngineError.
        hangs: the name of the call whose future is never done.
    """

    def __init__(self, *, fails: str = "", hangs: str = "") -> None:
        self.fails, self.hangs = fails, hangs
        self.batches: dict[int, PromptBatch] = {}
        """All that were submitted."""
        self.calls: list[tuple[Any, ...]] = []
        """The others, in order, with their arguments."""
        self.finish_reason = "stop"
        self.ready = self._future("start", lambda: None)

    def submit(self, batch: PromptBatch) -> None:
        self.batches[batch.number] = batch

    def take(self, number: int) -> Future[Completions]:
        self.calls.append(("take", number))
        return self._future("take", lambda: self._echo(self.batches[number]))

    def abort(self) -> Future[None]:
        self.calls.append(("abort",))
        self.finish_reason = "abort"
        return self._future("abort", lambda: None)

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        self.calls.append(("join", invitation))
        return self._future("join", lambda: None)

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        self.calls.append(("receive_weights", version, check, seed))
        return self._future("receive_weights", lambda: None)

    def seed(self, seed: int) -> Future[None]:
        self.calls.append(("seed", seed))
        return self._future("seed", lambda: None)

    def close(self) -> None:
        self.calls.append(("close",))

    def _future(self, name: str, make: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if name == self.fails:
            future.set_exception(EngineError(f"{name} has failed"))
        elif name != self.hangs:
            future.set_result(make())
        return future

    def _echo(self, batch: PromptBatch) -> Completions:
        each = [
            batch.tokens[a:b]
            for a, b in itertools.pairwise(batch.cu_seqlens)
            for _ in range(batch.sampling.num_samples)
        ]
        total = sum(map(len, each))
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *each]),
            "logprobs": np.zeros(total, np.float32),
            "policy_versions": np.zeros(total, np.int32),
            "cu_seqlens": np.concatenate(([0], np.cumsum([len(tokens) for tokens in each]))).astype(np.int64),
            "finish_reasons": np.full(len(each), FINISH_REASONS.index(self.finish_reason), np.int8),
        }
