"""The loop of a trajectory against a scripted engine and environment: what is sampled, what is not, and where it ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes, Task
from mgrpo.environments.loop.gathering import Gathering
from mgrpo.types import Completion, Prompt
from tests.builders import branch, prompt
from tests.unit.environments.played import (
    BETWEEN,
    BOUNDS,
    CALL,
    END,
    THOUGHT,
    UNKNOWN,
    UNREADABLE,
    Adder,
    Digits,
    Forgetful,
    Scripted,
    Shelf,
    check,
    one,
    play,
)


def test_a_trajectory_is_turns_and_what_stands_between_them() -> None:
    """Each turn is sampled from exactly the tokens that precede it in the sample."""
    engine = Scripted([CALL, END], [5, END])
    found = one(engine, Adder([Observation(text="abc", reward=0.5, metrics={"adder/x": 2.0})], reward=0.25))
    assert found.tokens.tolist() == [CALL, END, BETWEEN, 8, 8, 8, BETWEEN, 5, END]
    assert found.loss_mask.tolist() == [True] * 2 + [False] * 5 + [True] * 2
    assert found.logprobs.tolist() == [-2, -1, 0, 0, 0, 0, 0, -2, -1]
    assert found.policy_versions.tolist() == [0, 0, -1, -1, -1, -1, -1, 0, 0]
    assert [ask.tokens.tolist() for ask in engine.asks] == [[10, 11], [10, 11, CALL, END, BETWEEN, 8, 8, 8, BETWEEN]]
    assert [ask.max_tokens for ask in engine.asks] == [100, 93]
    record = found.trajectory
    assert record is not None and (record.ended_by, record.reward, record.snapshot) == ("stop", 0.25, {"calls": 1})
    assert record.metrics == {"adder/x": 2.0}
    assert [(turn.start, turn.end, turn.calls, turn.reward) for turn in record.turns] == [
        (0, 2, ("add",), 0.5),
        (7, 9, (), 0.0),
    ]
    assert [message["role"] for message in record.messages] == ["assistant", "tool", "assistant"]
    assert (found.scored_text, found.text, found.sampled_text) == ("5", "219888951", "21\n51")


def test_several_calls_of_a_turn_are_answered_together() -> None:
    """Answered one by one, each answer would open a turn of the model that it never takes."""
    instance = Adder([Observation(text="a"), Observation(text="bb", failed=True)])
    found = one(Scripted([CALL, UNKNOWN, CALL, UNREADABLE, END], [5, END]), instance)
    assert instance.asked == [["add", "add"]], "the unknown tool reaches no environment"
    assert found.tokens.tolist().count(BETWEEN) == 2
    turn = found.trajectory.turns[0]
    assert turn.calls == ("add", "", "add", "") and turn.failed == (False, True, True, True)
    assert (turn.num_unknown, turn.num_unreadable) == (1, 1)
    texts = [message["content"] for message in found.trajectory.messages if message["role"] == "tool"]
    assert texts == ["a", "unknown tool 'sub'; the tools are: add", "bb", "not readable"]


@pytest.mark.parametrize("limit", range(1, 9))
def test_nothing_is_appended_that_no_token_could_follow(limit: int) -> None:
    """A sample that ended in a tool's text would hold tokens that no sampled one depends on."""
    found = one(Scripted([CALL, END], [5, END]), Adder([Observation(text="abc")]), max_tokens=limit)
    whole = [CALL, END, BETWEEN, 8, 8, 8, BETWEEN, 5]
    assert found.tokens.tolist() == (whole[:limit] if limit < 2 or limit == 8 else [CALL, END])
    assert found.finish_reason == "length" and found.loss_mask[-1]


def test_after_the_last_call_there_is_one_more_turn() -> None:
    """Without it the answer could never be given; a further call is not made."""
    bounds = replace(BOUNDS, max_calls=2)
    answers = one(Scripted([CALL, END], [CALL, END], [5, END]), bounds=bounds)
    assert (answers.finish_reason, answers.scored_text) == ("stop", "5")
    instance = Adder()
    calls = one(Scripted([CALL, END], [CALL, CALL, CALL, END], [6, CALL, END]), instance, bounds=bounds, max_tokens=300)
    assert instance.asked == [["add"], ["add"]]
    assert (calls.finish_reason, calls.scored_text) == ("max_calls", ""), "what calls has not answered"
    assert "limit of 2 calls" in str(calls.trajectory.messages[4]["content"])


def test_a_turn_that_only_fails_to_call_counts_as_well() -> None:
    """Else a model that writes broken calls is asked for ever."""
    found = one(Scripted(*[[UNREADABLE, END]] * 9), bounds=replace(BOUNDS, max_calls=3))
    assert found.finish_reason == "max_calls" and len(found.trajectory.turns) == 4


