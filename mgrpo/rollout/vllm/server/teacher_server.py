"""The calls of a vLLM server that is a teacher: any server that was started with the teacher's model.

Requests go to OpenAI's completions API, for the log-probabilities of a prompt and one token, which is discarded. Answers are checked
against the requests as untrusted input.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mgrpo.config.schema import Config
from mgrpo.models.hf_config import read_hf_config
from mgrpo.rollout.engine import Completions, EngineError, PromptBatch, RefusedError, WrongAnswerError
from mgrpo.rollout.vllm.calls import flattened, of_prompt
from mgrpo.rollout.vllm.server.server_answers import LEAST_LOGPROB, MOST_LOGPROB
from mgrpo.rollout.vllm.server.server_calls import ServerCalls
from mgrpo.rollout.vllm.server.server_connection import ANSWER_BYTES, OF_THE_REQUEST, ServerRefusal
from mgrpo.rollout.vllm.server.server_facts import TextSample

COMPLETIONS = "/v1/completions"
CANDIDATE_BYTES = 512
"""Upper bound of an answer's bytes for a candidate: its id, numbers, and text."""
MOST_MASS = 1 + 1e-3
"""Greatest accepted sum of the likeliest tokens' probabilities: 1, and rounding errors."""
NOT_A_NUMBER = "JSON compliant"
"""Part of the server's error message when an answer would contain NaN or infinity."""
TEMPORARY = (408, 429, 500, 502, 503, 504)
"""Statuses of a server, or a proxy in front of it, that will answer later."""


class PromptCandidate(msgspec.Struct):
    """A token at a place of the prompt; other fields are skipped."""

    logprob: float


Candidates = dict[int, PromptCandidate]


class PromptChoice(msgspec.Struct):
    """The prompt's log-probabilities in an answer."""

    prompt_logprobs: list[Candidates | None] | None = None


class TeacherAnswer(msgspec.Struct):
    """The answer to one prompt."""

    choices: list[PromptChoice]


class Tokens(msgspec.Struct):
    """The answer to a text."""

    tokens: list[int]


_TOKENS = msgspec.json.Decoder(Tokens)
_DECODER = msgspec.json.Decoder(TeacherAnswer)


class TeacherServer(ServerCalls):
    """One server of a teacher, which keeps running after the run."""

    setting = "teacher_server_base_url"
    token = "MGRPO_TEACHER_SERVER_TOKEN"

    def __init__(self, url: str, *, sample: TextSample | None = None) -> None:
        """
        Args:
            sample: a text that must have the same tokens on the server, if it has a tokenizer.
        """
        super().__init__(url)
        self.sample = sample
        self.model = ""
        """Name of the teacher's model, for both sides."""
        self.most_tokens = 0
        """Most tokens of a sequence."""

    async def start(self, config: Config, *, before: ServerCalls | None = None) -> None:
        """See `ServerCalls.start`. The server must still have the model of `before`, and accept sequences as long."""
        if isinstance(before, TeacherServer):
            self.model, self.most_tokens = before.model, before.most_tokens
        await super().start(config, before=before)

    async def _problems(self, config: Config) -> list[str]:
        self.vocab = read_hf_config(config.model_path)["vocab_size"]
        lengths = _lengths(await self._known("/v1/models", remedy="it is not a vLLM server"))
        wanted = [self.model] if self.model else [teacher.model for teacher in config.distillation.teachers]
        self.model = next((model for model in wanted if model in lengths), "")
        if not self.model:
            return [
                f"the server's model is {_listed(lengths)}, and teacher_model_name_or_path names {_listed(wanted)}; start it with "
                "--served-model-name, or correct the name"
            ]
        # vLLM samples a token after the sequence.
        least, own = max(self.most_tokens, config.max_model_length) + 1, lengths[self.model]
        if own < least:
            return [
                f"the server's max_model_len is {own}, expected at least {least}, max_prompt_token_length + response_length + 1; start it "
                f"with --max-model-len {least}, or lower them"
            ]
        self.most_tokens = own - 1
        return await self._trial_problems(config.distillation.num_likeliest) or await self._tokenizer_problems()

    async def _trial_problems(self, num_likeliest: int) -> list[str]:
        """Problems of the answer to a request with the last token of the policy's vocabulary."""
        tokens = [0, self.vocab - 1]
        try:
            answer = await self.connection.post(COMPLETIONS, self._question(tokens, num_likeliest))
        except ServerRefusal as err:
            if "max allowed" in err.message:
                return [
                    f"distillation_topk={num_likeliest} is above what the server gives ({err.message}); start it with --max-logprobs "
                    f"{num_likeliest}, or lower distillation_topk"
                ]
            if "vocabulary" in err.message:
                return [
                    f"the server's model cannot read token {self.vocab - 1}, the policy's last ({err.message}); take a teacher with the "
                    "policy's vocabulary"
                ]
            if NOT_A_NUMBER in err.message:
                return [
                    f"the server's model gives log-probabilities that are no numbers ({err.message}); look at its weights"
                ]
            return [self._answer(err)]
        read_teacher_answer(answer, tokens, 1, num_likeliest)
        return []

    async def _tokenizer_problems(self) -> list[str]:
        """Problem if the server's tokens of the sample differ."""
        if self.sample is None:
            return []
        body = {"model": self.model, "prompt": self.sample.text, "add_special_tokens": False}
        try:
            theirs = _TOKENS.decode(await self.connection.post("/tokenize", body)).tokens
        except ServerRefusal:
            return []  # it needs no tokenizer
        except (ValueError, RecursionError) as err:
            return [f"/tokenize: the answer cannot be read: {str(err)[:200]}"]
        pairs = enumerate(itertools.zip_longest(self.sample.tokens, theirs))
        difference = next(((place, own, other) for place, (own, other) in pairs if own != other), None)
        if difference is None:
            return []
        place, own, other = difference
        return [
            f"the server has another tokenizer: where the policy reads id {own} it reads {'nothing' if other is None else f'id {other}'} (token "
            f"{place} of a text of all tokens), so its log-probabilities would be of other texts; take a teacher of the policy's family"
        ]

    def _question(self, tokens: list[int], num_likeliest: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": num_likeliest,
        }

    async def _add(self, batch: PromptBatch, prompts: Sequence[list[int]]) -> None:
        assert batch.starts is not None and batch.sampling.prompt_logprobs is not None, "a teacher samples nothing"
        for number, tokens, start in zip(batch.numbers.tolist(), prompts, batch.starts.tolist(), strict=True):
            self._expect(number, str(number), self._judged(number, tokens, start, batch.sampling.prompt_logprobs))

    async def _judged(self, number: int, tokens: list[int], start: int, num_likeliest: int) -> Completions:
        most_bytes = ANSWER_BYTES + CANDIDATE_BYTES * len(tokens) * (1 + num_likeliest)
        async with self.room:
            try:
                answer = await self.connection.sample(
                    COMPLETIONS, self._question(tokens, num_likeliest), most_bytes=most_bytes
                )
            except ServerRefusal as err:
                if NOT_A_NUMBER in err.message:
                    return _group(number, _nothing(len(tokens) - start, num_likeliest))
                if err.status in TEMPORARY:
                    raise
                if err.status in OF_THE_REQUEST:
                    raise RefusedError(f"server {self.url}: {err}") from err
                raise WrongAnswerError(f"it refuses a question ({err})") from err
        return _group(number, read_teacher_answer(answer, tokens, start, num_likeliest))

    async def join(self, invitation: Mapping[str, Any]) -> None:
        """Not supported: a teacher's weights do not change."""
        raise NotImplementedError("a teacher's weights stay as they are")

    async def _update(self, info: dict[str, Any]) -> None:
        raise NotImplementedError("a teacher's weights stay as they are")

    async def _abort(self, requests: Sequence[str]) -> None:
        raise NotImplementedError("questions to a teacher are short")

    async def _stop(self, *, clear_cache: bool) -> None:
        """No-op: the server also serves others."""

    async def _go_on(self) -> None:
        """No-op: the server is never stopped."""


