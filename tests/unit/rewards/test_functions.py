"""The user's reward functions: what they are given, what may come back, and what becomes of it."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import multiprocessing
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from mgrpo.processes.user_code import UserCodeError
from mgrpo.rewards.reward_functions import TrainerState, function_names, missing_arguments, score_with_functions
from mgrpo.types import Completion, RolloutGroup, Score
from tests import builders

MESSAGES = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+3"})


def _group(*texts: str, truths: tuple[object, ...] = (5,), **fields: object) -> RolloutGroup:
    question = {"id": (0, 3), "text": "<templated>", "source": "2+3="}
    of = builders.prompt(verifiers=("math",) * len(truths), ground_truths=truths, **(question | fields))
    return builders.rollout_group([_completion(text) for text in texts], of)


def _completion(text: str) -> Completion:
    return builders.completion([7, 8], text=text)


def _returning(value: object) -> Callable:
    def constant(**_: object) -> object:
        return value

    return constant


def _seen(groups: list[RolloutGroup], **settings: object) -> dict[str, object]:
    """The keywords of a function that takes everything."""
    seen: dict[str, object] = {}

    def spy(**kwargs: object) -> list[None]:
        seen.update(kwargs)
        return [None] * len(kwargs["completions"])

    score_with_functions(groups, [spy], **settings)
    return seen


def test_functions_get_columns_and_their_sum_is_the_reward() -> None:
    """Reward functions written for TRL must see what they see there."""

    def length(completions: list[str], **kwargs: object) -> list[float | None]:
        return [float(len(text)) for text in completions]

    def sometimes(completion_ids: list[list[int]], completions: list[str], **_: object) -> list[float | None]:
        return [None if text == "bb" else -1.0 for text in completions]

    def never(prompts: list[str], **_: object) -> list[float | None]:
        return [None] * len(prompts)

    groups = [_group("a", "bb"), _group("ccc", truths=(1, 2))]
    scored = score_with_functions(groups, [length, sometimes, never]).groups
    assert [list(group.rewards) for group in scored] == [[0.0, 2.0], [2.0]]
    assert [group.group for group in scored] == groups
    assert scored[0].scores[0].parts["length"] == 1.0 and math.isnan(scored[0].scores[1].parts["sometimes"])
    only_never = score_with_functions(groups, [never]).groups
    assert all(math.isnan(reward) for group in only_never for reward in group.rewards)
    weighted = score_with_functions(groups, [length, sometimes], [0.5, 2.0]).groups
    assert [list(group.rewards) for group in weighted] == [[-1.5, 1.0], [-0.5]]


def test_the_keywords_are_those_of_trl() -> None:
    """A column beside the wrong completion, or under another name, would reward strangers."""
    groups = [
        _group("a", "bb", columns={"solution": "5", "prompt": "no", "completions": "no", "ground_truth": "no"}),
        _group("c", truths=(1, 2), columns={"level": 3}),
    ]
    seen = _seen(groups, state=TrainerState(global_step=4, max_steps=9, epoch=0.5))
    assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
    assert isinstance(seen.pop("rng"), np.random.Generator)
    assert seen == {
        "prompts": ["2+3=", "2+3=", "2+3="],
        "completions": ["a", "bb", "c"],
        "completion_ids": [[7, 8]] * 3,
        "ground_truth": [5, 5, [1, 2]],
        "solution": ["5", "5", None],
        "level": [None, None, 3],
        "trainer_state": TrainerState(global_step=4, max_steps=9, epoch=0.5),
    }


def test_rows_of_messages_are_conversations() -> None:
    """TRL's functions read completion[0]["content"] there; a string would fail them or, worse, score its first letter."""
    group = _group("a", source=MESSAGES)
    seen = _seen([group, _group("b")])
    assert seen["prompts"] == [list(MESSAGES), "2+3="]
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}], "b"]
    seen["prompts"][0][0]["content"] = "changed"
    assert group.prompt.source[0]["content"] == "Add."
    assert _seen([_group("a", source="")])["prompts"] == ["<templated>"]


