"""The calls of a vLLM engine, from both ends. They take effect in the order in which they were made, over Ray or HTTP alike.

`EngineCalls` decides when an engine may sample, receive weights and get prompts; `actor` and `server_calls` call the engine itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from mgrpo.rollout.engine import (
    FINISH_REASONS,
    GATHER_S,
    UNSYNCED,
    Completions,
    Pause,
    PromptBatch,
    RefusedError,
    Sampling,
)
from mgrpo.types import KeptTokens, Routes


class Caller(ABC):
    """The caller's end: the ordered calls of an `Engine`, each by the name of its method in `EngineCalls`."""

    @abstractmethod
    def _call(self, method: str, *args: object) -> Future[Any]:
        """A call that takes effect after those before it."""

    def submit(self, batch: PromptBatch) -> Future[None]:
        """See `Engine`."""
        return self._call("submit", batch)

    def pause(self, how: Pause) -> Future[None]:
        """See `Engine`."""
        return self._call("pause", how)

    def resume(self) -> Future[None]:
        """See `Engine`."""
        return self._call("resume")

    def sleep(self) -> Future[None]:
        """See `Engine`."""
        return self._call("sleep")

    def abort(self) -> Future[None]:
        """See `Engine`."""
        return self._call("abort")

    def withdraw(self, numbers: Sequence[int]) -> Future[None]:
        """See `Engine`."""
        return self._call("withdraw", numbers)

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        """See `Engine`."""
        return self._call("join", invitation)

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        """See `Engine`."""
        return self._call("receive_weights", version, check, seed)

    def seed(self, seed: int) -> Future[None]:
        """See `Engine`."""
        return self._call("seed", seed)