def read_teacher_answer(
    answer: bytes, tokens: Sequence[int], start: int, num_likeliest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of the tokens from `start` on, and the likeliest tokens with theirs; see `of_prompt`.

    Raises:
        EngineError: the answer cannot be read.
        WrongAnswerError: it does not fit these tokens, or has no log-probabilities.
    """
    try:
        choices = _DECODER.decode(answer).choices
    except (ValueError, RecursionError) as err:
        raise EngineError(f"the answer to a question cannot be read: {str(err)[:200]}") from err
    found = (choices[0].prompt_logprobs if len(choices) == 1 else None) or []
    own, ids, likeliest = _nothing(len(tokens) - start, num_likeliest)
    problem = next(_problems(found, tokens, num_likeliest), None)
    if problem is not None:
        raise WrongAnswerError(f"the answer to a question has {problem}, which a vLLM server cannot have given")
    for row, (token, candidates) in enumerate(zip(tokens[start:], found[start:], strict=True)):
        if candidates is None:
            continue
        own[row] = candidates[token].logprob
        best = sorted(candidates, key=lambda token: -candidates[token].logprob)[:num_likeliest]
        ids[row, : len(best)] = best
        likeliest[row, : len(best)] = [candidates[token].logprob for token in best]
    return np.where(own > LEAST_LOGPROB, own, np.nan), ids, np.where(likeliest > LEAST_LOGPROB, likeliest, np.nan)


def _problems(found: Sequence[Candidates | None], tokens: Sequence[int], num_likeliest: int) -> Iterator[str]:
    """Problems of the answer, in words that follow "has"."""
    if len(found) != len(tokens):
        yield f"log-probabilities of {len(found)} tokens instead of {len(tokens)}"
        return
    for place, (token, candidates) in enumerate(zip(tokens, found, strict=True)):
        if candidates is None:
            continue
        if token not in candidates:
            yield f"no log-probability of token {token} at place {place}"
        if len(candidates) > num_likeliest + 1:
            yield f"{len(candidates)} candidates at place {place}, asked for {num_likeliest} and the token's own"
        if (least := min(candidates, default=0)) < 0:
            yield f"the token {least}"
        values = [candidate.logprob for candidate in candidates.values()]
        if not all(value <= MOST_LOGPROB for value in values):
            yield f"a log-probability of {max(values):g}"
        elif np.exp(values).sum() > MOST_MASS:
            yield f"probabilities at place {place} that add up to {np.exp(values).sum():.3g}"


def _group(number: int, answer: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Completions:
    """A group without completions."""
    return flattened(number, (), ()) | of_prompt(*answer)


def _nothing(count: int, num_likeliest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An empty result of `read_teacher_answer`, for missing log-probabilities."""
    shape = count, num_likeliest
    return np.full(count, np.nan), np.full(shape, -1), np.full(shape, np.nan)


def _lengths(answer: Any) -> dict[str, int]:
    """The server's models by name, with the most tokens of a sequence."""
    try:
        return {str(card["id"]): int(card["max_model_len"]) for card in answer["data"]}
    except (KeyError, TypeError, ValueError) as err:
        raise EngineError(f"/v1/models: the answer is {str(answer)[:100]}, expected vLLM's list of models") from err


def _listed(names: Any) -> str:
    return ", ".join(str(name)[:100] for name in list(names)[:10]) or "nothing"
