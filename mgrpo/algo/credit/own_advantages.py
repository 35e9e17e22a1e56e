"""A user's own advantages: found by their function's name, checked before a run, and computed in place of a named estimator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np

from mgrpo.config.algorithm import Algorithm
from mgrpo.config.user_functions import check_one_argument, short_name, user_function
from mgrpo.types import PromptId, ScoredGroup, Turn

SETTING = "advantage_normalization_type"
_USAGE = "it is called as function(groups), see mgrpo.algo.AdvantageFunction"
_SHAPES = "an array [completions], or a list of arrays [length], one for each completion"
_LARGEST = float(np.finfo(np.float32).max)

Estimated = np.ndarray | Sequence[np.ndarray]
"""A group's advantages: `[completions]`, or for each completion `[length]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageGroup:
    """The completions of one prompt, as input of an estimator. Its arrays are read-only."""

    prompt_id: PromptId
    """(epoch, index of the row in the dataset)."""
    rewards: np.ndarray
    """`[completions]` float64; NaN where no score could be given."""
    parts: Mapping[str, np.ndarray]
    """Scores by reward function or verifier, and `correct` and `format` of the same names in the metrics: `[completions]` float64, NaN
    without a score."""
    lengths: np.ndarray
    """`[completions]` int64: tokens of each, those between turns included."""
    is_truncated: np.ndarray
    """`[completions]` bool: it did not stop by itself."""
    is_sampled: tuple[np.ndarray, ...]
    """For each completion `[length]` bool: false for tokens between turns, such as tool results."""
    tokens: tuple[np.ndarray, ...]
    """For each completion `[length]` int32."""
    logprobs: tuple[np.ndarray, ...]
    """For each completion `[length]` float32, as the engine reported them when it sampled."""
    policy_versions: tuple[np.ndarray, ...]
    """For each completion `[length]` int32: the version of the weights that sampled each token, -1 between turns."""
    turns: tuple[tuple[Turn, ...], ...]
    """For each completion its turns, with their tokens (`start`, `end`) and the reward of the step that each led to; empty without tools."""
    is_trained: bool
    """False: the group was sampled, but `filter_zero_std_samples` leaves it out. Its advantages are not used; statistics over the batch
    may count it."""


class AdvantageFunction(Protocol):
    """A user's own estimator, `mgrpo.train(..., advantage_fn=function)` or `--advantage_normalization_type file.py:function`.

    It is called on rank 0 with numpy arrays only: once per step, and by `mgrpo.trl`'s trainer once per evaluation set, whose groups may
    have one completion. It must be pure: a run that is continued computes the
    same advantages from the same groups.
    """

    def __call__(self, groups: Sequence[AdvantageGroup], /) -> Sequence[Estimated]:
        """Advantages of each group: `[completions]`, or a list with one array per completion, `[length]`.

        They are finite in float32. A completion without a score gets advantage 0, whatever is returned.
        """
        ...


def load_advantages(config: Algorithm) -> AdvantageFunction | None:
    """The function that `advantage_normalization_type` names; None where it names a built-in estimator.

    Raises:
        ValueError: the function cannot be imported or called, in one sentence about `advantage_normalization_type`.
    """
    if not config.is_own_estimator:
        return None
    word = config.advantage_normalization_type
    module, _, name = word.rpartition(":")
    function = user_function(SETTING, word, module, name)
    check_one_argument(function, f"{SETTING}={word}", _USAGE)
    return function


def check_advantages(function: object) -> None:
    """Check that `function` can be an `advantage_fn`; raises ValueError."""
    check_one_argument(function, f"{SETTING}: advantage_fn={short_name(function)}", _USAGE)


def own_advantages(
    function: AdvantageFunction, groups: Sequence[ScoredGroup], dropped: Sequence[ScoredGroup] = ()
) -> list[list[np.ndarray]]:
    """The function's advantages of each completion of `groups`: `[]` or `[length]` float64, 0 without a score.

    Args:
        dropped: groups of the same batch that are not trained on; also passed to the function.
    Raises:
        ValueError: it returned another value; its own exceptions get a note that names it.
    """
    given = [_given(group, is_trained=number < len(groups)) for number, group in enumerate((*groups, *dropped))]
    name = f"{SETTING}: {short_name(function)}"
    try:
        returned: Any = function(given)
    except Exception as err:
        err.add_note(f"raised by {name}, given {len(given)} groups")
        raise
    if not _is_listed(returned) or len(returned) != len(given):
        raise ValueError(
            f"{name} returned {_described(returned)} for {len(given)} groups, expected a list of one for each"
        )
    found = []
    for number, (group, own) in enumerate(zip(given, returned, strict=True)):
        try:
            found.append(_read(group, own))
        except ValueError as err:
            raise ValueError(f"{name} returned for group {number}, prompt {group.prompt_id}, {err}") from err
    return found[: len(groups)]


def _given(scored: ScoredGroup, *, is_trained: bool) -> AdvantageGroup:
    completions = scored.group.completions
    names = dict.fromkeys(name for score in scored.scores for name in score.parts)
    return AdvantageGroup(
        prompt_id=scored.group.prompt.id,
        rewards=_fixed(scored.rewards),
        parts={name: _fixed([score.parts.get(name, np.nan) for score in scored.scores], np.float64) for name in names},
        lengths=_fixed([len(completion.tokens) for completion in completions], np.int64),
        is_truncated=_fixed([completion.finish_reason != "stop" for completion in completions], np.bool_),
        is_sampled=tuple(_fixed(completion.loss_mask) for completion in completions),
        tokens=tuple(_fixed(completion.tokens) for completion in completions),
        logprobs=tuple(_fixed(completion.logprobs) for completion in completions),
        policy_versions=tuple(_fixed(completion.policy_versions) for completion in completions),
        turns=tuple(completion.trajectory.turns if completion.trajectory else () for completion in completions),
        is_trained=is_trained,
    )


def _fixed(values: Any, dtype: type | None = None) -> np.ndarray:
    """A view that cannot be written to."""
    view = np.asarray(values, dtype).view()
    view.flags.writeable = False
    return view


def _read(group: AdvantageGroup, returned: object) -> list[np.ndarray]:
    """Advantages of a group, one array per completion; ValueError with the returned and the expected value."""
    expected = f"expected {_SHAPES}: {len(group.lengths)} of lengths {group.lengths.tolist()}"
    if not _is_listed(returned) or len(returned) != len(group.lengths):
        raise ValueError(f"{_described(returned)}, {expected}")
    found = []
    is_by_token = any(_is_listed(own) for own in returned)
    for number, own in enumerate(returned):
        values = _numbers(own)
        if values is None or values.shape != ((group.lengths[number],) if is_by_token else ()):
            raise ValueError(f"{_described(own)} for completion {number}, {expected}")
        if np.isnan(group.rewards[number]):
            values = np.zeros(values.shape)
        if (wrong := values[~(np.abs(values) <= _LARGEST)]).size:
            raise ValueError(
                f"the advantage {wrong[0]} for completion {number}, expected numbers that are finite in float32"
            )
        found.append(values)
    return found


def _numbers(value: object) -> np.ndarray | None:
    """The value as float64, of any shape; None if it is not an array of numbers."""
    try:
        values = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return values.astype(np.float64) if values.dtype.kind in "iuf" else None


def _is_listed(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of shape {list(value.shape)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else f"{value!r:.80}"
