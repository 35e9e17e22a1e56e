"""Reward functions by their names on the command line (`reward_funcs`)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.config.user_functions import user_function
from mgrpo.rewards.builtin_functions import BUILTIN
from mgrpo.rewards.compose import Verifies
from mgrpo.rewards.function_calls import RewardFunction
from mgrpo.rewards.reward_model import RewardModel

_FORMS = (
    f"give one of {', '.join(BUILTIN)}, package.module.function, file.py:function, or the folder of a "
    "sequence-classification model"
)


def load_functions(
    names: Sequence[str | RewardFunction],
    *,
    max_completion_length: int,
    scorer: Verifies | None = None,
    reward_model: Mapping[str, Any] | None = None,
) -> list[RewardFunction]:
    """The functions of these names, in their order; `close_functions` when they are done.

    Args:
        names: see docs/rewards.md; functions among them stay as they are.
        max_completion_length: tokens of the longest completion, for the built-in length functions.
        scorer: reads answers for the built-in accuracy functions; None: separate workers.
        reward_model: further arguments of `RewardModel`.
    Raises:
        ValueError: the problem with each name that cannot be loaded.
    """
    functions, problems = _load_all(names, max_completion_length, scorer, reward_model)
    if problems:
        raise ValueError("; ".join(problems))
    return functions


def check_functions(names: Sequence[str | RewardFunction]) -> list[str]:
    """One sentence for each name that cannot be loaded; modules are imported, models are not loaded."""
    return _load_all(names, 1, None, None)[1]


def start_functions(functions: Sequence[RewardFunction]) -> None:
    """Begin to load reward models, without waiting for them; otherwise the first scores wait for that."""
    for function in functions:
        if isinstance(function, RewardModel):
            function.start()


def close_functions(functions: Sequence[RewardFunction]) -> None:
    """End the processes of reward models."""
    for function in functions:
        if isinstance(function, RewardModel):
            function.close()


def _load_all(names: Sequence[str | RewardFunction], *settings: Any) -> tuple[list[RewardFunction], list[str]]:
    """The functions, and one sentence for each name that cannot be loaded."""
    functions, problems = [], []
    for name in names:
        try:
            functions.append(_load(name, *settings))
        except ValueError as err:
            problems.append(str(err))
    return functions, problems


def _load(
    word: str | RewardFunction,
    max_completion_length: int,
    scorer: Verifies | None,
    reward_model: Mapping[str, Any] | None,
) -> RewardFunction:
    if not isinstance(word, str):
        if not callable(word) or inspect.isclass(word):
            raise ValueError(f"reward_funcs: {word!r:.80} is not a function; give functions or their names")
        return word
    if word in BUILTIN:
        return BUILTIN[word](max_completion_length, scorer)
    path, colon, name = word.rpartition(":")
    if colon and path.endswith(".py"):
        return user_function("reward_funcs", word, path, name)
    if Path(word).is_dir():
        try:
            return RewardModel(word, **reward_model or {})
        except ValueError as err:
            raise ValueError(f"reward_funcs: {err}") from err
    if word.endswith(".py"):
        raise ValueError(f"reward_funcs: {word} names a file but no function in it; write {word}:function")
    module, dot, name = word.rpartition(".")
    if dot and all(part.isidentifier() for part in word.split(".")):
        return user_function("reward_funcs", word, module, name)
    near = difflib.get_close_matches(word, BUILTIN, n=2, cutoff=0.5) or [each for each in BUILTIN if word in each]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"reward_funcs: {word} is not the name of a reward function; {meant}{_FORMS}")
