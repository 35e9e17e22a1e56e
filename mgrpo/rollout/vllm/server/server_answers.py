"""A vLLM server's answer to a prompt, checked as untrusted input: it comes from another program on another machine."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from mgrpo.rollout.engine import UNSYNCED, EngineError, WrongAnswerError
from mgrpo.rollout.mixtures import Mixtures
from mgrpo.rollout.vllm.kept_sets import kept_tokens, masked_tokens
from mgrpo.types import KeptTokens, Routes

LEAST_LOGPROB = -9999.0
"""The server's value for a log-probability that is not finite."""
MOST_LOGPROB = 1e-4
"""Greatest accepted log-probability: 0, and rounding errors."""
ENDINGS = ("stop", "length", "repetition")
"""Finish reasons of complete completions."""
BROKEN_OFF = ("abort", "error")
"""Finish reasons of incomplete ones: an operator or the run has aborted them, or the server's engine restarts."""


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
    routed_experts: str | None = None
    """An array as a .npy file, in base64."""

    @property
    def content(self) -> list[SampledToken]:
        """The log-probabilities, one for each token."""
        return (self.logprobs and self.logprobs.content) or []

    def sampled(self) -> list[float]:
        """Log-probability of each token."""
        return [token.logprob if token.logprob > LEAST_LOGPROB else -np.inf for token in self.content]

    def routes(self, mixtures: Mixtures, prompt: int) -> Routes:
        """Routed experts of its tokens and of the prompt's, whose number is `prompt`.

        Raises:
            WrongAnswerError: they do not fit these tokens or this model.
        """
        try:
            found = None
            if self.routed_experts:
                found = np.load(io.BytesIO(base64.b64decode(self.routed_experts)), allow_pickle=False)
                if found.dtype.kind != "u" or found.max(initial=0) >= mixtures.count:
                    raise ValueError(f"experts of type {found.dtype}, up to {found.max(initial=0)}")
            return mixtures.routes(found, prompt, len(self.token_ids))
        except (ValueError, EOFError, MemoryError) as err:
            raise WrongAnswerError(
                f"the answer to a prompt has {str(err)[:200] or 'an empty file'}; the model has {mixtures.count} experts"
            ) from err

    def kept(self, *, has_masks: bool = False) -> KeptTokens:
        """Sampling masks of the tokens, from the server's masks or from log-probabilities."""
        if has_masks:
            return masked_tokens(self.token_ids, self.sampling_mask)
        shape = len(self.content), max((len(token.top_logprobs) for token in self.content), default=0)
        ids, logprobs = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
        for row, token in enumerate(self.content):
            for column, candidate in enumerate(token.top_logprobs):
                ids[row, column] = candidate.token_id
                if candidate.logprob > LEAST_LOGPROB:
                    logprobs[row, column] = candidate.logprob
        return kept_tokens(np.array(self.token_ids, np.int32), ids, logprobs)


class ServerAnswer(msgspec.Struct):
    """The answer to one prompt."""

    choices: list[ServerChoice]


_DECODER = msgspec.json.Decoder(ServerAnswer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswer:
    """Bounds that an answer must fit."""

    num_samples: int
    max_tokens: int
    vocab: int
    oldest_version: int
    """Version of the weights when the prompt was sent; UNSYNCED before the first sync."""


def read_answer(answer: bytes, expected: ExpectedAnswer, *, version: int, is_aborted: bool) -> list[ServerChoice]:
    """Parse and check an answer; returns the completions, sample by sample.

    Args:
        version: present version of the engine's weights.
        is_aborted: True if the run has ended the request.
    Raises:
        EngineError: the answer cannot be read, or the server has aborted a completion.
        WrongAnswerError: the completions cannot have been sampled for this request.
    """
    try:
        choices = sorted(_DECODER.decode(answer).choices, key=lambda choice: choice.index)
    except (ValueError, RecursionError) as err:
        raise EngineError(f"the answer to a prompt cannot be read: {str(err)[:200]}") from err
    if (problem := next(_problems(choices, expected, version), None)) is not None:
        raise WrongAnswerError(
            f"the answer to a prompt has {problem}, which a vLLM server cannot have sampled for this run"
        )
    broken_off = [choice.finish_reason for choice in choices if choice.finish_reason in BROKEN_OFF]
    if broken_off and not is_aborted:
        raise EngineError(f"the server has broken off a completion itself, with finish_reason {broken_off[0]}")
    return choices


def _problems(choices: list[ServerChoice], expected: ExpectedAnswer, version: int) -> Iterator[str]:
    """Problems of the completions, in words that follow "has"."""
    if len(choices) != expected.num_samples:
        yield f"{len(choices)} completion{'s' * (len(choices) != 1)} instead of {expected.num_samples}"
        return
    if (found := [choice.index for choice in choices]) != list(range(expected.num_samples)):
        yield f"completions {_listed(found)} instead of {_listed(range(expected.num_samples))}"
    for choice in choices:
        was_broken_off = choice.finish_reason in BROKEN_OFF
        if choice.finish_reason not in ENDINGS and not was_broken_off:
            yield f"a completion with finish_reason {choice.finish_reason[:40]}"
        length, least = len(choice.token_ids), 0 if was_broken_off else 1
        if not least <= length <= expected.max_tokens:
            yield f"a completion of {length} tokens, asked for {least} to {expected.max_tokens}"
        if [token.token_id for token in choice.content] != choice.token_ids:
            yield "a completion with log-probabilities that are not one for each of its tokens"
        yield from _value_problems(choice, expected)
        yield from _version_problems(choice, expected, version)


def _value_problems(choice: ServerChoice, expected: ExpectedAnswer) -> Iterator[str]:
    candidates = [*choice.content, *(candidate for token in choice.content for candidate in token.top_logprobs)]
    masks = choice.sampling_mask or []
    for token in itertools.chain((candidate.token_id for candidate in candidates), *masks):
        if not 0 <= token < expected.vocab:
            yield f"the token {token}, the vocabulary has 0 to {expected.vocab - 1}"
    for candidate in candidates:
        if not candidate.logprob <= MOST_LOGPROB:
            yield f"a log-probability of {candidate.logprob:g}"
    if any(len(mask) != len(set(mask)) for mask in masks):
        yield "a sampling mask with a token twice"


def _version_problems(choice: ServerChoice, expected: ExpectedAnswer, version: int) -> Iterator[str]:
    """Problems of the version labels. Before the first sync labels are those of an earlier user, and no completion is trained on."""
    if expected.oldest_version == UNSYNCED:
        return
    spans = choice.weight_versions or []
    ends = [0, *(span.end for span in spans)]
    are_joined = all(start == span.start < span.end for start, span in zip(ends, spans, strict=False))
    if not are_joined or ends[-1] != len(choice.token_ids):
        yield "tokens whose weights have no version"
    known = range(expected.oldest_version, version + 1)
    for span in spans:
        if span.version not in map(str, known):
            sent = f"{version}" if len(known) == 1 else f"{expected.oldest_version} to {version}"
            yield f"tokens of weights of version {span.version[:40]}, the run has sent {sent}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, itertools.islice(numbers, 20)))