class EngineCalls(ABC):
    """The engine's end of one vLLM engine. All methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self.num_logprobs = 0
        """Likeliest tokens to request at each position for the sampling masks."""
        self.has_masks = False
        """True if the engine returns sampling masks itself."""
        self.is_stale = False
        self.version = UNSYNCED
        self.turn = asyncio.Condition()
        self.next_turn = 0
        self.adding = asyncio.Lock()
        self.pausing: asyncio.Task[None] | None = None
        """The requested pause, reached when the task is done; None: the engine may sample."""
        self.requests: dict[int, str] = {}
        """vLLM's names of queued or running requests, by number."""
        self.collecting: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None
        """Reason why a request will never finish."""
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.finished: list[Completions] = []
        """Finished groups since the last poll, one entry each."""
        self.refused: dict[int, str] = {}
        """Reasons of refusals since the last poll, by number."""
        self.has_finished = asyncio.Event()

    @abstractmethod
    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""

    @abstractmethod
    async def _stop(self, *, clear_cache: bool) -> None:
        """Stop sampling; completions that have begun continue after `_go_on`."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Start sampling."""

    @abstractmethod
    async def _update(self, info: dict[str, Any]) -> None:
        """A weight update, `Update` of the plugin, after which the engine's weights are those of `version`."""

    @abstractmethod
    async def _add(self, batch: PromptBatch, prompts: Sequence[list[int]]) -> None:
        """Queue these prompts of a batch, and `_expect` the group of each or `_refuse` it."""

    @abstractmethod
    async def _abort(self, requests: Sequence[str]) -> None:
        """End these requests; their groups are returned with the tokens so far."""

    @abstractmethod
    def _death(self) -> BaseException | None:
        """Reason why the engine will never answer again; None: it is alive."""

    async def call(self, turn: int, method: str, *args: Any) -> Any:
        """Begin `method` once all calls of lower turns have begun: they may arrive in any order."""
        async with self.turn:
            await self.turn.wait_for(lambda: self.next_turn == turn)
            work = asyncio.create_task(getattr(self, method)(*args))
            # Its first statements run before the next call's. A resume completes before a later pause begins.
            await (asyncio.wait({work}) if method == "resume" else asyncio.sleep(0))
            self.next_turn += 1
            self.turn.notify_all()
        return await work

    async def pause(self, how: Pause) -> None:
        """Stop sampling; see `Pause`."""
        if self.pausing is None:
            self.pausing = asyncio.create_task(self._pause(how))
        await self._while_alive(self.pausing)

    async def _pause(self, how: Pause) -> None:
        if how == "drain":
            await self.is_idle.wait()
        await self._stop(clear_cache=how != "keep")

    async def resume(self) -> None:
        """Sample queued and later prompts with the present weights."""
        async with self.adding:
            await self._paused()
            if self.is_stale:
                raise RuntimeError(
                    "the engine's last weight update failed; it must receive all weights before it samples"
                )
            self.pausing = None
            await self._while_alive(self._go_on())

    async def seed(self, seed: int) -> None:
        """Seed the sampler; the weights stay."""
        await self._paused()
        await self._while_alive(self._update({"seed": seed}))

    async def receive_weights(self, version: int, check: bool, seed: int) -> None:
        """Receive the weights that the learners are sending, and seed the sampler. After a failure the engine does not sample."""
        await self._paused()
        self.is_stale, self.version = True, version
        await self._while_alive(self._update({"seed": seed, "version": version, "check": check}))
        self.is_stale = False

    async def _paused(self) -> None:
        """Wait until a requested pause, if any, is reached."""
        if self.pausing is not None:
            await self._while_alive(self.pausing)

    async def submit(self, batch: PromptBatch) -> None:
        """Queue prompts.

        If the engine is paused, the later work of scheduler and sampler depends on the batches and the seed alone, not on their time
        of arrival.
        """
        async with self.adding:
            await self._paused()
            prompts = [batch.tokens[a:b].tolist() for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]
            self.is_idle.clear()
            await self._while_alive(self._add(batch, prompts))
            if not self.requests:
                self.is_idle.set()

    async def poll(self, gather_s: float = GATHER_S) -> Completions:
        """Groups that finished or were refused since the last poll; waits for the first, and then `gather_s` seconds for more."""
        await self._while_alive(self.has_finished.wait())
        if self.failure is not None:
            raise self.failure
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.is_idle.wait(), gather_s)
        (finished, self.finished), (refused, self.refused) = (self.finished, []), (self.refused, {})
        self.has_finished.clear()
        found = joined(finished) if finished else {"numbers": np.zeros(0, np.int64)}
        if refused:
            found |= {"refused": np.array([*refused], np.int64), "refusals": np.array([*refused.values()])}
        return found

    async def abort(self) -> None:
        """End all queued or running groups; `poll` returns them with the tokens so far."""
        async with self.adding:
            await self._while_alive(self._abort(list(self.requests.values())))

    async def withdraw(self, numbers: Sequence[int]) -> None:
        """End these groups if they are queued or running; `poll` returns them with the tokens so far."""
        async with self.adding:
            requests = [self.requests[number] for number in numbers if number in self.requests]
        await self._while_alive(self._abort(requests))

    def _expect(self, number: int, request: str, group: Coroutine[Any, Any, Completions]) -> None:
        """Collect the group of this number once it is finished.

        Args:
            request: vLLM's name of the request.
            group: returns the group as from `flattened`, once all its completions have ended; or raises RefusedError.
        """
        self.requests[number] = request
        task = asyncio.create_task(self._collect(number, group))
        self.collecting.add(task)
        task.add_done_callback(self._collected)

    def _refuse(self, number: int, reason: str) -> None:
        """Record a refused request for `poll`."""
        self.refused[number] = reason
        self.has_finished.set()

    async def _collect(self, number: int, group: Coroutine[Any, Any, Completions]) -> None:
        try:
            found = await group  # a poll may meanwhile have taken the list
        except RefusedError as err:
            self._refuse(number, str(err))
        else:
            self.finished.append(found)
            self.has_finished.set()
        del self.requests[number]
        if not self.requests:
            self.is_idle.set()

    def _collected(self, task: asyncio.Task[None]) -> None:
        self.collecting.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.failure = failure
            self.has_finished.set()

    async def _while_alive(self, work: Awaitable[Any]) -> Any:
        """Await `work`; raises soon after the engine has died, when some calls would never be answered."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            if (death := self._death()) is not None:
                task.cancel()
                raise death
        return task.result()


class CallOutput(Protocol):
    """A completion as vLLM returns it."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def weight_versions(self) -> Any:
        """Spans of tokens, `start` to `end`, each of one `version`; or None."""


