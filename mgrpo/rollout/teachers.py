"""Teachers on engines or servers of their own, and their log-probabilities of the policy's tokens.

Each teacher is a fleet of engines with fixed weights, which only score sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mgrpo.processes.background import Background
from mgrpo.rollout.engine import Completions, PromptBatch, RefusedError, Sampling
from mgrpo.rollout.engines.engine_queue import EngineQueue
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.requests import to_arrays
from mgrpo.types import TeacherScores

SEQUENCES = 256
"""Most sequences in an engine at a time, several times as many as it reads in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """One teacher, or several of one model."""

    fleet: Fleet
    most_tokens: int
    """Most tokens of a sequence."""


@dataclass(slots=True, kw_only=True, eq=False)
class JudgedSequence:
    """A sequence to be scored by a teacher. A `QueuedWork`."""

    tokens: np.ndarray
    """`[len]` int32."""
    start: int
    """First scored token, at least 1."""
    sampling: Sampling
    done: Callable[[TeacherScores], None]
    nothing: TeacherScores
    """The answer if the teacher refuses the sequence."""

    max_tokens = 1
    home = None

    @property
    def batch_key(self) -> Sampling:
        """See `QueuedWork`."""
        return self.sampling

    @property
    def name(self) -> str:
        """See `QueuedWork`."""
        return f"a sequence of {len(self.tokens)} tokens"

    def failed(self, err: Exception) -> None:
        """See `QueuedWork`. Only refusals: other failures are reported once, by the queue."""
        if isinstance(err, RefusedError):
            self.done(self.nothing)


class TeacherQueue(EngineQueue[JudgedSequence]):
    """Queue of the requests to one teacher."""

    verb = "score"

    def __init__(self, fleet: Fleet, thread: Background, *, vocab: int, failed: Callable[[Exception], None]) -> None:
        """
        Args:
            vocab: tokens of the policy's vocabulary; further ones of a teacher are ignored.
            failed: called in the thread when no engine is left.
        """
        super().__init__(fleet, thread, samples_per_engine=SEQUENCES)
        self.vocab, self.failed = vocab, failed

    def _batch(self, numbered: Sequence[tuple[int, JudgedSequence]]) -> PromptBatch:
        questions = [question for _, question in numbered]
        tokens, cu_seqlens = to_arrays([question.tokens for question in questions])
        return PromptBatch(
            numbers=np.array([number for number, _ in numbered], np.int64),
            tokens=tokens,
            cu_seqlens=cu_seqlens,
            sampling=questions[0].sampling,
            starts=np.array([question.start for question in questions], np.int64),
        )

    def _read(self, requests: Sequence[JudgedSequence], arrays: Completions) -> list[TeacherScores]:
        asked = [len(question.tokens) - question.start for question in requests]
        assert arrays["prompt_sizes"].tolist() == asked, "one for each token that was asked about"
        return [self._scores(arrays, a, b) for a, b in itertools.pairwise(itertools.accumulate(asked, initial=0))]

    def _scores(self, arrays: Completions, a: int, b: int) -> TeacherScores:
        ids, likeliest = arrays["prompt_ids"][a:b], arrays["prompt_likeliest"][a:b]
        is_there = (ids >= 0) & (ids < self.vocab) & np.isfinite(likeliest)
        has_likeliest = ids.shape[1] > 0
        return TeacherScores(
            logprobs=_finite(arrays["prompt_logprobs"][a:b]),
            ids=np.where(is_there, ids, -1).astype(np.int32) if has_likeliest else None,
            likeliest=np.where(is_there, likeliest, np.nan).astype(np.float32) if has_likeliest else None,
        )

    def _tell_failure(self, err: Exception) -> None:
        self.failed(err)


class Teachers:
    """All teachers of a run, in the order of `Distillation.teachers`. Methods may be called from any thread."""

    def __init__(self, teachers: Sequence[Teaching], *, num_likeliest: int, vocab: int) -> None:
        """
        Args:
            num_likeliest: number of likeliest tokens to return at each place, in addition to the token itself.
            vocab: see `TeacherQueue`.
        """
        self.teachers, self.num_likeliest = teachers, num_likeliest
        self.sampling = Sampling(
            num_samples=1, max_tokens=1, temperature=0.0, stop_token_ids=(), prompt_logprobs=num_likeliest
        )
        self.thread = Background("teachers")
        self.failure: Exception | None = None
        self._listener: Callable[[Exception], None] = lambda err: None
        queues = {
            teacher.fleet: TeacherQueue(teacher.fleet, self.thread, vocab=vocab, failed=self._failed)
            for teacher in dict.fromkeys(teachers)
        }
        self.queues = [queues[teacher.fleet] for teacher in teachers]

    def listen(self, failed: Callable[[Exception], None]) -> None:
        """Call `failed` in the teachers' thread once requests can no longer be answered."""

        def begin() -> None:
            self._listener = failed
            if self.failure is not None:
                failed(self.failure)

        self.thread.submit(begin)

    def wait_ready(self) -> None:
        """Wait until every engine has loaded its model, and start scoring.

        Raises:
            EngineError: an engine could not be started.
        """
        for queue in dict.fromkeys(self.queues):
            queue.fleet.wait_ready()
            queue.post(queue.resume)

    def ask(
        self,
        teacher: int,
        sequences: Sequence[tuple[np.ndarray, int]],
        done: Callable[[list[TeacherScores]], None],
    ) -> None:
        """Request a teacher's scores of these sequences.

        Sequences that are too long or that the engine refuses get missing log-probabilities (`TeacherScores.none`).

        Args:
            teacher: index among the teachers.
            sequences: each the tokens, `[len]` int32, and the index of the first scored one, at least 1.
            done: called in the teachers' thread with the scores of each sequence, from that token on.
        """
        found: dict[int, TeacherScores] = {}

        def answered(place: int, scores: TeacherScores) -> None:
            found[place] = scores
            if len(found) == len(sequences):
                done([found[place] for place in range(len(sequences))])

        def begin() -> None:
            if not sequences:
                done([])
            questions = []
            for place, (tokens, start) in enumerate(sequences):
                assert start > 0, "a model says nothing about the first token of a sequence"
                answer, nothing = partial(answered, place), TeacherScores.none(len(tokens) - start, self.num_likeliest)
                if start < len(tokens) <= self.teachers[teacher].most_tokens:
                    questions.append(
                        JudgedSequence(tokens=tokens, start=start, sampling=self.sampling, done=answer, nothing=nothing)
                    )
                else:
                    answer(nothing)
            self.queues[teacher].queue(questions)

        self.queues[teacher].post(begin)

    def _failed(self, err: Exception) -> None:
        self.failure = self.failure or err
        self._listener(err)


def _finite(logprobs: np.ndarray) -> np.ndarray:
    """The log-probabilities as float32, with NaN for values that are not finite."""
    return np.where(np.isfinite(logprobs), logprobs, np.nan).astype(np.float32)