def test_rows_without_a_ground_truth_pass_none_on() -> None:
    """TRL's rows need none; a column of that name that no verifier reads is still a column."""
    assert "ground_truth" not in _seen([_group("a", truths=())])
    assert _seen([_group("a", truths=()), _group("b")])["ground_truth"] == [None, 5]
    assert _seen([_group("a", truths=(), columns={"ground_truth": "x"})])["ground_truth"] == ["x"]


def test_a_function_gets_what_it_names() -> None:
    """A signature without **kwargs must not fail because the data have one column more."""

    def picky(completions: list[str], solution: list, *, level: tuple = ()) -> list[float]:
        return [float(label) + len(level) for label in solution]

    group = _group("a", "b", columns={"solution": "2", "other": 1})
    assert list(score_with_functions([group], [picky]).groups[0].rewards) == [2.0, 2.0]

    class Scorer:
        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0] * len(completions)

    (scored,) = score_with_functions([group], [Scorer(), functools.partial(picky, level=(1, 2))]).groups
    assert scored.scores[0].parts == {"Scorer": 1.0, "picky": 4.0}


def test_an_argument_that_the_data_lack_is_named() -> None:
    """Found at the start or at the first call, never as a TypeError from inside a step."""

    def needy(completions: list[str], solution: list[str], **_: object) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"needy asks for solution, which the data do not have.*ground_truth"):
        score_with_functions([_group("a")], [needy])
    (problem,) = missing_arguments([needy, _returning([1.0])], {"ground_truth"})
    assert "needy asks for solution" in problem
    assert missing_arguments([needy], {"solution"}) == []


def test_async_functions_run_together_and_in_one_loop() -> None:
    """One after the other, slow judges would add up; in a new loop each step, a kept HTTP client would be dead."""
    meeting: list[asyncio.Event] = []
    loops: set[asyncio.AbstractEventLoop] = set()

    async def first(completions: list[str], **_: object) -> list[float]:
        loops.add(asyncio.get_running_loop())
        meeting.append(asyncio.Event())
        await asyncio.wait_for(meeting[-1].wait(), 30)
        return [1.0] * len(completions)

    class Second:
        async def __call__(self, completions: list[str], **_: object) -> list[float]:
            while not meeting:
                await asyncio.sleep(0)
            meeting[-1].set()
            return [2.0] * len(completions)

    for _ in range(2):
        meeting.clear()
        (scored,) = score_with_functions([_group("a")], [first, _returning([4.0]), functools.partial(Second())]).groups
        assert scored.scores[0] == Score(reward=7.0, parts={"first": 1.0, "constant": 4.0, "Second": 2.0})
    assert len(loops) == 1


def test_functions_of_one_name_keep_their_own_parts() -> None:
    """Two lambdas would otherwise count once."""
    functions = [lambda **_: [1.0], lambda **_: [2.0]]
    (scored,) = score_with_functions([_group("a")], functions).groups
    assert scored.scores[0] == Score(reward=3.0, parts={"<lambda>": 1.0, "<lambda>_2": 2.0})
    assert function_names(functions) == ["<lambda>", "<lambda>_2"]


@pytest.mark.parametrize("taken", ["correct", "format", "overlong"])
def test_a_function_does_not_take_the_name_of_another_part(taken: str) -> None:
    """`correct` would be read as the verdict that pass@k counts, and the length's penalty would overwrite `overlong`."""
    first, second, third = _returning([1.0]), _returning([2.0]), _returning([4.0])
    first.__name__ = second.__name__ = taken
    third.__name__ = f"{taken}_2"
    functions = [first, second, third]
    assert function_names(functions) == [f"{taken}_2", f"{taken}_3", f"{taken}_2_2"]
    (scored,) = score_with_functions([_group("a")], functions).groups
    assert scored.scores[0] == Score(reward=7.0, parts={f"{taken}_2": 1.0, f"{taken}_3": 2.0, f"{taken}_2_2": 4.0})


