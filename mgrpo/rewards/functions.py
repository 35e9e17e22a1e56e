"""Rewards from the user's own functions: how they are called, and what becomes of their values.

The call is TRL's, so that a function written for its GRPOTrainer works here. The functions are the user's code and run in
this process; `function_catalog` finds those that are named on the command line.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from mgrpo.types import Completion, Prompt, RolloutGroup, Score, ScoredGroup

RewardFunction = Callable[..., Iterable[float | None] | Awaitable[Iterable[float | None]]]

OWN_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every function may ask for; columns of the data with these names are not passed on."""
_NOT_COLUMNS = {*OWN_ARGUMENTS, "prompt", "completion", "ground_truth"}
# What `Score.parts` holds besides the verdicts themselves: no function's values may be read as these.
_TAKEN_NAMES = {"correct", "format", "overlong"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far the run is; the names are those of transformers' TrainerState."""

    global_step: int = 0
    """Optimizer steps done."""
    max_steps: int = 0
    """Optimizer steps of the whole run."""
    epoch: float = 0.0
    """Passes over the data done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionScores:
    """What one call of all functions gave."""

    groups: list[ScoredGroup]
    metrics: dict[str, float] = field(default_factory=dict)
    """`log_metric`: the mean of what was logged under each name."""
    columns: dict[str, list] = field(default_factory=dict)
    """`log_extra`: one value a completion, groups one after the other."""


def score_with_functions(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    weights: Sequence[float] = (),
    *,
    state: TrainerState | None = None,
) -> FunctionScores:
    """Score with the user's functions: the reward is the sum of what they return, each times its weight if there are any.

    Each is called once with keyword lists, one entry a completion, groups one after the other, and returns as many
    numbers. None (or NaN) means that it does not apply: the others count, and a completion that no function scores has no
    reward (NaN). The keywords are

        prompts             the text, or the list of messages, of the row
        completions         the text, or for a row of messages [{"role": "assistant", "content": text}]
        completion_ids      lists of int
        ground_truth        the row's value, a list if it has several; absent if no row has one
        <column>            every other column of the data, None where a row lacks it
        trainer_state       `state`
        log_extra           log_extra(column, values): a column of the table of samples
        log_metric          log_metric(name, value): a line in the metrics

    A function that takes no `**kwargs` gets those that it names. Lists and dicts are its own: what it does to them meets no
    other function, and no later call. Async functions are awaited together, after the others, always in the same event loop.

    Raises:
        ValueError: an argument that the data do not have, a function that cannot be called by keyword, or what was
            returned or logged is not one number for each.
        RuntimeError: a function failed; it says which.
    """
    if not functions:
        raise ValueError("no reward functions; give at least one")
    if weights and len(weights) != len(functions):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(functions)} reward functions; give one each"
        )
    flat = [(group.prompt, completion) for group in groups for completion in group.completions]
    if not flat:
        return FunctionScores(groups=[ScoredGroup(group=group, scores=()) for group in groups])
    keywords = _keywords(flat, state or TrainerState())
    logs = _Logs(len(flat))
    named = _named(functions)
    returned = _call_all(
        {name: (function, _accepted(name, function, keywords | logs.doors(name))) for name, function in named.items()}
    )
    by_function = {name: _numbers(name, returned[name], len(flat)) for name in named}
    parts = [dict(zip(by_function, values, strict=True)) for values in zip(*by_function.values(), strict=True)]
    scores = iter(
        Score(
            reward=_sum_of_present(
                weight * value for weight, value in zip(weights or [1.0] * len(named), part.values(), strict=True)
            ),
            parts=part,
        )
        for part in parts
    )
    return FunctionScores(
        groups=[ScoredGroup(group=group, scores=tuple(next(scores) for _ in group.completions)) for group in groups],
        metrics={name: sum(values) / len(values) for name, values in logs.metrics.items()},
        columns=logs.columns,
    )


def function_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The names under which the functions' values stand in `Score.parts`, in their order.

    That is a function's own name; the second of one name is `name_2`, the third `name_3`. `correct`, `format` and `overlong`
    mean something else there, so that a function of such a name is `correct_2`, `format_2` or `overlong_2` from the start.
    """
    return list(_named(functions))


def missing_arguments(functions: Sequence[RewardFunction], columns: Collection[str]) -> list[str]:
    """One sentence for each function that cannot be called: it asks for what neither the run nor the data have, or takes
    nothing by keyword.

    Args:
        columns: those that at least one row has, `ground_truth` among them.
    """
    given = dict.fromkeys([*OWN_ARGUMENTS, *columns])
    problems = []
    for name, function in _named(functions).items():
        try:
            _accepted(name, function, given)
        except ValueError as err:
            problems.append(str(err))
    return problems


class _Logs:
    """What the functions of one call log."""

    def __init__(self, num_completions: int) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list] = {}
        self._num_completions = num_completions
        self._owners: dict[str, str] = {}

    def doors(self, function: str) -> dict[str, Callable]:
        """The two callables that one function gets."""
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
        number = _number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}) of {function} got {value!r}, which is no number")
        if math.isfinite(number):
            self.metrics.setdefault(name, []).append(number)


