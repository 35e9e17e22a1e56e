"""Programs that drive the model: one path of ids whatever they say, and no score where they fail."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.loop import losses
from mgrpo.environments.loop.driven import Driven
from mgrpo.environments.loop.episodes import EpisodeBounds, Task
from mgrpo.environments.loop.gathering import Ask, Gathering
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.offered.program import Model, Program, Refused
from mgrpo.environments.workers import link
from mgrpo.environments.workers.environment_catalog import PROGRAM, Spec
from mgrpo.environments.workers.pool import EnvironmentPool, describe
from mgrpo.types import Completion, RolloutGroup
from tests.builders import prompt
from tests.unit.environments.programs import say

DOCS = File(__file__).parents[3] / "docs" / "programs.md"
PROGRAMS = File(__file__).with_name("programs.py")
END, NEXT = 1, 2
"""The end of a turn, and the opening of the model's."""
BOUNDS = EpisodeBounds(max_model_length=1000, max_calls=5)
QUICK = WorkerLimits(tool_timeout_s=0.5, reset_timeout_s=30, acquire_timeout_s=20, grace_s=0.3)


@dataclass(frozen=True)
class Said:
    content: str
    calls: Sequence[Call] = ()
    unreadable: Sequence[str] = ()


class Letters:
    """A language of characters; "!{...}" is a call."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = tools

    def with_tools(self, tools: Sequence[Tool]) -> Letters:
        return Letters(tools)

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(message["role"] == "nobody" for message in messages):
            raise ValueError("the template has no role nobody")
        told = "".join(f"[{tool.name}]" for tool in self.tools)
        return [
            *map(ord, told),
            *(i for message in messages for i in self._message(message["role"], message["content"])),
            NEXT,
        ]

    def _message(self, role: str, content: str) -> list[int]:
        return [ord(role[0]), *map(ord, content), END]

    def read(self, turn: Sampled, *, calls: bool) -> Said:
        text = "".join(map(chr, turn.tokens.tolist())).strip(chr(END))
        if not (calls and "!" in text):
            return Said(text)
        content, *found = text.split("!")
        read = [json.loads(call) for call in found if call != "?"]
        return Said(content, [Call(name=n, arguments=a) for n, a in read], ["not readable"] * found.count("?"))

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        return [*(i for name, text in answers for i in self._message("tool", f"{name}={text}")), NEXT]

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        return [*self._message("user", answer), NEXT]

    def text(self, tokens: Sequence[np.ndarray]) -> list[str]:
        return [self.written(ids.tolist()) for ids in tokens]

    def written(self, ids: Sequence[int]) -> str:
        if any(i > 1 << 16 for i in ids):
            raise ValueError("no such id")
        return "".join(map(chr, ids))


class Engine:
    """Says these texts in turn; a text that does not fit is cut."""

    def __init__(self, *texts: str, delay_s: float = 0.0) -> None:
        self.texts, self.delay_s = list(texts), delay_s
        self.asks: list[Ask] = []

    def send(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.asks.append(ask)
            turns = [self._turn(ask) for _ in range(ask.num_samples)]
            asyncio.get_running_loop().call_later(self.delay_s, ask.answer.set_result, turns)

    def _turn(self, ask: Ask) -> Sampled:
        assert ask.max_tokens >= 1
        text = self.texts.pop(0) if self.texts else "x"
        tokens = [*map(ord, text), END][: ask.max_tokens]
        return Sampled(
            tokens=np.array(tokens, np.int32),
            logprobs=np.arange(-len(tokens), 0, dtype=np.float32),
            policy_versions=np.full(len(tokens), 4, np.int32),
            finish_reason="stop" if tokens[-1] == END else "length",
        )


def spec(name: str, **settings: Any) -> Spec:
    return Spec(entry=f"{PROGRAM}{PROGRAMS}:{name}", settings=settings)


def play(
    engine: Engine,
    name: str,
    *,
    num_samples: int = 1,
    bounds: EpisodeBounds = BOUNDS,
    max_tokens: int = 100,
    in_rounds: bool = True,
    limits: WorkerLimits = QUICK,
    after: Callable[[EnvironmentPool], Any] | None = None,
    own: Spec | None = None,
    row: Mapping[str, Any] | None = None,
    python: str | None = None,
    folders: Sequence[str] = (),
    **settings: Any,
) -> RolloutGroup:
    """One group, each sample driven by the program of this name in a real worker."""
    asked = prompt([10, 11], id=(0, 3))

    async def run() -> RolloutGroup:
        specs = [own or spec(name, **settings)]
        environments = EnvironmentPool(specs, pool_size=8, num_workers=1, limits=limits, folders=folders, python=python)
        await environments.start()
        try:
            gathering = Gathering(engine.send, lambda ask: None, in_rounds=in_rounds)
            driven = Driven(gathering, environments, Letters(), bounds)
            gathering.enter(1)
            task = Task(
                prompt=asked,
                name="0/3",
                place=0,
                num_samples=num_samples,
                max_tokens=max_tokens,
                row=row or {"question": "hi"},
                seed=5,
                opened=partial(_never, asked),
            )
            group = await asyncio.wait_for(driven.run(task), 20)
            assert gathering.alive == 0
            if after:
                await after(environments)
            return group
        finally:
            await environments.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def _never(asked: object, text: str) -> Any:
    raise AssertionError("programs open no prompt")


def one(engine: Engine, name: str, **settings: Any) -> Completion:
    return play(engine, name, **settings).completions[0]


def ids(text: str) -> list[int]:
    """ "|" is the end of a turn, ">" the opening of the model's."""
    return [{"|": END, ">": NEXT}.get(letter, ord(letter)) for letter in text]