def sampling_settings(sampling: Sampling, *, num_logprobs: int = 0) -> dict[str, Any]:
    """Values of vLLM's SamplingParams, in JSON.

    Args:
        num_logprobs: see `EngineCalls`.
    """
    settings = {
        "n": sampling.num_samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": num_logprobs if sampling.has_sets else 0,
    }
    if sampling.prompt_logprobs is not None:
        settings["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.regex is not None:
        # A regex needs a tokenizer: after a complete answer the grammar allows only the tokenizer's eos.
        settings |= {"structured_outputs": {"regex": sampling.regex}}
    if not sampling.stop_strings:
        return settings | {"detokenize": False}
    return settings | {
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        # "<|im_end|>" may be a special token.
        "skip_special_tokens": False,
        # With a tokenizer vLLM would also end at the tokenizer's eos; only stop_token_ids decide.
        "ignore_eos": sampling.regex is None,
    }


def own_settings(batch: PromptBatch) -> list[dict[str, int]]:
    """For each prompt, the settings that differ from the batch's."""
    columns = {"seed": batch.seeds, "max_tokens": batch.max_tokens}
    given = {name: values.tolist() for name, values in columns.items() if values is not None}
    return [{name: values[place] for name, values in given.items()} for place in range(len(batch.numbers))]


def salts(batch: PromptBatch) -> list[int]:
    """For each prompt, the salt that separates its cache entries from those of others.

    Entries of other groups may be of older weights, see `Pause`, also if a prompt is queued before an update and begins after it. So
    only the samples and the turns of one group share entries.
    """
    return (batch.numbers if batch.salts is None else batch.salts).tolist()


def flattened(
    number: int,
    completions: Sequence[CallOutput],
    logprobs: Sequence[Sequence[float]],
    kept: Sequence[KeptTokens] | None = None,
    routes: Sequence[Routes] | None = None,
) -> Completions:
    """One group, with `lengths [samples]` instead of `cu_seqlens`.

    Args:
        logprobs, kept: for each completion, the values of its tokens.
        routes: for each completion, the rows of prompt and tokens except the last, or none.
    """
    lengths = [len(completion.token_ids) for completion in completions]
    assert lengths == [len(found) for found in logprobs], "one per position, the sampled token's"
    versions = np.zeros(sum(lengths), dtype=np.int32)
    start = 0
    for completion, length in zip(completions, lengths, strict=True):
        for span in completion.weight_versions or ():
            version = UNSYNCED if span.version == "default" else int(span.version)
            versions[start + span.start : start + span.end] = version
        start += length
    sets = None if kept is None else KeptTokens.joined(kept)
    return {
        "numbers": np.array([number], dtype=np.int64),
        "sizes": np.array([len(completions)], dtype=np.int64),
        "tokens": np.fromiter(itertools.chain.from_iterable(c.token_ids for c in completions), dtype=np.int32),
        "logprobs": np.array([*itertools.chain.from_iterable(logprobs)], dtype=np.float32),
        "policy_versions": versions,
        "lengths": np.array(lengths, dtype=np.int64),
        "finish_reasons": np.array([FINISH_REASONS.index(c.finish_reason or "") for c in completions], dtype=np.int8),
        **({"kept_ids": sets.ids, "kept_sizes": sets.sizes} if sets else {}),
        **({} if routes is None else {"routes": np.concatenate(routes), "route_sizes": np.array([*map(len, routes)])}),
    }


def of_prompt(logprobs: np.ndarray, ids: np.ndarray, likeliest: np.ndarray) -> Completions:
    """Prompt log-probabilities of one group.

    Args:
        logprobs: `[scored]`, the tokens' own.
        ids, likeliest: `[scored, k]`.
    """
    return {
        "prompt_sizes": np.array([len(logprobs)], np.int64),
        "prompt_logprobs": logprobs.astype(np.float32),
        "prompt_ids": ids.astype(np.int32),
        "prompt_likeliest": likeliest.astype(np.float32),
    }


def joined(groups: Sequence[Completions]) -> Completions:
    """Concatenate groups of `flattened`."""
    if any("kept_ids" in group for group in groups):
        groups = [_with_sets(group) for group in groups]
    if (routes := next((group["routes"] for group in groups if "routes" in group), None)) is not None:
        none = {"routes": routes[:0]}
        groups = [none | {"route_sizes": np.zeros(len(group["lengths"]), np.int64)} | group for group in groups]
    whole = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    lengths = whole.pop("lengths")
    return {**whole, "cu_seqlens": np.concatenate(([0], np.cumsum(lengths)))}


def _with_sets(group: Completions) -> Completions:
    """Add empty sampling masks: an evaluation's group has none, and may finish together with others."""
    none = KeptTokens.none(len(group["tokens"]))
    return {"kept_ids": none.ids, "kept_sizes": none.sizes} | group