def test_no_function_can_change_what_the_next_one_sees() -> None:
    """A function that sorts its completions would give the next one's rewards to other completions, without a word."""

    def wrecks(**lists: object) -> list[float]:
        num_completions = len(lists["completions"])
        lists["completions"][0][0]["content"] = "changed"
        lists["prompts"][0][0]["content"] = "changed"
        lists["completion_ids"][0].clear()
        lists["tags"][0].append("changed")
        lists["ground_truth"][0]["answer"].append("changed")
        for values in lists.values():
            if isinstance(values, list):
                values.clear()
        return [0.0] * num_completions

    async def wrecks_later(**lists: object) -> list[float]:
        return wrecks(**lists)

    seen = []

    def spy(**lists: object) -> list[float]:
        seen.append({name: values for name, values in lists.items() if isinstance(values, list)})
        return [0.0] * len(lists["completions"])

    async def spy_later(**lists: object) -> list[float]:
        return spy(**lists)

    group = _group("b", "a", source=MESSAGES, truths=({"answer": ["5"]},), columns={"tags": ["easy"]})
    before = copy.deepcopy((group.prompt.source, group.prompt.ground_truths, group.prompt.columns))
    score_with_functions([group], [spy])
    score_with_functions([group], [wrecks, spy, wrecks_later, spy_later])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["completions"] == [[{"role": "assistant", "content": text}] for text in "ba"]
    assert (group.prompt.source, group.prompt.ground_truths, group.prompt.columns) == before


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda completions, /, **_: [1.0], "<lambda> takes completions by position only"),
        (math.sqrt, "sqrt takes x by position only"),
        (lambda *lists: [1.0], "<lambda> takes none of the keywords"),
        (lambda: [1.0], "<lambda> takes none of the keywords"),
        (lambda completion=(): [1.0], "<lambda> takes none of the keywords"),
        (print, "print takes none of the keywords"),
    ],
)
def test_what_cannot_be_called_by_keyword_is_refused_before_the_start(function: Callable, problem: str) -> None:
    """It would fail in the first step, after the model has been loaded and the prompts sampled."""
    (sentence,) = missing_arguments([_returning([1.0]), function], {"ground_truth"})
    assert sentence.startswith(f"reward function {problem}")
    with pytest.raises(ValueError, match=problem):
        score_with_functions([_group("a")], [function])
    assert missing_arguments([lambda x=1, /, *, completions: [1.0], functools.partial(pow, 2)], ()) != []
    assert missing_arguments([lambda x=1, /, *, completions: [1.0]], ()) == []


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ([1.0], "1 values for 2"),
        ([1.0] * 3, "3 values for 2"),
        (None, "None for 2"),
        (1.0, "a float for 2"),
        ("12", "a str for 2"),
        ({0: 1.0, 1: 2.0}, "a dict for 2"),
        ([1.0, "1"], "'1' for completion 1"),
        ([[1.0], [2.0]], r"\[1.0\] for completion 0"),
        (np.ones((2, 1)), r"array\(\[1.\]\) for completion 0"),
        ([1j, 1.0], "1j for completion 0"),
        ([1.0, math.inf], "inf for completion 1"),
        ([10**400, 1.0], "10000000000.* for completion 0"),
        ([0.0, -1e300], r"-1e\+300 for completion 1; .* of at most 3.40282e\+38"),
    ],
)
def test_what_is_not_one_number_each_is_refused(returned: object, found: str) -> None:
    """Rewards beside the wrong completions would train noise, and an infinity would end as NaN in every weight."""
    with pytest.raises(UserCodeError, match=f"reward function constant returned {found}") as caught:
        score_with_functions([_group("a", "b")], [_returning(returned)])
    (where,) = caught.value.__notes__
    assert re.fullmatch(rf'  File "{__file__}", line \d+, in constant', where)


