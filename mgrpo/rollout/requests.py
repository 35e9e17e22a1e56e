"""What is asked of the engines: prompts of the training and of evaluations, whole or turn by turn, and how they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mgrpo.config.schema import Rollout
from mgrpo.rollout.collect import EVALUATION, seed_of, to_arrays
from mgrpo.rollout.engine import PromptBatch, Sampling
from mgrpo.types import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTurn:
    """A turn of a trajectory; the first one is that of all trajectories of its prompt."""

    whole: Request
    """The group's."""
    sample: int
    turn: int
    tokens: np.ndarray
    """`[len]` int32: the prompt and all that has followed it."""
    max_tokens: int
    salt: int
    """The same for all turns that begin with one prompt, see `PromptBatch`."""
    engine: int | None
    """The one that has the turns before it in its cache."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt that is to be sampled."""

    prompt: Prompt
    sampling: Sampling
    stream: int
    """Separates the random numbers of evaluations from those of training."""
    done: Callable[[RolloutGroup], None]
    """Called in the dispatcher's thread."""
    number: int = -1
    """Of a group to train on."""
    failed: Callable[[Exception], None] = lambda err: None
    """Called in the dispatcher's thread instead; what trains learns of failures from `Dispatcher.on_failure`."""
    turn: NextTurn | None = None
    """None: the whole answer is sampled at a stretch, or turn by turn with requests of their own."""
    engine: int | None = None
    """The one that it was given to."""
    has_begun: bool = False
    """Of a group of several turns: whether an engine has been given its first one."""

    @property
    def is_training(self) -> bool:
        """Or of an evaluation."""
        return self.stream != EVALUATION

    @property
    def is_beginning(self) -> bool:
        """Whether nothing of its group has been sampled."""
        return self.turn is None or not self.turn.turn

    def sampling_of(self, num_samples: int) -> Sampling:
        """The same for a turn of so many trajectories."""
        return replace(self.sampling, num_samples=num_samples)

    @property
    def tokens(self) -> np.ndarray:
        """`[len]` int32: what is sampled from."""
        return self.prompt.tokens if self.turn is None else self.turn.tokens

    @property
    def max_tokens(self) -> int:
        """Of each sample."""
        return self.sampling.max_tokens if self.turn is None else self.turn.max_tokens


class Unfinished:
    """Groups of several turns that have been sent and have not come to their end."""

    def __init__(self) -> None:
        self.groups: set[Request] = set()
        self._waiting: list[tuple[Callable[[], Future[None]], Future[None]]] = []

    @property
    def are_under_way(self) -> bool:
        """Whether something of any has been sampled, or is being."""
        return any(group.has_begun for group in self.groups)

    def end(self, group: Request) -> None:
        """A group has come to its end."""
        self.groups.discard(group)
        self.review()

    def fail(self, err: Exception) -> None:
        """None will come to its end."""
        groups, self.groups = self.groups, set()
        waiting, self._waiting = self._waiting, []
        for group in groups:
            group.failed(err)
        for _, done in waiting:
            done.set_result(None)

    def review(self) -> None:
        """Do what waits, if nothing is under way any more."""
        if not self.are_under_way:
            waiting, self._waiting = self._waiting, []
            for do, done in waiting:
                _follow(do(), done)

    def then(self, do: Callable[[], Future[None]]) -> Future[None]:
        """Do this as soon as none is under way; done when that is."""
        if not self.are_under_way:
            return do()
        done: Future[None] = Future()
        self._waiting.append((do, done))
        return done


def _follow(first: Future[None], then: Future[None]) -> None:
    first.add_done_callback(lambda first: then.set_result(first.result()))


def training_sampling(rollout: Rollout, stop_token_ids: Sequence[int]) -> Sampling:
    """How training prompts are sampled."""
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
    """How held-out prompts are sampled.

    An engine that returns masks does so for every token: of one that was sampled from the whole vocabulary this would be all
    of it, so that `top_k` bounds evaluations there as well.
    """
    return Sampling(
        num_samples=rollout.eval_pass_at_k,
        max_tokens=rollout.eval_response_length or rollout.response_length,
        temperature=rollout.temperature if rollout.eval_temperature is None else rollout.eval_temperature,
        stop_token_ids=tuple(stop_token_ids),
        top_p=rollout.eval_top_p,
        top_k=rollout.top_k if rollout.needs_masks else 0,
        keeps_sets=False,
        regex=rollout.vllm_guided_decoding_regex,
        stop_strings=rollout.stop_strings,
    )


def evaluation_requests(
    prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[Future[list[RolloutGroup]], list[Request]]:
    """Requests for held-out prompts, and their groups in order, done with the last of them."""
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
    """What an engine is given.

    Args:
        numbered: requests of one stream, all whole or all turns, with the numbers that it shall know them by.
        run_seed: what the prompts' own seeds follow from; None: they have none.
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


def prompt_seeds(
    run_seed: int, prompts: Sequence[Prompt], stream: int, *, turns: Sequence[NextTurn | None] | None = None
) -> np.ndarray:
    """`[prompts]` int64: one seed per prompt of a run, and later turn; `stream` separates evaluations from training.

    With stop strings the engine learns a moment late that a completion has ended, and its row stays in the batch that
    long: were all rows drawn from one stream, the others' samples would depend on that moment. On GPUs vLLM draws the seeds
    of requests without one from a state that every engine begins alike and no sync reaches.
    """
    later = [(turn.sample, turn.turn) if turn and turn.turn else () for turn in turns or [None] * len(prompts)]
    seeds = [seed_of(run_seed, stream, *prompt.id, *turn) for prompt, turn in zip(prompts, later, strict=True)]
    return np.array(seeds, np.int64)
