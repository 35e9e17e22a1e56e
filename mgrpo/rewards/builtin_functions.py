"""TRL's six reward functions, by its names and signatures and with its values.

Mathematics in a completion is read by the verifier workers, under their limits, never in this process: an answer that
takes too long has no score (None), where TRL's own time limit calls it wrong.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from mgrpo.config.schema import Reward
from mgrpo.rewards.compose import Verifies
from mgrpo.rewards.overlong import overlong_penalty
from mgrpo.rewards.scorer import shared_scorer
from mgrpo.rewards.verifier import THINK_END, Answer, Item

THINK_BEGIN = "<think>"


class _Reader:
    """Reads answers in a run's own workers, or in those that all callers share."""

    def __init__(self, scorer: Verifies | None = None) -> None:
        self._scorer = scorer

    def compare(self, texts: Sequence[str], solutions: Sequence[str]) -> list[float | None]:
        """1.0 where the text's answer is the solution, else 0.0; None without a verdict."""
        items = [
            Item("trl_accuracy", Answer(completion=text, ground_truth=_label(gold)))
            for text, gold in zip(texts, solutions, strict=True)
        ]
        scores = (self._scorer or shared_scorer(Reward())).verify_many(items)
        return [None if math.isnan(score) else score for score in scores]


class _Accuracy(_Reader):
    """`accuracy_reward`."""

    __name__ = "accuracy_reward"

    def __call__(
        self,
        completions: Sequence,
        solution: Sequence[str],
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs: object,
    ) -> list[float | None]:
        r"""1.0 where the completion's LaTeX, `\boxed` first, is mathematically the solution, else 0.0.

        None where math-verify cannot read the solution, or gives no verdict within the limits of the verifiers.
        """
        rewards = self.compare([_text_of(completion) for completion in completions], solution)
        if log_extra is not None:
            log_extra("solution", list(solution))
        return rewards


class _ReasoningAccuracy(_Reader):
    """`reasoning_accuracy_reward`."""

    __name__ = "reasoning_accuracy_reward"

    def __call__(
        self,
        completions: Sequence,
        solution: Sequence[str],
        reasoning_delimiters: Sequence[str] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs: object,
    ) -> list[float | None]:
        """`accuracy_reward` of the text after the reasoning; 0.0 where the reasoning does not end.

        Args:
            reasoning_delimiters: the first of them that a completion holds ends its reasoning, at its last occurrence;
                by default `</think>`.
        """
        delimiters = [THINK_END] if reasoning_delimiters is None else reasoning_delimiters
        answers = [_after_reasoning(_text_of(completion), delimiters) for completion in completions]
        given = [(answer, gold) for answer, gold in zip(answers, solution, strict=True) if answer is not None]
        compared = iter(self.compare([answer for answer, _ in given], [gold for _, gold in given]))
        if log_extra is not None:
            log_extra("solution", list(solution))
        return [0.0 if answer is None else next(compared) for answer in answers]


accuracy_reward = _Accuracy()
reasoning_accuracy_reward = _ReasoningAccuracy()


def think_format_reward(completions: Sequence, **kwargs: object) -> list[float]:
    """1.0 where the completion begins with the only `<think>` of its text and holds `</think>`, else 0.0."""
    return [float(_has_think_format(_text_of(completion))) for completion in completions]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> _CosineScaled:
    """A function that grades `accuracy_reward` by length: best short and right, worst short and wrong (arXiv:2502.03373).

    The value goes along half a cosine from the short end's (`max_value_correct`, `min_value_wrong`) to that of `max_len`
    tokens and more (`min_value_correct`, `max_value_wrong`).
    """
    return _CosineScaled(max_len, (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong))


