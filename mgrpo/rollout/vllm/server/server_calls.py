"""The calls of an engine that is a vLLM server, over its HTTP endpoints.

A server answers a prompt once, when all its completions have ended. Only this side knows which prompts it has queued, and when it
pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from mgrpo.config.schema import Config
from mgrpo.models.family import read_hf_config, shape_of
from mgrpo.rollout.engine import UNSYNCED, Completions, EngineError, PromptBatch
from mgrpo.rollout.vllm.calls import EngineCalls, flattened, own_settings, salts, sampling_settings
from mgrpo.rollout.vllm.kept_sets import kept_tokens, masked_tokens, num_logprobs
from mgrpo.rollout.vllm.server.server_connection import TOKEN, ServerConnection, ServerRefusal
from mgrpo.rollout.vllm.server.server_facts import config_problems
from mgrpo.types import KeptTokens

REQUESTS = 512
"""Prompts that a server is given at once, each over a connection of its own: several times as many as it samples at once."""
RETRY_S = 1.0
RETURN_S = 5.0
"""Seconds before a server that has failed is asked again."""
ABORT_EVERY_S = 0.05
HEALTH_EVERY_S = 5.0
HEALTH_TIMEOUT_S = 30.0
LEAVE_S = 10.0
LEAST_LOGPROB = -9999.0
"""The server's number for a log-probability that is not finite."""


class ServerError(EngineError):
    """The server cannot serve this run.

    Args:
        problems: all of them, one sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ServerCalls(EngineCalls):
    """One server, which goes on when the run ends."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.connection = ServerConnection(url)
        self.name = f"mgrpo-{secrets.token_hex(8)}"
        """Begins the names of the run's requests and cached prompts; an earlier run has had the same numbers."""
        self.room = asyncio.Semaphore(REQUESTS)
        self.aborted: set[str] = set()
        self.has_joined = False
        self.place: dict[str, Any] = {}
        """Where the run meets its engines, once it has asked the server to join."""
        self.health_timeout_s = HEALTH_TIMEOUT_S
        self.dead: EngineError | None = None
        self.watching: asyncio.Task[None] | None = None

    async def start(self, config: Config, *, before: ServerCalls | None = None) -> None:
        """Wait for the server, and make sure that it can serve the run; then pause it.

        Args:
            before: the calls of this run's earlier engine on the server, which has failed: the server may still be joined to it.

        Raises:
            ServerError: it does not answer within `vllm_server_timeout` seconds, or cannot.
        """
        self.num_logprobs = num_logprobs(config)
        self.has_masks = config.rollout.needs_masks
        self.health_timeout_s = max(HEALTH_TIMEOUT_S, config.engine.engine_heartbeat_timeout)
        if before is not None:
            self.place = before.place
            await asyncio.sleep(RETURN_S)
        await self._wait(config.engine.vllm_server_timeout)
        try:
            info = await self._known("/server_info?config_format=json", remedy="start it with VLLM_SERVER_DEV_MODE=1")
            problems = config_problems(info, config) + await self._generate_problems()
            if not problems:
                problems = await self._plugin_problems(config)
        except ServerRefusal as err:
            problems = [str(err)]
        if problems:
            raise ServerError([f"vllm_server_base_url={self.url}: {problem}" for problem in problems])
        # An earlier run has left it paused, because its last update failed or it was killed: see `leave`.
        self.is_stale = bool((await self.connection.get("/is_paused"))["is_paused"])
        self.watching = asyncio.create_task(self._watch())
        await self.pause("recompute")

    async def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.connection.get("/health", timeout_s=HEALTH_TIMEOUT_S)
                return
            except ServerRefusal as err:
                # 503: its engine has died; a proxy answers with the others while it starts.
                if err.status not in (502, 503, 504):
                    raise ServerError([f"vllm_server_base_url={self.url}: {_answer(err)}"]) from err
                reason = "its engine has died; restart it" if err.status == 503 else f"{_answer(err)}; start it"
            except EngineError as err:
                reason = f"{err}; start it, or correct the address"
            if time.monotonic() > deadline:
                raise ServerError(
                    [
                        f"vllm_server_base_url={self.url}: no vLLM server is ready there within "
                        f"vllm_server_timeout={timeout_s:g} s: {reason}"
                    ]
                )
            await asyncio.sleep(RETRY_S)

    async def _known(self, path: str, *, remedy: str) -> Any:
        try:
            return await self.connection.get(path)
        except ServerRefusal as err:
            if err.status == 404:
                raise ServerError([f"vllm_server_base_url={self.url}: the server has no {path}; {remedy}"]) from err
            raise ServerError([f"vllm_server_base_url={self.url}: {_answer(err)}"]) from err

    async def _generate_problems(self) -> list[str]:
        """A sentence unless the server takes and gives tokens; it refuses a request without tokens only for that reason."""
        try:
            await self.connection.post("/inference/v1/generate")
        except ServerRefusal as err:
            if err.status in (400, 422):
                return []
            if "enable-scale-out" in err.message:
                return ["the server does not take tokens instead of text; start it with --enable-scale-out"]
            return [_answer(err)]
        return ["the server answers a prompt without tokens; it is not a vLLM server that this version of mgrpo knows"]

    async def _plugin_problems(self, config: Config) -> list[str]:
        """A sentence unless the plugin is there, serves no other run, and has the run's model."""
        shape = asdict(shape_of(read_hf_config(config.model_path)))
        try:
            await self._init({"model": shape, **self.place}, is_trial=True)
        except ServerRefusal as err:
            return [err.message]
        return []

    async def _init(self, invitation: Mapping[str, Any], *, is_trial: bool) -> None:
        info = {"invitation": invitation, "is_trial": is_trial}
        await self.connection.post("/init_weight_transfer_engine", {"init_info": info})

    async def ping(self) -> None:
        """Return when the server has answered that its engine is healthy."""
        if self.dead is not None:
            raise self.dead
        await self.connection.get("/health", timeout_s=self.health_timeout_s)

    async def _watch(self) -> None:
        """Notice when the server no longer answers."""
        while self.dead is None:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                await self.connection.get("/health", timeout_s=self.health_timeout_s)
            except EngineError as err:
                self.dead = EngineError(f"the server does not answer any more: {err}")

    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Join the weight-transfer group that the learners are joining at the same time."""
        self.place = {name: invitation[name] for name in ("host", "port") if name in invitation}
        await self._while_alive(self._init(invitation, is_trial=False))
        self.has_joined = True

    async def leave(self) -> None:
        """Give the server back: it samples with the weights that it has, and the next run may join it.

        After an update that has failed it stays paused, because its weights are of no version.
        """
        # Do not wait for an answer that is missing: the next run finds that this one has gone.
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
            # An earlier run has ended without a word, in the middle of one.
            await self.connection.post("/finish_weight_update")
            await self.connection.post("/start_weight_update")
        await self.connection.post("/update_weights", {"update_info": info})
        label = {} if self.version == UNSYNCED else {"weight_version": str(self.version)}
        await self.connection.post("/finish_weight_update", label)

    async def _abort(self, requests: Sequence[str]) -> None:
        self.aborted.update(requests)
        # Repeated, because the server does not know requests that are still on their way to it.
        while left := self.aborted.intersection(self.requests.values()):
            # The server puts its own prefix before the names that it is given.
            names = [f"generate-tokens-{request}" for request in left]
            await self.connection.post("/abort_requests", {"request_ids": names})
            await asyncio.sleep(ABORT_EVERY_S)

    def _death(self) -> BaseException | None:
        return self.dead

    async def _add(self, batch: PromptBatch, prompts: Sequence[list[int]]) -> None:
        # The server may have a tokenizer although no stop strings are looked for, and would end at its eos as well.
        settings = sampling_settings(batch.sampling, num_logprobs=self.num_logprobs)
        settings["ignore_eos"] = batch.sampling.regex is None
        prompts_of = zip(batch.numbers.tolist(), prompts, salts(batch), own_settings(batch), strict=True)
        for number, prompt, salt, own in prompts_of:
            request = f"{self.name}-{number}"
            body = {
                "request_id": request,
                "token_ids": prompt,
                "sampling_params": settings | own,
                "cache_salt": f"{self.name}-{salt}",
            }
            self._expect(number, request, self._group(number, body, has_sets=batch.sampling.has_sets))

    async def _group(self, number: int, body: Mapping[str, Any], *, has_sets: bool) -> Completions:
        async with self.room:
            if body["request_id"] in self.aborted:
                nothing = [ServerChoice(index=index, token_ids=[], finish_reason="abort") for index in range(body["sampling_params"]["n"])]  # fmt: skip
                return flattened(number, nothing, [[]] * len(nothing))
            answer = await self.connection.post("/inference/v1/generate", body)
        choices = sorted(DECODER.decode(answer).choices, key=lambda choice: choice.index)
        kept = [choice.kept(has_masks=self.has_masks) for choice in choices] if has_sets else None
        return flattened(number, choices, [choice.sampled() for choice in choices], kept)


class Candidate(msgspec.Struct):
    """A token in a server's answer; other fields are skipped."""

    token_id: int
    logprob: float