def test_a_chat_that_goes_on_reuses_the_ids_of_the_turns_before() -> None:
    """Each turn is sampled from exactly the tokens that precede it in the sample, and only what was sampled is trained."""
    engine = Engine("one", "two")
    group = play(engine, "echo")
    found = group.completions[0]
    assert group.prompt.tokens.tolist() == ids("uhi|>") and group.prompt.text == "uhi\1\2"
    assert found.tokens.tolist() == ids("one|uoneone|>two|")
    assert found.loss_mask.tolist() == [True] * 4 + [False] * 9 + [True] * 4
    assert found.logprobs.tolist() == [-4, -3, -2, -1] + [0] * 9 + [-4, -3, -2, -1]
    assert found.policy_versions.tolist() == [4] * 4 + [-1] * 9 + [4] * 4
    assert [ask.tokens.tolist() for ask in engine.asks] == [ids("uhi|>"), ids("uhi|>one|uoneone|>")]
    assert [ask.max_tokens for ask in engine.asks] == [100, 87]
    record = found.trajectory
    assert record is not None and (record.ended_by, record.reward, record.scored_text) == ("stop", 0.5, "two")
    assert record.metrics == {"echo/turns": 2.0} and not record.has_tools
    assert [message["role"] for message in record.messages] == ["assistant", "user", "assistant"]


def test_a_program_that_begins_as_its_row_does_keeps_the_prompt() -> None:
    group = play(Engine("a"), "as_asked")
    assert group.prompt.tokens.tolist() == [10, 11] and group.prompt.text == ""
    assert group.completions[0].tokens.tolist() == ids("a|")


def test_a_program_may_go_on_by_ids() -> None:
    """With a tokenizer of its own it decides about every token."""
    found = play(Engine("a", "b"), "by_ids")
    assert found.prompt.tokens.tolist() == [10, 11, 50]
    assert found.completions[0].tokens.tolist() == [*ids("a|"), 60, 61, *ids("b|")]
    assert found.completions[0].loss_mask.tolist() == [True, True, False, False, True, True]
    record = found.completions[0].trajectory
    assert record is not None and record.reward == 9 and record.ended_by == "stop"