class _CosineScaled:
    __name__ = "cosine_scaled_reward"
    accuracy = accuracy_reward
    """Function that scores the right completions above 0."""

    def __init__(self, max_len: int, correct: tuple[float, float], wrong: tuple[float, float]) -> None:
        """`correct` and `wrong` are the values of the shortest and of the longest completion."""
        if max_len < 1:
            raise ValueError(f"max_len={max_len}; give the number of tokens of the longest completion, at least 1")
        self._max_len, self._correct, self._wrong = max_len, correct, wrong

    def __call__(
        self, completions: Sequence, solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **kwargs: object
    ) -> list[float | None]:
        verdicts = self.accuracy(completions, solution)
        return [
            None if verdict is None else self._value(bool(verdict), len(ids))
            for verdict, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _value(self, is_correct: bool, num_tokens: int) -> float:
        short, long = self._correct if is_correct else self._wrong
        # The cosine would rise again behind max_len.
        share = min(num_tokens / self._max_len, 1.0)
        return float(long + 0.5 * (short - long) * (1.0 + math.cos(share * math.pi)))


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """A function that returns `max_penalty` times the share of n-grams of tokens that are repetitions (arXiv:2502.03373)."""
    if ngram_size < 1:
        raise ValueError(f"ngram_size={ngram_size}; an n-gram has at least 1 token")
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} would reward repetition; give 0 or less")
    return _RepetitionPenalty(ngram_size, max_penalty)


class _RepetitionPenalty:
    __name__ = "repetition_penalty_reward"

    def __init__(self, ngram_size: int, max_penalty: float) -> None:
        self._ngram_size, self._max_penalty = ngram_size, max_penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        return [self._value(ids) for ids in completion_ids]

    def _value(self, ids: Sequence[int]) -> float:
        ngrams = list(zip(*(ids[start:] for start in range(self._ngram_size)), strict=False))
        repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
        return repeated * self._max_penalty if repeated else 0.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A function that falls from 0 to -1 over the last `soft_punish_cache` tokens (DAPO, arXiv:2503.14476, equation 13)."""
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache}; give a number of tokens between 0, for a step from 0 to -1, and "
            f"max_completion_len={max_completion_len}"
        )
    return _SoftOverlong(max_completion_len, soft_punish_cache)


class _SoftOverlong:
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        self._max, self._cache = max_completion_len, soft_punish_cache

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        lengths = np.array([len(ids) for ids in completion_ids])
        return overlong_penalty(lengths, max_length=self._max, cache_length=self._cache).tolist()


def _cosine_scaled(max_len: int, scorer: Verifies | None) -> Callable:
    function = get_cosine_scaled_reward(max_len)
    function.accuracy = _Accuracy(scorer)
    return function


BUILTIN: dict[str, Callable[[int, Verifies | None], Callable]] = {
    "accuracy_reward": lambda _, scorer: _Accuracy(scorer),
    "reasoning_accuracy_reward": lambda _, scorer: _ReasoningAccuracy(scorer),
    "think_format_reward": lambda *_: think_format_reward,
    "get_cosine_scaled_reward": _cosine_scaled,
    "get_repetition_penalty_reward": lambda *_: get_repetition_penalty_reward(),
    # A fifth, as in TRL's own program (256 of 1280 tokens).
    "get_soft_overlong_punishment": lambda max_len, _: get_soft_overlong_punishment(max_len, max_len // 5),
}
"""Factory of each function by its name on the command line; arguments: tokens of the longest completion, scorer of answers."""


def _text_of(completion: str | Sequence[dict]) -> str:
    """The text of a completion, or of the message with which its last turn answers; "" where that one calls a tool."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    is_answer = last.get("role", "assistant") == "assistant" and not last.get("tool_calls")
    return (last.get("content") or "") if is_answer else ""


def _label(solution: object) -> str | None:
    """The solution as math-verify reads it; TRL skips numbers, which cost nothing to read."""
    is_number = isinstance(solution, numbers.Real) and not isinstance(solution, bool)
    return str(solution) if is_number or isinstance(solution, str) else None


def _after_reasoning(text: str, delimiters: Sequence[str]) -> str | None:
    for delimiter in delimiters:
        if delimiter in text:
            return text.rpartition(delimiter)[2]
    return None


def _has_think_format(text: str) -> bool:
    """True if `^<think>(?!.*<think>)(.*?)</think>.*$` matches at the start, dot meaning any character; in linear time."""
    begin = len(THINK_BEGIN)
    return text.startswith(THINK_BEGIN) and THINK_BEGIN not in text[begin:] and THINK_END in text[begin:]
