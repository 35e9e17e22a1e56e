"""Rewards from the user's own functions: their arguments, and the use of their values.

Functions are called as TRL's GRPOTrainer calls them. They are the user's code and run in this process;
`function_catalog` finds those that are named on the command line, `function_calls` runs them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from mgrpo.processes.user_code import UserCodeError
from mgrpo.rewards.function_calls import FunctionCall, RewardFunction, Snapshot, call_all, innermost, number_of
from mgrpo.rewards.trajectory_rewards import is_lost, told
from mgrpo.rewards.verifier import LARGEST
from mgrpo.types import Completion, Prompt, RolloutGroup, Score, ScoredBatch, ScoredGroup

OWN_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "rng")
"""Arguments that every function may take; columns of the data with these names are not passed on."""
OF_TRAJECTORIES = ("environments", "trajectories")
"""Further ones where completions are trajectories; then columns with these names are not passed on either."""
_NOT_COLUMNS = {*OWN_ARGUMENTS, "prompt", "completion", "ground_truth"}
# Keys of `Score.parts` besides the functions' values: no function's values may be read as these.
_TAKEN_NAMES = {"correct", "format", "overlong"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The progress of the run; the names are those of transformers' TrainerState."""

    global_step: int = 0
    """Optimizer steps done."""
    max_steps: int = 0
    """Optimizer steps of the whole run."""
    epoch: float = 0.0
    """Passes over the data done."""


def score_with_functions(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    weights: Sequence[float] = (),
    *,
    state: TrainerState | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
) -> ScoredBatch:
    """Score with the user's functions: the reward is the sum of their values, each times its weight if there are any.

    Each is called once with keyword lists, one entry per completion, groups one after the other, and returns as many
    numbers. None (or NaN) means that it does not apply: the others count, and a completion that no function scores has no
    reward (NaN). Functions do not see a completion whose environment was lost, and it has none either. The keywords are

        prompts             the text, or the list of messages, of the row
        completions         the text, or for a row of messages [{"role": "assistant", "content": text}]; of a trajectory the
                            text that `scored_text` asks for, or all messages: assistant, tool and user
        completion_ids      lists of int
        ground_truth        the row's value, a list if it has several; absent if no row has one
        environments        each trajectory's environment at the end (`Snapshot`); absent without trajectories
        trajectories        each trajectory's turns, branches and end (`trajectory_rewards.told`); absent without any
        <column>            every other column of the data, None where a row lacks it
        trainer_state       `state`
        log_extra           log_extra(column, values): a column of the table of samples (`Score.extras`)
        log_metric          log_metric(name, value): a metric (`ScoredBatch.logged`)
        rng                 a numpy.random.Generator, seeded from `seed` and the function's position

    A function without `**kwargs` gets those that it names. Lists and dicts are copies: changing them affects no other
    function and no later call. Async functions are awaited together, after the others, always in the same event loop.
    Before each function the global states of `random` and `numpy.random` are seeded likewise, for async functions once.

    Args:
        timeout_s: that one function may take; the async ones together.
    Raises:
        ValueError: an argument that the data do not have, or a function that cannot be called by keyword.
        UserCodeError: a function failed, took too long, or returned or logged a value that is not a number; the message names it.
    """
    if not functions:
        raise ValueError("no reward functions; give at least one")
    if weights and len(weights) != len(functions):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(functions)} reward functions; give one each"
        )
    flat = [(group.prompt, completion) for group in groups for completion in group.completions]
    named = _named(functions)
    lost = Score(reward=math.nan, parts=dict.fromkeys(named, math.nan))
    is_given = [not is_lost(completion) for _, completion in flat]
    if not any(is_given):
        return ScoredBatch(
            groups=[ScoredGroup(group=group, scores=(lost,) * len(group.completions)) for group in groups]
        )
    keywords: dict[str, Any] = {name: list(compress(v, is_given)) for name, v in _keywords(flat).items()}
    keywords["trainer_state"] = state or TrainerState()
    logs = _Logs(sum(is_given))
    calls = []
    for position, (name, function) in enumerate(named.items()):
        own_seed = np.random.SeedSequence([seed, position])
        own = {"rng": np.random.default_rng(own_seed), **logs.callables(name)}
        calls.append(
            FunctionCall(
                name=name, function=function, arguments=_accepted(name, function, keywords | own), seed=own_seed
            )
        )
    by_function = dict(zip(named, call_all(calls, sum(is_given), timeout_s=timeout_s), strict=True))
    scores = iter(_scores(by_function, list(weights) or [1.0] * len(named), logs.columns))
    return ScoredBatch(
        groups=[
            ScoredGroup(group=group, scores=tuple(lost if is_lost(c) else next(scores) for c in group.completions))
            for group in groups
        ],
        logged={name: [sum(values) / len(values)] for name, values in logs.metrics.items()},
    )