def test_calls_are_told_to_the_program_which_answers_them() -> None:
    engine = Engine('sum!["add", {"a": 1, "b": 2}]!["add", {"a": 3, "b": 4}]', "8")
    group = play(engine, "calling", max_tokens=200)
    found = group.completions[0]
    assert group.prompt.tokens.tolist() == ids("[add]uhi|>")
    assert found.tokens.tolist()[found.loss_mask.tolist().index(False) :] == ids("tadd=3|tadd=7|>8|")
    record = found.trajectory
    assert record is not None and record.reward == 8 and record.has_tools
    assert [(turn.calls, turn.failed) for turn in record.turns] == [(("add", "add"), (False, False)), ((), ())]
    assert record.turns[0].seconds[0] > 0
    calls: Any = record.messages[0]["tool_calls"]
    assert [call["id"] for call in calls] == ["call00000", "call00001"] and calls[0]["function"]["arguments"]["b"] == 2


def test_a_turn_that_was_cut_calls_nothing() -> None:
    """Half a call may say something else than the whole."""
    found = one(Engine('!["add", {"a": 1, "b": 2}]'), "calling", max_tokens=26)
    record = found.trajectory
    assert record is not None and record.ended_by == "error" and record.turns[0].calls == ()


def test_samples_share_one_first_request_and_go_on_alone() -> None:
    engine = Engine("a", "b", "c")
    group = play(engine, "echo", num_samples=3)
    assert [(ask.num_samples, ask.sample, ask.turn) for ask in engine.asks] == [
        (3, 0, 0),
        (1, 0, 1),
        (1, 1, 1),
        (1, 2, 1),
    ]
    assert [each.tokens.tolist() for each in group.completions] == [ids(f"{c}|u{c}{c}|>x|") for c in "abc"]


def test_samples_that_begin_differently_are_refused() -> None:
    """Rewards of different tasks cannot be compared."""
    with pytest.raises(ValueError, match=r"prompt \(0, 3\) with different messages"):
        play(Engine(), "differs", num_samples=2)


def test_a_chat_that_says_something_else_is_refused_and_changes_nothing() -> None:
    """Training would pair tokens with a past that they were not sampled after."""
    engine = Engine("A", "B")
    found = one(engine, "forgets")
    assert found.tokens.tolist() == ids("A|ub|>B|") and len(engine.asks) == 2
    assert found.trajectory is not None and found.trajectory.reward == 1


def test_ids_that_say_something_else_are_refused() -> None:
    found = one(Engine("A"), "other_ids")
    assert found.tokens.tolist() == ids("A|") and found.trajectory is not None and found.trajectory.reward == 1


def test_answers_are_known_by_the_calls_that_they_name() -> None:
    """Some templates write the tool's name beside what it answers."""
    found = one(Engine('!["one", {}]!["two", {}]', "x"), "out_of_order")
    assert found.tokens.tolist()[-len("ttwo=two|tone=one|>x|") :] == ids("ttwo=two|tone=one|>x|")


def test_a_turn_that_a_program_did_not_wait_for_is_part_of_the_trajectory() -> None:
    """It was sampled; the answer to the next chat is that to the next chat."""
    found = one(Engine("A", "B", delay_s=0.05), "impatient")
    assert found.tokens.tolist() == ids("A|uc|>B|")
    assert found.trajectory is not None and found.trajectory.reward == 1


def test_what_a_program_no_longer_waits_for_is_not_asked() -> None:
    """Of chats at once one may be given up before its turn comes."""

    async def go() -> None:
        model = Model(trajectory="t", seed=1)
        chats = [asyncio.create_task(model.chat([say(text)])) for text in "abc"]
        await asyncio.sleep(0)
        chats[1].cancel()
        await asyncio.wait({chats[1]})
        for text in "ac":
            assert (await model.wish())["messages"] == [say(text)]
            model.answer({"refused": "no"})
        await asyncio.wait(chats)
        assert [type(chat.exception()) for chat in (chats[0], chats[2])] == [Refused, Refused]

    asyncio.run(asyncio.wait_for(go(), 10))