@pytest.mark.parametrize(("most", "turns"), [(0, 1), (1, 2), (None, 6)])
def test_turns_with_calls_are_limited(most: int | None, turns: int) -> None:
    found = one(Scripted(*[[CALL, END]] * 9), bounds=replace(BOUNDS, max_calling_turns=most))
    assert found.finish_reason == "max_calls" and len(found.trajectory.turns) == turns


@pytest.mark.parametrize(
    ("config", "turns"),
    [
        ({"env_name": "adder", "max_steps": 1}, 2),
        ({"env_configs": [{"env_name": "adder"}], "max_steps": 1}, 2),
        ([{"env_name": "adder", "max_steps": 1}, {"env_name": "other", "max_steps": 7}], 8),
        ({"env_name": "adder", "max_steps": None}, 6),
    ],
)
def test_a_row_may_allow_other_numbers_of_calls(config: object, turns: int) -> None:
    """In each of the forms that Open Instruct's rows have, and one more turn to answer."""
    asked = replace(prompt([10, 11], id=(0, 3)), columns={"env_config": config})
    assert len(one(Scripted(*[[CALL, END]] * 9), asked=asked).trajectory.turns) == turns


def test_an_environment_may_end_a_trajectory() -> None:
    instance = Adder([Observation(text="won", done=True, reward=1.0)])
    found = one(Scripted([5, CALL, END]), instance)
    assert (found.finish_reason, found.trajectory.ended_by) == ("stop", "done")
    assert found.tokens.tolist() == [5, CALL, END] and found.trajectory.turns[0].reward == 1.0


def test_metrics_of_the_beginning_count_until_a_step_gives_others() -> None:
    """A game that is left at once has a score of zero, and not none."""
    beginning = {"game/level": 3.0, "game/score": 0.0}
    assert one(Scripted([5, END]), Adder(metrics=beginning)).trajectory.metrics == beginning
    instance = Adder([Observation(text="2", metrics={"game/score": 2.0})], metrics=beginning)
    found = one(Scripted([CALL, END], [5, END]), instance)
    assert found.trajectory.metrics == {"game/level": 3.0, "game/score": 2.0}


@pytest.mark.parametrize("in_rounds", [True, False])
def test_a_trajectory_without_environment_has_no_score_and_one_turn(in_rounds: bool) -> None:
    """It needs a token all the same; the others of its group go on."""
    lost = Adder(lost=True)
    group = play(Scripted([CALL, END], [CALL, END], [CALL, END], [5, END]), None, lost, Adder(), in_rounds=in_rounds)
    assert [completion.finish_reason for completion in group.completions] == ["error", "error", "stop"]
    assert [len(completion.trajectory.turns) for completion in group.completions] == [1, 1, 2]
    assert lost.num_released == 1


