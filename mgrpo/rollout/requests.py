"""Requests to the engines: prompts of training and evaluations, whole or turn by turn, with sampling and seeds, and the answers."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mgrpo.config.schema import MOST_TEMPERATURE, Rollout
from mgrpo.rollout.engine import FINISH_REASONS, Completions, PromptBatch, Sampling
from mgrpo.types import Completion, KeptTokens, Prompt, RolloutGroup, Routes

Decode = Callable[[Sequence[np.ndarray]], list[str]]
"""Token arrays -> texts."""

EVALUATION = -1
"""Random stream of all evaluations, which depends only on the seed of the run."""


def seed_of(*words: object) -> int:
    """A 62-bit seed derived from `words`."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def sampler_seed(run_seed: int, step: int, engine: int) -> int:
    """The seed of an engine's sampler for a training step.

    On a CPU an engine's sampler is seeded before each step and draws for all rows of a batch from one stream: no two prompts,
    steps or samples share their randomness, a run repeats, even after a resume, and engines need no generator per request, which
    is slow there. On GPUs every prompt has its own seed, see `Fleet.seeds_prompts`.
    """
    return seed_of(run_seed, step, engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTurn:
    """One turn of a trajectory. Turn 0 is shared by all trajectories of its prompt."""

    whole: Request
    """The request for the whole group."""
    sample: int
    turn: int
    tokens: np.ndarray
    """`[len]` int32: the prompt and all tokens that have followed it."""
    max_tokens: int
    salt: int
    """Equal for all turns that begin with one prompt, see `PromptBatch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Bounds of a request in all engines of the policy. An engine without a tokenizer accepts any token id, even one without a row
    in its embedding."""

    max_model_len: int
    """Tokens of a prompt and a completion together."""
    vocab: int
    has_tokenizer: bool
    has_masks: bool
    """Engines return sampling masks."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt to sample."""

    prompt: Prompt
    sampling: Sampling
    stream: int
    """Separates the random numbers of evaluations from those of training."""
    done: Callable[[RolloutGroup], None]
    """Called in the dispatcher's thread with the group."""
    number: int = -1
    """Number of a training group."""
    failed: Callable[[Exception], None] = lambda err: None
    """Called there instead of `done`; a RefusedError concerns this request alone."""
    turn: NextTurn | None = None
    """None: the whole answer, sampled in one request or turn by turn in requests of their own."""
    engine: int | None = None
    """The engine of the request; for a group of several turns, the one with its cache."""
    has_begun: bool = False
    """True once an engine has the first turn of a group of several turns."""

    @property
    def is_training(self) -> bool:
        """True for a group to train on, False in an evaluation."""
        return self.stream != EVALUATION

    @property
    def is_beginning(self) -> bool:
        """True if no token of its group has been sampled."""
        return self.turn is None or not self.turn.turn or not self.turn.whole.has_begun

    def sampling_of(self, num_samples: int, stop: Sequence[str] = ()) -> Sampling:
        """The sampling of a turn of `num_samples` trajectories, with additional stop strings."""
        strings = tuple(dict.fromkeys((*self.sampling.stop_strings, *stop)))
        return replace(self.sampling, num_samples=num_samples, stop_strings=strings)

    @property
    def home(self) -> int | None:
        """The engine with the earlier turns in its cache."""
        return None if self.turn is None else self.turn.whole.engine

    @property
    def batch_key(self) -> tuple[Sampling, int]:
        """Key that is equal for all requests of a batch."""
        return self.sampling, self.stream

    @property
    def tokens(self) -> np.ndarray:
        """`[len]` int32: the tokens to continue."""
        return self.prompt.tokens if self.turn is None else self.turn.tokens

    @property
    def max_tokens(self) -> int:
        """Most tokens of each sample."""
        return self.sampling.max_tokens if self.turn is None else self.turn.max_tokens

    @property
    def name(self) -> str:
        """See `QueuedWork`."""
        epoch, row = self.prompt.id
        which = f"training row {row} of epoch {epoch}" if self.is_training else f"evaluation row {row}"
        return which if self.turn is None else f"turn {self.turn.turn} of sample {self.turn.sample} of {which}"

    def problem(self, bounds: RequestBounds | None) -> str:
        """Reason why every engine would refuse the request or misread it; "": none.

        Args:
            bounds: None: unknown.
        """
        return next(itertools.chain(_sampling_problems(self, bounds), _token_problems(self, bounds)), "")


def _sampling_problems(request: Request, bounds: RequestBounds | None) -> Iterator[str]:
    sampling = request.sampling
    for field, value, low, high in (
        ("num_samples", sampling.num_samples, 1, None),
        ("max_tokens", request.max_tokens, 1, None),
        ("top_k", sampling.top_k, -1, None),
        ("prompt_logprobs", sampling.prompt_logprobs, 0, None),
        ("temperature", sampling.temperature, 0.0, MOST_TEMPERATURE),
        ("top_p", sampling.top_p, np.nextafter(0, 1), 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
    ):
        kinds = (int, np.integer) if high is None else (int, float, np.integer, np.floating)
        if value is None and field == "prompt_logprobs":
            continue
        if not isinstance(value, kinds) or not low <= value <= (math.inf if high is None else high):
            expected = f"an integer of at least {low}" if high is None else f"a number from {low:g} to {high:g}"
            yield f"{field}={value!r}, expected {expected}"
            return
    if sampling.temperature == 0 and sampling.num_samples > 1:
        yield (
            f"num_samples={sampling.num_samples} with temperature=0 are samples that are all the same, expected num_samples=1 or a "
            "temperature above 0"
        )
    if "" in sampling.stop_strings:
        yield f"stop_strings={list(sampling.stop_strings)} holds an empty text, expected texts of at least one character"
    if sampling.regex is not None and "\0" in sampling.regex:
        yield f"regex={sampling.regex!r} holds a NUL character, expected none"
    if bounds is None:
        return
    if (sampling.stop_strings or sampling.regex is not None) and not bounds.has_tokenizer:
        name = "stop_strings" if sampling.stop_strings else "regex"
        yield f"{name} needs engines with a tokenizer, and these were started without; set {name} in the run's configuration"
    if bounds.has_masks and (sampling.temperature == 0 or sampling.top_k < 1):
        yield (
            f"temperature={sampling.temperature:g} with top_k={sampling.top_k}: engines that return sampling masks expect a temperature "
            "above 0 and a top_k of at least 1"
        )
    if outside := [token for token in sampling.stop_token_ids if not 0 <= token < bounds.vocab]:
        yield f"stop_token_ids holds {outside[0]}, expected ids from 0 to {bounds.vocab - 1}"


def _token_problems(request: Request, bounds: RequestBounds | None) -> Iterator[str]:
    tokens = np.asarray(request.tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        yield f"its tokens are an array of {tokens.dtype} with {tokens.ndim} dimensions, expected one of integers with 1"
    elif not len(tokens):
        yield "its prompt has no tokens, expected at least 1"
    elif bounds is not None:
        outside = np.flatnonzero((tokens < 0) | (tokens >= bounds.vocab))
        if len(outside):
            place = int(outside[0])
            yield f"token {tokens[place]} at place {place} of its prompt, expected ids from 0 to {bounds.vocab - 1}"
        elif len(tokens) + request.max_tokens > bounds.max_model_len:
            yield (
                f"its prompt has {len(tokens)} tokens, which with max_tokens={request.max_tokens} are more than "
                f"max_model_len={bounds.max_model_len}; shorten the prompt or lower max_tokens"
            )


class Unfinished:
    """Groups of several turns that have been sent and have not finished."""

    def __init__(self) -> None:
        self.groups: set[Request] = set()
        self._waiting: list[tuple[Callable[[], Future[None]], Future[None]]] = []

    @property
    def are_under_way(self) -> bool:
        """True if an engine has begun any of them."""
        return any(group.has_begun for group in self.groups)

    def end(self, group: Request) -> None:
        """Remove a finished group."""
        self.groups.discard(group)
        self.review()

    def fail(self, err: Exception) -> None:
        """Fail all groups."""
        groups, self.groups = self.groups, set()
        waiting, self._waiting = self._waiting, []
        for group in groups:
            group.failed(err)
        for _, done in waiting:
            done.set_result(None)

    def review(self) -> None:
        """Run the waiting work if no group is under way any longer."""
        if not self.are_under_way:
            waiting, self._waiting = self._waiting, []
            for do, done in waiting:
                _follow(do(), done)

    def then(self, do: Callable[[], Future[None]]) -> Future[None]:
        """Run `do` once no group is under way. The future is done when that work is."""
        if not self.are_under_way:
            return do()
        done: Future[None] = Future()
        self._waiting.append((do, done))
        return done


def _follow(first: Future[None], then: Future[None]) -> None:
    first.add_done_callback(lambda first: then.set_result(first.result()))


def training_sampling(rollout: Rollout, stop_token_ids: Sequence[int]) -> Sampling:
    """The sampling of training prompts."""
    return Sampling(
        num_samples=rollout.num_samples_per_prompt_rollout,
        max_tokens=rollout.response_length,
        temperature=rollout.temperature,
        stop_token_ids=tuple(stop_token_ids),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        regex=rollout.vllm_guided_decoding_regex,
        stop_strings=rollout.stop_strings,
    )


def evaluation_sampling(rollout: Rollout, stop_token_ids: Sequence[int]) -> Sampling:
    """The sampling of held-out prompts.

    An engine that returns masks does so for every token. Without `top_k` a mask would be the whole vocabulary, so `top_k` also
    bounds evaluations there.
    """
    return Sampling(
        num_samples=rollout.eval_pass_at_k,
        max_tokens=rollout.eval_response_length or rollout.response_length,
        temperature=rollout.temperature if rollout.eval_temperature is None else rollout.eval_temperature,
        stop_token_ids=tuple(stop_token_ids),
        top_p=rollout.eval_top_p,
        top_k=rollout.top_k if rollout.needs_masks else 0,
        keeps_sets=False,
        keeps_routes=False,
        regex=rollout.vllm_guided_decoding_regex,
        stop_strings=rollout.stop_strings,
    )


def evaluation_requests(
    prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[Future[list[RolloutGroup]], list[Request]]:
    """Requests for held-out prompts, and the future of their groups, in the order of the prompts."""
    whole: Future[list[RolloutGroup]] = Future()
    found: dict[int, RolloutGroup] = {}

    def done(place: int, group: RolloutGroup) -> None:
        found[place] = group
        if len(found) == len(prompts):
            whole.set_result([found[place] for place in range(len(prompts))])

    def failed(err: Exception) -> None:
        if not whole.done():
            whole.set_exception(err)

    if not prompts:
        whole.set_result([])
    requests = [
        Request(prompt=prompt, sampling=sampling, stream=EVALUATION, done=partial(done, place), failed=failed)
        for place, prompt in enumerate(prompts)
    ]
    return whole, requests


def prompt_batch(numbered: Sequence[tuple[int, Request]], sampling: Sampling, *, run_seed: int | None) -> PromptBatch:
    """The batch for one engine.

    Args:
        numbered: requests of one stream, all whole or all turns, with their numbers in the engine.
        run_seed: source of the prompts' own seeds; None: no own seeds.
    """
    requests = [request for _, request in numbered]
    turns = [request.turn for request in requests]
    tokens, cu_seqlens = to_arrays([request.tokens for request in requests])
    seeds = None
    if run_seed is not None:
        seeds = prompt_seeds(run_seed, [request.prompt for request in requests], requests[0].stream, turns=turns)
    are_turns = turns[0] is not None
    return PromptBatch(
        numbers=np.array([number for number, _ in numbered], np.int64),
        tokens=tokens,
        cu_seqlens=cu_seqlens,
        sampling=sampling,
        seeds=seeds,
        max_tokens=np.array([request.max_tokens for request in requests]) if are_turns else None,
        salts=np.array([turn.salt for turn in turns if turn]) if are_turns else None,
    )


def to_arrays(tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`tokens` and `cu_seqlens` of a `PromptBatch`."""
    cu_seqlens = np.concatenate(([0], np.cumsum([len(t) for t in tokens]))).astype(np.int64)
    return np.concatenate([np.zeros(0, dtype=np.int32), *tokens]).astype(np.int32), cu_seqlens


def prompt_seeds(
    run_seed: int, prompts: Sequence[Prompt], stream: int, *, turns: Sequence[NextTurn | None] | None = None
) -> np.ndarray:
    """`[prompts]` int64: a seed for each prompt of a run, and for each later turn; `stream` separates evaluations from training.

    With stop strings the engine detects the end of a completion a moment late, and its row stays in the batch that long: if all
    rows were drawn from one stream, the others' samples would depend on that moment. On GPUs vLLM draws the seeds of requests
    without one from a state that is equal in every engine at its start and that no sync resets.
    """
    later = [(turn.sample, turn.turn) if turn and turn.turn else () for turn in turns or [None] * len(prompts)]
    seeds = [seed_of(run_seed, stream, *prompt.id, *turn) for prompt, turn in zip(prompts, later, strict=True)]
    return np.array(seeds, np.int64)


def to_groups(prompts: Sequence[Prompt], arrays: Completions, decode: Decode) -> list[RolloutGroup]:
    """The groups of these prompts from an engine's answer; each completion is decoded once."""
    cuts = list(itertools.pairwise(arrays["cu_seqlens"].tolist()))
    sets = KeptTokens.of_sizes(arrays["kept_ids"], arrays["kept_sizes"]) if "kept_ids" in arrays else None
    routes = _routes(arrays) if "routes" in arrays else [()] * len(cuts)
    texts = decode([arrays["tokens"][a:b] for a, b in cuts])
    completions = iter(
        Completion(
            tokens=arrays["tokens"][a:b],
            logprobs=arrays["logprobs"][a:b],
            policy_versions=arrays["policy_versions"][a:b],
            finish_reason=FINISH_REASONS[reason],
            text=text,
            kept=sets and sets.part(a, b),
            routes=own,
        )
        for (a, b), text, reason, own in zip(cuts, texts, arrays["finish_reasons"].tolist(), routes, strict=True)
    )
    return [
        RolloutGroup(prompt=prompt, completions=tuple(itertools.islice(completions, size)))
        for prompt, size in zip(prompts, arrays["sizes"].tolist(), strict=True)
    ]


def _routes(arrays: Completions) -> list[tuple[Routes, ...]]:
    ends = np.cumsum(arrays["route_sizes"]).tolist()
    assert len(arrays["routes"]) == (ends[-1] if ends else 0), "as many rows as the completions have"
    return [(arrays["routes"][a:b],) if a < b else () for a, b in itertools.pairwise([0, *ends])]