@pytest.mark.parametrize(
    "returned",
    [
        (1, 0),
        [True, False],
        np.array([1.0, 0.0], np.float32),
        [np.float32(1), np.int64(0)],
        [Decimal(1), 0],
        iter([1, 0]),
    ],
)
def test_numbers_of_any_kind_are_rewards(returned: object) -> None:
    """Functions return what their library returns."""
    assert list(score_with_functions([_group("a", "b")], [_returning(returned)]).groups[0].rewards) == [1.0, 0.0]


def test_tensors_are_rewards() -> None:
    """TRL's users return them."""
    torch = pytest.importorskip("torch")
    (scored,) = score_with_functions([_group("a", "b")], [_returning(torch.tensor([1.0, math.nan]))]).groups
    assert scored.rewards[0] == 1.0 and math.isnan(scored.rewards[1])


def test_a_function_that_fails_is_named() -> None:
    """A traceback from somewhere in a user's library does not say which of five functions it was."""

    def broken(**_: object) -> list[float]:
        raise KeyError("solution")

    async def broken_later(**_: object) -> list[float]:
        raise KeyError("solution")

    for function in (broken, broken_later):
        with pytest.raises(UserCodeError, match=f"reward function {function.__name__} failed: KeyError") as caught:
            score_with_functions([_group("a")], [_returning([1.0]), function])
        assert isinstance(caught.value.__cause__, KeyError)
        (where,) = caught.value.__notes__
        frame, line = where.splitlines()
        assert __file__ in frame and frame.endswith(f"in {function.__name__}")
        assert line.strip() == 'raise KeyError("solution")'


async def _exits(**_: object) -> list[float]:
    raise SystemExit(3)


async def _interrupts(**_: object) -> list[float]:
    raise KeyboardInterrupt


async def _asks_one_that_exits(**_: object) -> list[float]:
    return await asyncio.gather(_exits())


def _exits_at_once(**_: object) -> list[float]:
    raise SystemExit(3)


def _exits_while_it_is_read(**_: object) -> list[float]:
    return (_exits_at_once() for _ in range(1))


@pytest.mark.parametrize(
    "function", [_exits, _interrupts, _asks_one_that_exits, _exits_at_once, _exits_while_it_is_read]
)
def test_a_function_that_exits_is_a_failure_like_any_other(function: Callable) -> None:
    """The exit of one thread alone would leave the run waiting for ever; that of the run would look like its success."""
    ended: list[object] = []

    def score(*functions: Callable) -> None:
        try:
            ended.append(score_with_functions([_group("a")], functions).groups[0].scores[0].reward)
        except BaseException as err:
            ended.append(err)

    async def works(**_: object) -> list[float]:
        return [1.0]

    for functions in ((works, function), (works,)):
        thread = threading.Thread(target=score, args=functions, daemon=True)
        thread.start()
        thread.join(30)
    failure, reward = ended
    assert isinstance(failure, RuntimeError), failure
    assert f"reward function {function.__name__} failed: " in str(failure)
    assert reward == 1.0


def test_a_generator_that_fails_is_named() -> None:
    """It runs only when its values are read."""

    def lazy(completions: list[str]) -> object:
        return ({}[text] for text in completions)

    with pytest.raises(RuntimeError, match="reward function lazy failed: KeyError"):
        score_with_functions([_group("a")], [lazy])