def test_why_a_trajectory_has_no_score_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else tells a service that is down from a pool that is too small."""
    late = Adder(delay_s=0.02)
    engine = Scripted(*[[CALL, END]] * 3)
    play(engine, None, Adder(lost=True), late, bounds=replace(BOUNDS, trajectory_timeout_s=0.01))
    assert sorted(caplog.messages) == [
        "0/3/0 has no score: none became free",
        "0/3/1 has no score: its worker has ended",
        "0/3/2 has no score: it took longer than trajectory_timeout=0.01 s",
    ]


def test_of_many_losses_of_a_kind_the_first_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    play(Scripted(*[[5, END]] * 40), *[None] * 40)
    assert len(caplog.messages) == 10 and caplog.messages[9].endswith("(further ones of this kind are not logged)")


def test_a_turn_as_a_whole_may_be_the_action() -> None:
    """Text environments read no calls."""
    instance = Adder([Observation(text="no"), Observation(text="yes", done=True)], acts=True)
    found = one(Scripted([5, CALL, END], [6, 6, END]), instance)
    assert instance.asked == [["5"], ["66"]]
    assert found.tokens.tolist() == [5, CALL, END, BETWEEN, 8, 8, 6, 6, END]
    assert [message["role"] for message in found.trajectory.messages] == ["assistant", "user", "assistant"]
    assert found.trajectory.ended_by == "done" and found.scored_text == "66"
    most = one(Scripted(*[[5, END]] * 9), Adder(acts=True), bounds=replace(BOUNDS, max_calls=3))
    assert len(most.trajectory.turns) == 3 and most.finish_reason == "max_calls"


def preceding(found: Completion, prompt: Prompt) -> list[list[int]]:
    """What each turn follows, by the record."""
    branches = found.trajectory.branches or [branch(0, len(found.tokens), prompt.tokens)]
    return [
        [*part.prompt_tokens.tolist(), *found.tokens[part.start : turn.start].tolist()]
        for part in branches
        for turn in found.trajectory.turns
        if part.start <= turn.start < part.end
    ]


def test_a_turn_after_thinking_that_is_left_out_begins_a_branch() -> None:
    """Its tokens are trained after what they were sampled from, and those of earlier turns where these were sampled."""
    engine = Scripted([THOUGHT, THOUGHT, 5, END], [6, END], [THOUGHT, 6, END])
    answers = [Observation(text="no"), Observation(text="x"), Observation(text="", done=True)]
    found = one(engine, Adder(answers, acts=True), language=Forgetful())
    first = [THOUGHT, THOUGHT, 5, END]
    assert found.tokens.tolist() == [*first, BETWEEN, 8, 8, 6, END, BETWEEN, 8, THOUGHT, 6, END]
    stripped = [10, 11, 5, END, BETWEEN, 8, 8]
    branches = found.trajectory.branches
    assert [(part.prompt_tokens.tolist(), part.start, part.end) for part in branches] == [
        ([10, 11], 0, 4),
        (stripped, 7, 14),
    ]
    asked = [ask.tokens.tolist() for ask in engine.asks]
    assert asked == [[10, 11], stripped, [*stripped, 6, END, BETWEEN, 8]]
    assert asked == preceding(found, prompt([10, 11]))
    assert branches[1].prompt_tokens.dtype == np.int32


def test_a_trajectory_in_which_nothing_is_left_out_has_no_branches() -> None:
    """It trains as one that keeps its thinking."""
    turns = [[5, END], [6, END]]
    answers = [Observation(text="no"), Observation(text="", done=True)]
    kept, stripped = (
        one(Scripted(*turns), Adder(list(answers), acts=True), language=language)
        for language in (Digits(), Forgetful())
    )
    assert kept.trajectory.branches == stripped.trajectory.branches == ()
    assert kept.tokens.tolist() == stripped.tokens.tolist()
    calls = one(Scripted([THOUGHT, CALL, END], [5, END]), Adder(), language=Forgetful())
    assert calls.trajectory.branches == () and len(calls.trajectory.turns) == 2, "after tools nothing is left out"


def test_a_branch_has_the_room_that_its_context_leaves() -> None:
    """The engine refuses longer sequences; the limit of the completion counts all that was sampled and answered."""

    def play_it(language: Digits, max_tokens: int, max_model_length: int) -> tuple[list[int], str]:
        engine = Scripted([THOUGHT, THOUGHT, 5, END], [6, 6, 6, END])
        bounds = replace(BOUNDS, max_model_length=max_model_length)
        found = one(
            engine, Adder([Observation(text="no")], acts=True), bounds=bounds, max_tokens=max_tokens, language=language
        )
        return [ask.max_tokens for ask in engine.asks], found.finish_reason

    # The prompt has 2 tokens, the turn 4, the answer 3; the context without thoughts 7.
    assert play_it(Digits(), 100, 9) == ([7], "length")
    assert play_it(Forgetful(), 100, 9) == ([7, 2], "length")
    assert play_it(Forgetful(), 100, 8) == ([6, 1], "length")
    assert play_it(Forgetful(), 100, 7) == ([5], "length")
    assert play_it(Forgetful(), 8, 100) == ([8, 1], "length")
    assert play_it(Forgetful(), 7, 100) == ([7], "length")


def test_an_action_may_be_cut_but_a_call_may_not() -> None:
    """What was cut may have been half a call."""
    bounds = replace(BOUNDS, per_turn_max_tokens=2)
    acts = one(Scripted([5, 5, 5, END], [6, END]), Adder(acts=True), bounds=replace(bounds, max_calls=2))
    assert acts.tokens.tolist() == [5, 5, BETWEEN, 8, 8, 6, END]
    calls = one(Scripted([5, CALL, END]), bounds=bounds)
    assert (calls.tokens.tolist(), calls.finish_reason) == ([5, CALL], "length")


def test_an_action_that_used_up_the_whole_length_is_not_played() -> None:
    """It was cut by the end of the completion, not by the end of its turn."""
    instance = Adder(acts=True)
    found = one(Scripted([5, 5, 5, END]), instance, bounds=replace(BOUNDS, per_turn_max_tokens=3), max_tokens=3)
    assert found.finish_reason == "length" and not instance.asked


def test_what_stands_beside_a_call_is_no_answer() -> None:
    """Its tool's answer did not fit: the text before the call was not the last word."""
    found = one(Scripted([5, CALL, END]), Adder([Observation(text="x" * 99)]))
    assert (found.finish_reason, found.scored_text) == ("length", "")
    assert one(Scripted([5, CALL, CALL]), max_tokens=3).scored_text == ""
    assert one(Scripted([5, 6, 7, END]), max_tokens=3).scored_text == "567"


