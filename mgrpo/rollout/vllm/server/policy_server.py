"""The calls of a vLLM server that samples from the policy: weight updates, pauses and requests for completions.

A server answers a prompt once, when all its completions have ended. Queued prompts and pauses are tracked on this side.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mgrpo.config.schema import Config
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.shape import ModelShape
from mgrpo.rollout.engine import UNSYNCED, Completions, EngineError, PromptBatch, RefusedError
from mgrpo.rollout.mixtures import Mixtures, mixtures
from mgrpo.rollout.vllm.calls import flattened, own_settings, salts, sampling_settings
from mgrpo.rollout.vllm.kept_sets import num_logprobs
from mgrpo.rollout.vllm.server.server_answers import ExpectedAnswer, ServerChoice, read_answer
from mgrpo.rollout.vllm.server.server_calls import LEAVE_S, ServerCalls
from mgrpo.rollout.vllm.server.server_connection import ANSWER_BYTES, ANSWER_S, OF_THE_REQUEST, ServerRefusal
from mgrpo.rollout.vllm.server.server_facts import config_problems

ABORT_EVERY_S = 0.05
POSITION_BYTES = 1024
"""Upper bound of an answer's bytes for a position of a completion, and for each candidate and each 64 tokens of a mask there."""


class PolicyServer(ServerCalls):
    """One server of the policy, which keeps running after the run."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.name = f"mgrpo-{secrets.token_hex(8)}"
        """Prefix of the names of the run's requests and cached prompts; an earlier run has used the same numbers."""
        self.aborted: set[str] = set()
        self.has_joined = False
        self.mixtures: Mixtures | None = None
        """MoE layers, if the server returns routed experts."""
        self.longest = 0
        """Most tokens of a prompt and a completion together."""
        self.place: dict[str, Any] = {}
        """Host and port of the run's store, once the server was invited to join."""

    async def start(self, config: Config, *, before: ServerCalls | None = None) -> None:
        """See `ServerCalls.start`; then pause the server. It may still be in the transfer of `before`."""
        if isinstance(before, PolicyServer):
            self.place = before.place
        await super().start(config, before=before)
        self.connection.limit_s = max(ANSWER_S, config.engine.weight_sync_timeout)
        await self.pause("recompute")

    async def _problems(self, config: Config) -> list[str]:
        shape = shape_of(read_hf_config(config.model_path))
        self.num_logprobs, self.vocab = num_logprobs(config), shape.vocab
        self.has_masks = config.rollout.needs_masks
        self.mixtures = (
            mixtures(config.model_path) if config.parallel.routing_replay == "rollout" and shape.experts else None
        )
        self.longest = config.max_model_length
        info = await self._known("/server_info?config_format=json", remedy="start it with VLLM_SERVER_DEV_MODE=1")
        problems = config_problems(info, config) + await self._generate_problems()
        if not problems:
            problems = await self._plugin_problems(shape)
        # Paused by an earlier run whose last update failed, or which was killed: see `leave`.
        self.is_stale = not problems and await self._is_paused()
        return problems

    async def _generate_problems(self) -> list[str]:
        """Problem unless the server accepts and returns tokens: it must refuse a request without tokens for that reason only."""
        try:
            await self.connection.post("/inference/v1/generate")
        except ServerRefusal as err:
            if err.status in (400, 422):
                return []
            if "enable-scale-out" in err.message:
                return ["the server does not take tokens instead of text; start it with --enable-scale-out"]
            return [self._answer(err)]
        return ["the server answers a prompt without tokens; it is not a vLLM server that this version of mgrpo knows"]

    async def _is_paused(self) -> bool:
        answer = await self.connection.get("/is_paused")
        if not isinstance(answer, dict) or not isinstance(answer.get("is_paused"), bool):
            raise EngineError(f"/is_paused: the answer is {str(answer)[:100]}, expected is_paused")
        return answer["is_paused"]

    async def _plugin_problems(self, shape: ModelShape) -> list[str]:
        """Problem unless the plugin is installed, serves no other run, and has the run's model."""
        try:
            await self._init({"model": asdict(shape), **self.place}, is_trial=True)
        except ServerRefusal as err:
            return [err.message]
        return []

    async def _init(self, invitation: Mapping[str, Any], *, is_trial: bool) -> None:
        info = {"invitation": invitation, "is_trial": is_trial}
        await self.connection.post("/init_weight_transfer_engine", {"init_info": info})

    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""
        self.place = {name: invitation[name] for name in ("host", "port") if name in invitation}
        await self._while_alive(self._init(invitation, is_trial=False))
        self.has_joined = True

    async def leave(self) -> None:
        """Release the server: it samples with its present weights, and the next run may join it.

        After a failed update it stays paused, because its weights have no version.
        """
        # Do not wait for a missing answer: the next run detects that this one has ended.
        with contextlib.suppress(EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(self._give_back(), LEAVE_S)
        await self.connection.close()

    async def _give_back(self) -> None:
        if self.has_joined:
            if self.is_stale:
                with contextlib.suppress(ServerRefusal):
                    await self.connection.post("/finish_weight_update")
            await self.connection.post("/shutdown_weight_transfer_engine")
        if self.pausing is not None and not self.is_stale:
            await self.connection.post("/resume")

    async def _stop(self, *, clear_cache: bool) -> None:
        await self.connection.post(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}")

    async def _go_on(self) -> None:
        await self.connection.post("/resume")

    async def _update(self, info: dict[str, Any]) -> None:
        # Requests over several connections would overtake each other.
        try:
            await self.connection.post("/start_weight_update")
        except ServerRefusal as err:
            if "already active" not in err.message:
                raise
            # An earlier run was killed during an update.
            await self.connection.post("/finish_weight_update")
            await self.connection.post("/start_weight_update")
        await self.connection.post("/update_weights", {"update_info": info})
        label = {} if self.version == UNSYNCED else {"weight_version": str(self.version)}
        await self.connection.post("/finish_weight_update", label)

    async def _abort(self, requests: Sequence[str]) -> None:
        self.aborted.update(requests)
        # Repeated, because requests that are still on their way cannot be aborted.
        while left := self.aborted.intersection(self.requests.values()):
            # The server prefixes the names of requests.
            names = [f"generate-tokens-{request}" for request in left]
            await self.connection.post("/abort_requests", {"request_ids": names})
            await asyncio.sleep(ABORT_EVERY_S)

    async def _add(self, batch: PromptBatch, prompts: Sequence[list[int]]) -> None:
        # The server may have a tokenizer even without stop strings, and would also end at its eos.
        settings = sampling_settings(batch.sampling, num_logprobs=self.num_logprobs)
        settings["ignore_eos"] = batch.sampling.regex is None
        prompts_of = zip(batch.numbers.tolist(), prompts, salts(batch), own_settings(batch), strict=True)
        for number, prompt, salt, own in prompts_of:
            request = f"{self.name}-{number}"
            body = {
                "request_id": request,
                "token_ids": prompt,
                "sampling_params": (sampling := settings | own),
                "cache_salt": f"{self.name}-{salt}",
            }
            expected = ExpectedAnswer(
                num_samples=batch.sampling.num_samples,
                max_tokens=sampling["max_tokens"],
                vocab=self.vocab,
                oldest_version=self.version,
            )
            keeps = {"has_sets": batch.sampling.has_sets, "has_routes": batch.sampling.keeps_routes}
            self._expect(number, request, self._group(number, body, expected, **keeps))

    async def _group(
        self, number: int, body: Mapping[str, Any], expected: ExpectedAnswer, *, has_sets: bool, has_routes: bool
    ) -> Completions:
        request = body["request_id"]
        async with self.room:
            if request in self.aborted:
                self.aborted.remove(request)
                nothing = [ServerChoice(index=index, token_ids=[], finish_reason="abort") for index in range(expected.num_samples)]  # fmt: skip
                return flattened(number, nothing, [[]] * len(nothing))
            try:
                answer = await self.connection.sample(
                    "/inference/v1/generate", body, most_bytes=self._most_bytes(expected)
                )
            except ServerRefusal as err:
                if err.status in OF_THE_REQUEST:
                    raise RefusedError(f"server {self.url}: {err}") from err
                raise
        is_aborted = request in self.aborted
        self.aborted.discard(request)
        choices = read_answer(answer, expected, version=self.version, is_aborted=is_aborted)
        if is_aborted:
            # The result is discarded, and vLLM's output is incomplete.
            return flattened(number, choices, [choice.sampled() for choice in choices])
        kept = [choice.kept(has_masks=self.has_masks) for choice in choices] if has_sets else None
        routes = None
        if self.mixtures is not None and has_routes:
            routes = [choice.routes(self.mixtures, len(body["token_ids"])) for choice in choices]
        return flattened(number, choices, [choice.sampled() for choice in choices], kept, routes)

    def _most_bytes(self, expected: ExpectedAnswer) -> int:
        """Most bytes of an answer: an impostor's could be endless."""
        entries = 1 + self.num_logprobs + (expected.vocab // 64 if self.has_masks else 0)
        most = POSITION_BYTES * entries * expected.num_samples * expected.max_tokens
        if self.mixtures is not None:
            most += self.mixtures.most_bytes * expected.num_samples * self.longest
        return max(ANSWER_BYTES, most)