def function_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The names of the functions' values in `Score.parts`, in the order of the functions.

    That is a function's own name; the second of one name is `name_2`, the third `name_3`. `correct`, `format` and `overlong`
    have another meaning there, so that a function of such a name is `correct_2`, `format_2` or `overlong_2` from the start.
    """
    return list(_named(functions))


def renamed(functions: Sequence[RewardFunction]) -> list[str]:
    """A note for each function whose values have another name than its own."""
    return [
        f"reward function {own} is called {name} in metrics, samples and the report: "
        + (f"{own} is a name of the run's own" if own in _TAKEN_NAMES else f"another one is called {own}")
        for name, function in _named(functions).items()
        if (own := own_name(function)) != name
    ]


def missing_arguments(
    functions: Sequence[RewardFunction], columns: Collection[str], *, has_environments: bool = False
) -> list[str]:
    """One sentence for each function that cannot be called, because it needs an argument that neither the run nor the data have, or
    takes nothing by keyword.

    Args:
        columns: those that at least one row has, including `ground_truth`.
        has_environments: True if completions are trajectories.
    """
    given = dict.fromkeys([*OWN_ARGUMENTS, *columns, *(OF_TRAJECTORIES if has_environments else ())])
    problems = []
    for name, function in _named(functions).items():
        try:
            _accepted(name, function, given)
        except ValueError as err:
            problems.append(str(err))
    return problems


class _Logs:
    """Metrics and columns that the functions of one batch log."""

    def __init__(self, num_completions: int) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[object]] = {}
        self._num_completions = num_completions
        self._owners: dict[str, str] = {}

    def callables(self, function: str) -> dict[str, Callable]:
        """`log_extra` and `log_metric` of one function."""
        return {
            "log_extra": functools.partial(self._log_extra, function),
            "log_metric": functools.partial(self._log_metric, function),
        }

    def _log_extra(self, function: str, column: str, values: Iterable) -> None:
        values = list(values)
        if len(values) != self._num_completions:
            raise ValueError(
                f"log_extra({column!r}) of {function} got {len(values)} values for {self._num_completions} completions"
            )
        # Two accuracy functions log the same columns; neither may hide the other's.
        key = column if self._owners.setdefault(column, function) == function else f"{function}/{column}"
        self.columns[key] = values

    def _log_metric(self, function: str, name: str, value: float) -> None:
        number = number_of(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}) of {function} got {value!r}, which is not a number")
        if math.isfinite(number):
            self.metrics.setdefault(name, []).append(number)


def _scores(
    by_function: Mapping[str, Sequence[float]], weights: Sequence[float], columns: Mapping[str, Sequence[object]]
) -> list[Score]:
    """One score per completion, from one value per function and completion."""
    scores = []
    for index, values in enumerate(zip(*by_function.values(), strict=True)):
        present = [
            weight * value for weight, value in zip(weights, values, strict=True) if not math.isnan(weight * value)
        ]
        reward = sum(present) if present else math.nan
        if abs(reward) > LARGEST:
            raise UserCodeError(
                f"the reward {reward:g} of completion {index}, the sum over {', '.join(by_function)}, is more than {LARGEST:g} "
                "(float32)",
                f"reward_weights: {', '.join(f'{weight:g}' for weight in weights)}",
            )
        scores.append(
            Score(
                reward=reward,
                parts=dict(zip(by_function, values, strict=True)),
                extras={column: noted[index] for column, noted in columns.items()},
            )
        )
    return scores


def _keywords(flat: Sequence[tuple[Prompt, Completion]]) -> dict[str, list[Any]]:
    """Keywords with one entry per completion."""
    keywords: dict[str, list[Any]] = {
        "prompts": [_prompt_of(prompt) for prompt, _ in flat],
        "completions": [_completion_of(prompt, completion) for prompt, completion in flat],
        "completion_ids": [completion.tokens.tolist() for _, completion in flat],
    }
    if any(prompt.ground_truths for prompt, _ in flat):
        keywords["ground_truth"] = [_ground_truth_of(prompt) for prompt, _ in flat]
    for column in dict.fromkeys(column for prompt, _ in flat for column in prompt.columns):
        if column not in _NOT_COLUMNS or (column == "ground_truth" and column not in keywords):
            keywords[column] = [prompt.columns.get(column) for prompt, _ in flat]
    records = [completion.trajectory for _, completion in flat]
    if any(records):
        keywords["environments"] = [record and Snapshot(**record.snapshot) for record in records]
        keywords["trajectories"] = [record and told(record) for record in records]
    return keywords


def _prompt_of(prompt: Prompt) -> str | list[dict[str, str]]:
    if isinstance(prompt.source, str):
        return prompt.source or prompt.text
    return [dict(message) for message in prompt.source]


def _completion_of(prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
    if isinstance(prompt.source, str):
        return completion.scored_text
    if completion.trajectory is None:
        return [{"role": "assistant", "content": completion.text}]
    return [dict(message) for message in completion.trajectory.messages]


def _ground_truth_of(prompt: Prompt) -> object:
    truths = prompt.ground_truths
    return truths[0] if len(truths) == 1 else list(truths) or None


def _accepted(name: str, function: RewardFunction, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return dict(keywords)
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unnamed:
        raise ValueError(
            f"reward function {name} takes {', '.join(unnamed)} by position only, and arguments are given by keyword; "
            "take the / out of its signature, or name a function that calls it"
        )
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in keywords]
    if missing:
        raise ValueError(
            f"reward function {name} asks for {', '.join(missing)}, which the data do not have; there are "
            f"{', '.join(sorted(keywords))}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(keywords)
    accepted = {p.name: keywords[p.name] for p in by_name if p.name in keywords}
    if not accepted:
        raise ValueError(
            f"reward function {name} takes none of the keywords that it could be given, {', '.join(sorted(keywords))}; "
            "let it take completions, or **kwargs"
        )
    return accepted


def _named(functions: Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    named: dict[str, RewardFunction] = {}
    for function in functions:
        name = base = own_name(function)
        number = 1
        while name in named or name in _TAKEN_NAMES:
            number += 1
            name = f"{base}_{number}"
        named[name] = function
    return named


def own_name(function: RewardFunction) -> str:
    """The name of a function, or of the class of one that is an object."""
    inner = innermost(function)
    return getattr(inner, "__name__", type(inner).__name__)