def test_one_trajectory_that_fails_ends_the_others_of_its_prompt() -> None:
    """The run ends with its error; no instance is kept, and nobody waits for the group any more."""

    class Broken(Adder):
        async def step(self, calls: Sequence[Call]) -> list[Answered]:
            raise RuntimeError("a defect of ours")

    broken, other = Broken(), Adder(delay_s=5.0)
    with pytest.raises(RuntimeError, match="a defect of ours"):
        play(Scripted([CALL, END], [CALL, END]), broken, other)
    assert (broken.num_released, other.num_released) == (1, 1)


@pytest.mark.parametrize(("how", "text"), [("final", "6"), ("assistant", "5\n6"), ("all", "521988961")])
def test_what_is_scored_leaves_out_what_tools_said(how: str, text: str) -> None:
    """Else the answer that a search has returned counts as the model's."""
    found = one(Scripted([5, CALL, END], [6, END]), bounds=replace(BOUNDS, scored_text=how))
    assert found.scored_text == text


def test_all_samples_of_a_prompt_begin_with_the_same_text() -> None:
    group = play(Scripted([5, END], [6, END]), Adder(opening="go"), Adder(opening="go"))
    assert group.prompt.tokens.tolist() == [10, 11, 7, 7]
    with pytest.raises(ValueError, match=r"prompt \(0, 3\) with different texts"):
        play(Scripted(), Adder(opening="go"), Adder(opening="stop"))
    with pytest.raises(ValueError, match=r"has 5 tokens, and there is room for sequences of 5"):
        play(Scripted(), Adder(opening="abc"), bounds=replace(BOUNDS, max_model_length=5))


def test_rounds_wait_for_the_slowest_tool_and_the_free_do_not() -> None:
    """What is sampled together depends on no clock."""

    async def batches(in_rounds: bool) -> list[list[tuple[int, int, int]]]:
        engine = Scripted(*[[CALL, END]] * 4, *[[5, END]] * 4)
        gathering = Gathering(engine.send, lambda ask: None, in_rounds=in_rounds)
        shelf = Shelf(Adder(delay_s=0.03), Adder(), Adder(), Adder(delay_s=0.01))
        episodes = Episodes(gathering, shelf, Digits(), BOUNDS)
        gathering.enter(2)
        tasks = [
            Task(
                prompt=prompt([10 + place], id=(0, place)),
                name=f"0/{place}",
                place=place,
                num_samples=2,
                max_tokens=50,
                row={},
                seed=5,
                opened=print,
            )
            for place in range(2)
        ]
        await asyncio.gather(*map(episodes.run, tasks))
        return engine.batches

    first = [(0, 0, 0), (1, 0, 0)]
    assert asyncio.run(batches(True)) == [first, [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]]
    assert asyncio.run(batches(False)) == [first, [(0, 1, 1), (1, 0, 1)], [(1, 1, 1)], [(0, 0, 1)]]


@pytest.mark.parametrize("seed", range(40))
def test_random_trajectories_keep_every_promise_in_rounds_and_free(seed: int) -> None:
    """And both give the same ones, where sampling depends on nothing but what precedes it."""
    rng = random.Random(seed)
    bounds = EpisodeBounds(
        max_model_length=rng.randint(20, 70),
        max_calls=rng.randint(1, 4),
        per_turn_max_tokens=rng.choice((None, 1, 4)),
        max_calling_turns=rng.choice((None, 2)),
    )
    max_tokens = rng.randint(1, 60)
    kinds = [rng.choice(("tools", "acts", "lost", "none")) for _ in range(8)]
    reasons: Counter[str] = Counter()
    found = []
    for in_rounds in (True, False):
        instances = [
            kind != "none"
            and Adder(
                [Observation(text="x" * ((i * 7 + seed) % 9), done=(i + seed) % 11 == 0) for i in range(9)],
                acts=kind == "acts",
                lost=kind == "lost",
                delay_s=rng.random() * 0.002,
            )
            for kind in kinds
        ]
        engine, language = Scripted(), Forgetful() if seed % 2 else Digits()
        group = play(
            *(engine, *(i or None for i in instances)),
            bounds=bounds,
            max_tokens=max_tokens,
            in_rounds=in_rounds,
            language=language,
        )
        for sample, completion in enumerate(group.completions):
            check(completion, prompt_length=2, bounds=bounds, max_tokens=max_tokens)
            asked = {ask.turn: ask.tokens.tolist() for ask in engine.asks if ask.sample == sample or not ask.turn}
            assert [asked[turn] for turn in sorted(asked)] == preceding(completion, group.prompt)
            reasons[completion.finish_reason] += 1
        assert all(instance.num_released == 1 for instance in instances if instance)
        found.append([(c.tokens.tolist(), c.loss_mask.tolist(), c.finish_reason) for c in group.completions])
    assert found[0] == found[1]
    assert reasons
