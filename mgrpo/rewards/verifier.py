"""The interface of verifiers: one small class each, `score(answer) -> float`, found by its name (`registry`).

A verifier runs in a worker process (`verifier_worker`), which enforces every limit: it needs no timeout and need not watch its
memory. A `RemoteVerifier` calls a server and runs in an event loop with many others (`remote_endpoint`). An unreadable
ground truth, or a server that does not answer, is an exception: that sample has no score, which differs from wrong.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mgrpo.config.schema import Reward

THINK_END = "</think>"
LARGEST = 2.0**128 - 2.0**104
"""The largest score and reward: beyond it float32, which holds them from here on, is infinite."""
_THINK_TAG = r"<{slash}(?:seed:)?think\s*>|\[{slash}THINK\]|◁{slash}think▷"
_THOUGHT = re.compile(rf"(?<![\"'`])(?:{_THINK_TAG.format(slash='')})", re.IGNORECASE)
_THOUGHT_END = re.compile(_THINK_TAG.format(slash="/"), re.IGNORECASE)
_NAMED_THOUGHT = re.compile(r"<(?:thinking|thoughts?|reasoning)\s*>", re.IGNORECASE)
"""Tags that prompts request, also behind an answer: a thought only where the completion begins with one."""
_NAMED_THOUGHT_END = re.compile(r"</(?:thinking|thoughts?|reasoning)\s*>", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion, and the data that it is judged by."""

    completion: str
    ground_truth: object
    """One JSON value."""
    prompt: str = ""
    """The prompt's messages as "role: content" lines, for judges."""
    num_tokens: int | None = None
    """Tokens of the completion; None: not known."""


class Item(NamedTuple):
    """One answer to score, and the name of the verifier that scores it."""

    verifier: str
    answer: Answer


class _Named(ABC):
    """The common part of both kinds of verifiers: a name, settings, and checks before the start."""

    name: ClassVar[str]
    """The name that a row's `dataset` gives, in lower case."""

    def __init__(self, settings: Reward) -> None:
        self.settings = settings

    @classmethod
    def problems(cls, settings: Reward) -> list[str]:
        """Reasons why it cannot score in this run, one sentence each; called before anything is started."""
        return []

    @classmethod
    def notes(cls, settings: Reward) -> list[str]:
        """Notes that a run using it prints at start-up."""
        return []

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        """Check a row's label before the start, in less than a millisecond.

        Returns:
            The part of this label that the comparison leaves out, for a note at the start: the end of a sentence that begins with
            "labels", and equal for all labels that it concerns; "" if there is none.
        Raises:
            ValueError: `score` cannot read it.
        """
        return ""

    @classmethod
    def checks_labels(cls) -> bool:
        """True if `check_label` is overridden, so that rows need to be read for it."""
        return any("check_label" in vars(kind) for kind in cls.__mro__[: cls.__mro__.index(_Named)])


class Verifier(_Named):
    """Scores answers, usually between 0.0 (wrong) and 1.0 (right)."""

    @abstractmethod
    def score(self, answer: Answer) -> float:
        """The score; ValueError for a ground truth that it cannot read."""

    def warm_up(self) -> None:
        """Perform imports and other work of the first call ahead of time."""


class RemoteVerifier(_Named):
    """Scores answers by a server; many calls are under way at once."""

    limit_s: ClassVar[float] = 3600.0
    """Seconds after which a call is cancelled."""

    @abstractmethod
    async def score(self, answer: Answer) -> float:
        """The score; an exception means no score."""

    def metrics(self) -> dict[str, float]:
        """Sums since the start, by name, for example the tokens that a judge has read."""
        return {}

    async def close(self) -> None:
        """Close connections."""


def check_score(score: float) -> None:
    """ValueError for a score that is not finite, also in float32."""
    if not abs(score) <= LARGEST:
        raise ValueError(f"the score is {score:g}; expected a number of at most {LARGEST:g} (float32)")


def single(ground_truth: object) -> object:
    """The label itself: data sets made for several verifiers per row wrap a single label into a list."""
    if isinstance(ground_truth, list) and len(ground_truth) == 1:
        return ground_truth[0]
    return ground_truth


def text_of(ground_truth: object) -> str:
    """A single label as text."""
    label = single(ground_truth)
    is_missing = isinstance(label, float) and math.isnan(label)  # as pandas writes it
    if isinstance(label, bool) or not isinstance(label, (str, int, float)) or is_missing:
        raise ValueError(f"ground_truth={shown(label)} is neither text nor a number")
    return str(label)


def shown(value: object) -> str:
    """The beginning of a value's representation, for messages."""
    return repr(value)[:80]


def after_thinking(completion: str) -> str:
    """The text after the last `</think>`, or another tag that ends a thought; "" where one is never ended."""
    return "" if has_open_thought(completion) else _behind_thoughts(completion)


def has_open_thought(completion: str) -> bool:
    """True if an unquoted `<think>` has no `</think>` behind it: there is no answer yet."""
    text = _behind_thoughts(completion)
    begins_named = _NAMED_THOUGHT.match(text.lstrip()) is not None
    is_named_open = begins_named and not _NAMED_THOUGHT_END.search(text) and "<answer>" not in text.lower()
    return is_named_open or _THOUGHT.search(text) is not None


def _behind_thoughts(completion: str) -> str:
    text = completion[max((tag.end() for tag in _THOUGHT_END.finditer(completion)), default=0) :]
    opened, ends = _NAMED_THOUGHT.search(text), [tag.end() for tag in _NAMED_THOUGHT_END.finditer(text)]
    # The prompt may have opened it.
    is_first = opened is None or not text[: opened.start()].strip()
    return text[ends[-1] :] if ends and is_first and text[ends[-1] :].strip() else text


def without_thinking(completion: str) -> str:
    """`after_thinking`, without `<answer>` tags and outer white space (Open Instruct's rule for thoughts that end)."""
    text = after_thinking(completion.replace("<|assistant|>", ""))
    return text.replace("<answer>", "").replace("</answer>", "").strip()