def test_reward_functions_get_what_a_program_shows() -> None:
    found = one(Engine(), "tells")
    assert found.trajectory is not None and found.trajectory.snapshot == {"score": 3}


def test_a_program_that_is_late_is_cancelled_at_once() -> None:
    """It may hold what others wait for."""
    ended: list[bool] = []

    async def sleeps(row: Any, model: Model) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def go() -> None:
        program = Program(sleeps)
        await program.reset({}, seed=1)
        asked = asyncio.create_task(program.resume({"begin": []}))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait({asked})
        assert asked.cancelled() and ended

    asyncio.run(asyncio.wait_for(go(), 10))


def test_a_program_that_is_given_up_is_not_left_waiting() -> None:
    """Its place serves another trajectory."""

    async def again(environments: EnvironmentPool) -> None:
        (place,) = environments._hosts
        await _until(lambda: place.instances in ([], [1]))
        instance = await environments.acquire({}, seed=1, trajectory="next")
        assert place.instances != [0]
        await instance.release()

    play(Engine(), "insists", after=again)


async def _until(claim: Callable[[], object]) -> None:
    while not claim():
        await asyncio.sleep(0.01)


def test_chats_that_cannot_be_sampled_are_refused_with_the_reason() -> None:
    """An engine or a template would fail in the middle of a run."""
    engine = Engine("long")
    group = play(engine, "asks_oddly")
    assert group.prompt.tokens.tolist() == ids("uab|>") and [ask.max_tokens for ask in engine.asks] == [2]
    record = group.completions[0].trajectory
    assert record is not None and (record.ended_by, record.reward) == ("length", 1)


def test_chats_at_once_are_one_after_the_other() -> None:
    """The second one does not go on from the first."""
    found = one(Engine(), "two_at_once")
    assert found.trajectory is not None and found.trajectory.reward == 1 and found.tokens.tolist() == ids("x|")


def test_a_program_that_insists_on_what_it_cannot_have_ends() -> None:
    found = one(Engine(), "insists")
    assert found.trajectory is not None and found.trajectory.ended_by == "error"


@pytest.mark.parametrize(("catches", "reward"), [(False, None), (True, 0.25)])
def test_a_full_trajectory_ends_by_its_length(catches: bool, reward: float | None) -> None:
    """The program may give a reward nevertheless; nothing is appended that no turn follows."""
    found = one(Engine(), "endless", max_tokens=20, catches=catches)
    # Two tokens a turn, and seven between: the third begins at 18.
    assert found.tokens.tolist() == ids("x|umore|>x|umore|>x|")
    assert found.trajectory is not None
    assert (found.trajectory.ended_by, found.trajectory.reward) == ("length", reward)


def test_a_first_chat_that_is_too_long_has_no_score() -> None:
    found = one(Engine(), "echo", bounds=EpisodeBounds(max_model_length=5, max_calls=5))
    assert found.trajectory is not None and found.trajectory.ended_by == "error"
    assert found.tokens.tolist() == [ord("x")]