async def _one(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def _score_once() -> None:
    assert list(score_with_functions([_group("a")], [_one]).groups[0].rewards) == [1.0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_awaits_in_a_loop_of_its_own() -> None:
    """A fork has the parent's loop but not the thread that runs it, and would wait for ever."""
    _score_once()
    child = multiprocessing.get_context("fork").Process(target=_score_once)
    child.start()
    child.join(30)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    _score_once()


def test_one_failing_async_function_stops_the_others() -> None:
    """The run ends; a judge that goes on asking its server costs money."""
    stopped = threading.Event()

    async def waits(**_: object) -> list[float]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return [1.0]

    async def breaks(**_: object) -> list[float]:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(RuntimeError, match="breaks"):
        score_with_functions([_group("a")], [waits, breaks])
    assert stopped.wait(30)


def test_metrics_are_averaged_and_columns_kept() -> None:
    """Two accuracy functions log the same column: neither may overwrite or lengthen the other's."""

    def logs(completions: list[str], log_extra: Callable, log_metric: Callable) -> list[float]:
        log_extra("parsed", [text.upper() for text in completions])
        log_metric("length", 1.0)
        log_metric("length", np.float32(3.0))
        log_metric("undefined", math.nan)
        return [1.0] * len(completions)

    def logs_too(completions: list[str], log_extra: Callable, log_metric: Callable) -> list[float]:
        log_extra("parsed", completions)
        log_metric("length", 5)
        return [1.0] * len(completions)

    scored = score_with_functions([_group("a", "b"), _group("c")], [logs, logs_too])
    assert scored.logged == {"length": [3.0]}
    assert [score.extras for group in scored.groups for score in group.scores] == [
        {"parsed": text.upper(), "logs_too/parsed": text} for text in "abc"
    ]


@pytest.mark.parametrize(
    "call", [lambda log_extra, **_: log_extra("x", [1]), lambda log_metric, **_: log_metric("x", "1")]
)
def test_what_is_logged_wrongly_is_refused(call: Callable) -> None:
    """A column one value short stands beside the wrong completions from there on."""
    with pytest.raises(RuntimeError, match=r"<lambda> failed: ValueError: log_(extra|metric)\('x'\) of <lambda> got"):
        score_with_functions([_group("a", "b")], [call])


def test_weights_and_functions_must_match() -> None:
    """A weight too few would leave a function out."""
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2 reward functions"):
        score_with_functions([_group("a")], [_returning([1.0])] * 2, [1.0])
    with pytest.raises(ValueError, match="no reward functions"):
        score_with_functions([_group("a")], [])


def test_nothing_to_score_calls_no_function() -> None:
    """An empty batch is legal, and a function may not expect one."""
    assert score_with_functions([], [_returning(None)]).groups == []
    empty = replace(_group("a"), completions=())
    assert score_with_functions([empty], [_returning(None)]).groups[0].scores == ()


def test_a_function_that_takes_too_long_is_named() -> None:
    """An endless loop would otherwise keep the whole run waiting; the next batch must not wait behind it."""
    released = threading.Event()

    def forever(completions: list[str], **_: object) -> list[float]:
        released.wait()
        return [0.0] * len(completions)

    async def for_long(completions: list[str], **_: object) -> list[float]:
        await asyncio.sleep(600)
        return [0.0] * len(completions)

    for function in (forever, for_long):
        name = function.__name__
        with pytest.raises(
            UserCodeError, match=f"^reward function {name} .* within reward_funcs_timeout=0.2 s; raise it"
        ) as caught:
            score_with_functions([_group("5")], [function], timeout_s=0.2)
        assert caught.value.__notes__[0].endswith(f"in {name}")
    batch = score_with_functions([_group("5")], [_returning([1.0])], timeout_s=20)
    assert batch.groups[0].scores[0].reward == 1.0
    released.set()


def test_weights_make_no_reward_beyond_float32() -> None:
    """Each value may be held by float32 and their weighted sum not: an infinity ends as NaN in every weight."""
    group = [_group("a", "b")]
    (scored,) = score_with_functions(group, [_returning([1.0, -3e38])]).groups
    assert list(scored.rewards) == [1.0, -3e38]
    for functions, weights in (([_returning([1.0, -3e38])], [2.0]), ([_returning([1.0, 3e38])] * 2, [1.0, 1.0])):
        with pytest.raises(UserCodeError, match=r"the reward -?6e\+38 of completion 1, the sum over constant"):
            score_with_functions(group, functions, weights)