class SampledToken(Candidate):
    """A sampled token, with the likeliest ones at its position, the sampled one among them."""

    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    """The log-probabilities of one completion."""

    content: list[SampledToken] | None = None


class VersionSpan(msgspec.Struct):
    """Tokens of one version of the weights."""

    start: int
    end: int
    version: str


class ServerChoice(msgspec.Struct):
    """One completion."""

    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    sampling_mask: list[list[int]] | None = None

    def sampled(self) -> list[float]:
        """Log-probability of each token."""
        content = (self.logprobs and self.logprobs.content) or []
        assert [token.token_id for token in content] == self.token_ids, "one per position, the sampled token's"
        return [token.logprob if token.logprob > LEAST_LOGPROB else -np.inf for token in content]

    def kept(self, *, has_masks: bool = False) -> KeptTokens:
        """The sets that the tokens were sampled from, from masks or log-probabilities."""
        if has_masks:
            return masked_tokens(self.token_ids, self.sampling_mask)
        content = (self.logprobs and self.logprobs.content) or []
        shape = len(content), max((len(token.top_logprobs) for token in content), default=0)
        ids, logprobs = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        for row, token in enumerate(content):
            for column, candidate in enumerate(token.top_logprobs):
                ids[row, column] = candidate.token_id
                if candidate.logprob > LEAST_LOGPROB:
                    logprobs[row, column] = candidate.logprob
        return kept_tokens(np.array(self.token_ids, np.int32), ids, logprobs)


class ServerAnswer(msgspec.Struct):
    """The answer to one prompt."""

    choices: list[ServerChoice]


DECODER = msgspec.json.Decoder(ServerAnswer)


def _answer(err: ServerRefusal) -> str:
    """A clause about an answer that a vLLM server would not give, with the remedy."""
    if err.status in (401, 403):
        return f"the server refuses the request ({err}); set {TOKEN} in the environment to its token"
    return f"what answers there is not a vLLM server, or a proxy lets too little through ({err})"