@pytest.mark.parametrize("turns", [0, 1])
def test_a_program_that_raises_has_no_score_and_its_line_is_told(turns: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = one(Engine(), "raises", turns=turns)
    assert found.trajectory is not None and found.trajectory.ended_by == "error" and found.trajectory.reward is None
    line = next(n for n, text in enumerate(PROGRAMS.read_text().splitlines(), 1) if "no such thing" in text)
    assert (
        f"0/3/0 has no score, because its program has failed: raises: JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({PROGRAMS}:{line})"
        in caplog.text
    )


def test_failures_are_told_ten_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(losses, "_MOST_OF_A_KIND", 2)
    play(Engine(), "raises", num_samples=4)
    assert caplog.text.count("has no score") == 2


def test_a_sample_whose_program_fails_early_does_not_stop_the_others() -> None:
    group = play(Engine("a", "b", "c"), "some_fail", num_samples=3)
    records = [each.trajectory for each in group.completions if each.trajectory]
    assert [(record.ended_by, record.reward) for record in records] == [("stop", 1), ("error", None), ("stop", 1)]
    assert [each.tokens.tolist() for each in group.completions] == [ids("a|"), ids("b|"), ids("c|")]


@pytest.mark.parametrize("how", ["async", "thread", "stubborn", "blocks", "dies"])
def test_a_program_that_hangs_or_dies_has_no_score_and_the_pool_goes_on(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PATIENCE_S", 0.3)

    async def again(environments: EnvironmentPool) -> None:
        instance = await environments.acquire({"question": "q"}, seed=1, trajectory="next")
        assert "wish" in await instance.resume({"begin": [1]})
        await instance.release(broken=True)

    found = play(Engine(), "hangs", after=again, how=how)
    record = found.completions[0].trajectory
    assert record is not None and record.ended_by == "error" and record.reward is None
    assert found.completions[0].tokens.tolist() == ids("x|")


@pytest.mark.parametrize(
    ("what", "ended_by", "reward"),
    [(None, "stop", None), (True, "stop", 1), (2, "stop", 2), ("1", "error", None), (float("nan"), "error", None)],
)
def test_what_a_program_returns_is_the_reward(what: object, ended_by: str, reward: float | None) -> None:
    record = one(Engine(), "returns", what=what).trajectory
    assert record is not None and (record.ended_by, record.reward) == (ended_by, reward)


def test_a_program_that_asks_nothing_has_no_score() -> None:
    """A completion has a token, and a reward without one would train it."""
    found = one(Engine(), "returns", what=1.0, asks=False)
    assert found.trajectory is not None and found.trajectory.ended_by == "error" and found.trajectory.reward is None
    assert found.tokens.tolist() == [ord("x")]


def test_a_trajectory_that_takes_too_long_ends_without_a_score() -> None:
    bounds = EpisodeBounds(max_model_length=1000, max_calls=5, trajectory_timeout_s=0.1)
    found = one(Engine(), "waits", bounds=bounds, seconds=0.06, turns=50)
    assert found.trajectory is not None and found.trajectory.ended_by == "error"
    assert len(found.trajectory.turns) < 5


@pytest.mark.parametrize("in_rounds", [True, False])
def test_rounds_and_free_running_give_the_same_trajectories(in_rounds: bool) -> None:
    group = play(Engine("a", "b"), "echo", num_samples=2, in_rounds=in_rounds, turns=3)
    assert [each.tokens.tolist() for each in group.completions] == [ids(f"{c}|u{c}{c}|>x|uxx|>x|") for c in "ab"]


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("plain", {}, "it must be an async function"),
        ("echo", {"turn": 3}, "got an unexpected keyword argument 'turn'"),
        ("needs_more", {}, "missing a required (keyword-only )?argument: 'what'"),
    ],
)
def test_what_cannot_be_a_program_is_refused_at_the_start(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        describe([spec(name, **settings)])


def test_the_program_of_the_docs_plays(tmp_path: File) -> None:
    (tmp_path / "own.py").write_text(DOCS.read_text().split("```python\n")[1].split("```")[0])
    own = Spec(entry=f"{PROGRAM}{tmp_path / 'own.py'}:rollout", settings={"checks": 2})
    row = {"prompt": [say("2+2")], "solution": "4"}
    found = play(Engine("1", "2", " 4"), "", own=own, row=row, max_tokens=200).completions[0]
    assert found.trajectory is not None and found.trajectory.reward == 1 and len(found.trajectory.turns) == 3


def test_rows_may_hold_anything_for_a_program() -> None:
    """Columns `tools` and `env_config` are the program's own."""
    found = describe([spec("echo")])
    assert found.is_program and not found.acts and found.tools == ()
    assert found.choice({"tools": ["whatever"], "env_config": 3}).playing == ("echo",)