def _keywords(flat: Sequence[tuple[Prompt, Completion]], state: TrainerState) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "prompts": [_prompt_of(prompt) for prompt, _ in flat],
        "completions": [
            completion.text if isinstance(prompt.source, str) else [{"role": "assistant", "content": completion.text}]
            for prompt, completion in flat
        ],
        "completion_ids": [completion.tokens.tolist() for _, completion in flat],
        "trainer_state": state,
    }
    if any(prompt.ground_truths for prompt, _ in flat):
        keywords["ground_truth"] = [_ground_truth_of(prompt) for prompt, _ in flat]
    for column in dict.fromkeys(column for prompt, _ in flat for column in prompt.columns):
        if column not in _NOT_COLUMNS or (column == "ground_truth" and column not in keywords):
            keywords[column] = [prompt.columns.get(column) for prompt, _ in flat]
    return keywords


def _prompt_of(prompt: Prompt) -> str | list[dict]:
    if isinstance(prompt.source, str):
        return prompt.source or prompt.text
    return [dict(message) for message in prompt.source]


def _ground_truth_of(prompt: Prompt) -> object:
    truths = prompt.ground_truths
    return truths[0] if len(truths) == 1 else list(truths) or None


def _accepted(name: str, function: RewardFunction, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: it takes what it takes
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


def _own_copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What one call may change: a function that sorts its completions must not move the rewards of the next one.

    The lists and dicts of the data are copied, too, as they belong to the next epoch's prompt.
    """
    return {
        # Not item by item: there may be millions.
        name: [list(tokens) for tokens in value] if name == "completion_ids" else _copied(value)
        for name, value in arguments.items()
    }


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


def _call_all(calls: Mapping[str, tuple[RewardFunction, dict[str, Any]]]) -> dict[str, Any]:
    """What each function returns: the plain ones one after the other, then the async ones together."""
    returned = {
        name: _call(name, function, arguments)
        for name, (function, arguments) in calls.items()
        if not _is_async(function)
    }
    waiting = {name: call for name, call in calls.items() if name not in returned}
    if waiting:
        future = asyncio.run_coroutine_threadsafe(_await_all(waiting), _event_loop())
        try:
            returned |= future.result()
        except BaseException:
            future.cancel()
            raise
    return returned


def _call(name: str, function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return function(**_own_copies(arguments))
    except (Exception, SystemExit) as err:
        raise _failed(name, err) from err


async def _await_all(calls: Mapping[str, tuple[RewardFunction, dict[str, Any]]]) -> dict[str, Any]:
    tasks = [asyncio.ensure_future(_await(name, *call)) for name, call in calls.items()]
    try:
        return dict(zip(calls, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()


async def _await(name: str, function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return await function(**_own_copies(arguments))
    # Ctrl-C reaches the main thread alone: here it is the function's own doing.
    except (Exception, SystemExit, KeyboardInterrupt) as err:
        raise _failed(name, err) from err


def _failed(name: str, err: BaseException) -> RuntimeError:
    return RuntimeError(f"reward function {name} failed: {type(err).__name__}: {err}")


def _is_async(function: RewardFunction) -> bool:
    inner = _innermost(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: an HTTP client that a function keeps belongs to the loop that it was first used in."""
    return _event_loop_of(os.getpid())


# A forked process has none of its parent's threads, and needs a loop of its own. The parent's stays referenced: to collect
# it would reach into what the two share.
@functools.cache
def _event_loop_of(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), name="async-reward-functions", daemon=True).start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        # asyncio hands these to who awaits the task, and then lets them end the thread, for which `_call_all` would wait.
        except (SystemExit, KeyboardInterrupt):
            continue


def _numbers(name: str, returned: object, num_completions: int) -> list[float]:
    """One float a completion; NaN where the function does not apply."""
    wanted = "return a list with one number (or None) for each"
    if isinstance(returned, (str, bytes, Mapping, Set)) or not isinstance(returned, Iterable):
        found = "None" if returned is None else f"a {type(returned).__name__}"
        raise ValueError(f"reward function {name} returned {found} for {num_completions} completions; {wanted}")
    try:
        values = list(returned)
    except (Exception, SystemExit) as err:  # a generator runs only here
        raise _failed(name, err) from err
    if len(values) != num_completions:
        raise ValueError(
            f"reward function {name} returned {len(values)} values for {num_completions} completions; {wanted}"
        )
    found = [math.nan if value is None else _number(value) for value in values]
    for place, number in enumerate(found):
        if number is None or math.isinf(number):
            raise ValueError(
                f"reward function {name} returned {values[place]!r:.80} for completion {place}; {wanted}, not an infinity"
            )
    return found


def _number(value: object) -> float | None:
    """The value as a float, whatever kind of number it is (numpy's and torch's scalars too); None for anything else."""
    if not isinstance(value, numbers.Number) and (not hasattr(value, "__float__") or getattr(value, "shape", ()) != ()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _named(functions: Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    named: dict[str, RewardFunction] = {}
    for function in functions:
        inner = _innermost(function)
        name = base = getattr(inner, "__name__", type(inner).__name__)
        number = 1
        while name in named or name in _TAKEN_NAMES:
            number += 1
            name = f"{base}_{number}"
        named[name] = function
    return named


def _innermost(function: RewardFunction) -> RewardFunction:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _sum_of_present(values: Iterable[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) if present else math.nan
