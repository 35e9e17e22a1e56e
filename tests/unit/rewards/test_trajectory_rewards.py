"""Rewards of completions of several turns: what is scored, and how it meets what the environment gave."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import pytest

from mgrpo.config.schema import Reward
from mgrpo.moving import from_values
from mgrpo.rewards.builtin_functions import think_format_reward
from mgrpo.rewards.compose import score_groups
from mgrpo.rewards.reward_functions import TrainerState, missing_arguments, score_with_functions
from mgrpo.rewards.rewarder import Rewarder
from mgrpo.rewards.trajectory_rewards import TurnRewards
from mgrpo.rewards.verifier import Item
from mgrpo.types import AgentRecord, Completion, RewardContext, RolloutGroup, Score
from tests import builders
from tests.builders import turn

NAN = float("nan")
CONFIG = Reward(verification_reward=10.0, r1_style_format_reward=1.0)
CONTEXT = RewardContext(step=0, seed=1, max_tokens=100)


class FakePool:
    """Scores what the ground truth says."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def verify_many(self, items: list[Item]) -> list[float]:
        self.items += items
        return [float(item.answer.ground_truth) for item in items]


def of_turns(*rewards: float, finish: str = "stop", text: str = "", **record: object) -> Completion:
    """A trajectory whose turns have these rewards."""
    turns = tuple(turn(reward=reward) for reward in rewards)
    values = {"turns": turns, "scored_text": "5"} | record
    return builders.completion(
        [7, 8, 9], finish_reason=finish, text=text, trajectory=builders.trajectory("101", **values)
    )


def group(*completions: Completion, score: float = 1.0, **fields: object) -> RolloutGroup:
    values = {"verifiers": ("math",), "ground_truths": (score,)} | fields
    return builders.rollout_group(completions, builders.prompt(**values))


def scored(completion: Completion, config: Reward = CONFIG, *, score: float = 1.0, **turns: object) -> Score:
    (found,) = score_groups([group(completion, score=score)], FakePool(), config, TurnRewards(**turns))
    return found.scores[0]


@pytest.mark.parametrize(
    ("aggregator", "rewards", "whole", "score", "reward"),
    [
        ("last", (), None, 1.0, 10.0),
        ("last", (0.0, 0.0), None, 1.0, 10.0),
        ("last", (1.0, 2.0, 4.0), None, 0.5, 9.0),
        ("sum", (1.0, 2.0, 4.0), None, 0.5, 12.0),
        ("last", (1.0, 2.0, 4.0), 0.25, 0.5, 5.25),
        ("sum", (1.0, 2.0, 4.0), 0.25, 0.5, 8.25),
        ("sum", (), 0.25, 0.0, 0.25),
        ("last", (1.0,), 0.0, 0.0, 0.0),
        ("sum", (1.0, 2.0), None, NAN, NAN),
    ],
)
def test_what_is_given_for_the_whole_is_added_to_the_last_turn(aggregator, rewards, whole, score, reward) -> None:
    """A step's reward that is lost, or counted twice, trains another task than the environment's author wrote."""
    found = scored(of_turns(*rewards, reward=whole), score=score, aggregator=aggregator).reward
    assert found == reward or (math.isnan(found) and math.isnan(reward))


def test_the_format_gates_and_adds_as_for_a_single_turn() -> None:
    """The rules are those of a single turn, on the verifier's score plus what the environment gave."""
    gate = dataclasses.replace(CONFIG, apply_r1_style_format_reward=True)
    add = dataclasses.replace(gate, additive_format_reward=True)
    formatted = of_turns(2.0, sampled_text="</think><answer>5</answer>")
    assert scored(formatted, gate).reward == 12.0 and scored(of_turns(2.0), gate).reward == 0.0
    assert scored(formatted, add).reward == 13.0 and scored(of_turns(2.0), add).reward == 12.0
    off = dataclasses.replace(CONFIG, apply_verifiable_reward=False)
    assert scored(of_turns(2.0), off).reward == 2.0


def test_the_stop_rule_overwrites_what_the_environment_gave() -> None:
    """A trajectory that is cut off would keep what it collected on the way."""
    penal = dataclasses.replace(CONFIG, non_stop_penalty=True, non_stop_penalty_value=-1.0)
    assert scored(of_turns(1.0, 5.0, finish="length"), penal, aggregator="sum").reward == -1.0
    assert scored(of_turns(1.0, 5.0, finish="stop"), penal, aggregator="sum").reward == 16.0


def test_a_lost_environment_is_no_score_and_is_not_verified() -> None:
    """Calling it wrong would blame the model for a worker that died; an error rate would blame the verifier."""
    penal = dataclasses.replace(CONFIG, non_stop_penalty=True)
    pool = FakePool()
    lost = of_turns(1.0, finish="error", ended_by="error", reward=1.0)
    (found,) = score_groups([group(lost, of_turns())], pool, penal)
    assert math.isnan(found.scores[0].reward) and list(found.scores[0].parts) == ["correct"]
    assert found.scores[1].reward == 10.0 and len(pool.items) == 1


def test_verifiers_see_the_scored_text_and_the_length_of_what_was_sampled() -> None:
    """The answer that a search returned would be scored as the model's."""
    pool = FakePool()
    score_groups(
        [group(of_turns(text="call 42 result 5 answer 5"), builders.completion(4, text="plain"))], pool, CONFIG
    )
    assert [(item.answer.completion, item.answer.num_tokens) for item in pool.items] == [("5", 2), ("plain", 4)]


@pytest.mark.parametrize(
    ("sampled", "reward"), [("print()\nfive", 0.0), ("a</think>\n<answer>5</answer>", 10.0), ("a</think>\n5", 0.0)]
)
def test_the_format_is_the_models_own(sampled: str, reward: float) -> None:
    """What a tool prints would earn it."""
    completion = of_turns(text=f"{sampled} </think><answer></answer>", sampled_text=sampled, scored_text="</think>")
    config = dataclasses.replace(CONFIG, apply_r1_style_format_reward=True)
    score = scored(completion, config)
    assert (score.reward, score.parts["format"]) == (reward, reward / 10)


GOOD = turn(calls=("search",), failed=(False,))


@pytest.mark.parametrize(
    ("turns", "is_good"),
    [
        ((GOOD, turn()), True),
        ((turn(), GOOD), True),
        ((turn(),), False),
        ((), False),
        ((GOOD, turn(calls=("search", "python"), failed=(False, True))), False),
        ((GOOD, turn(num_unreadable=1)), False),
        ((GOOD, turn(num_unknown=1)), False),
    ],
)
def test_only_good_outputs_asks_for_calls_that_were_all_answered(turns, is_good) -> None:
    """A right answer without a call, or after a failed one, would be rewarded although the tool did nothing for it."""
    completion = of_turns(turns=(*turns, turn(reward=2.0)))
    assert scored(completion, only_good_outputs=True).reward == (12.0 if is_good else 2.0)
    assert scored(completion, only_good_outputs=True, score=NAN).reward == pytest.approx(
        NAN if is_good else 2.0, nan_ok=True
    )
    plain = builders.completion(2, text="5")
    assert scored(plain, only_good_outputs=True).reward == 0.0 and scored(plain).reward == 10.0


MESSAGES = (
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
    {"role": "tool", "name": "f", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
)


def seen_by_a_function(*completions: Completion, **fields: object) -> dict[str, object]:
    seen: dict[str, object] = {}

    def spy(**kwargs: object) -> list[float]:
        seen.update(kwargs)
        return [1.0] * len(completions)

    score_with_functions([group(*completions, **fields)], [spy])
    return seen


def test_functions_get_the_messages_of_a_trajectory() -> None:
    """TRL's functions count the calls in them; a row of text has no messages, and gets what verifiers get."""
    trajectory = of_turns(messages=MESSAGES, text="all of it")
    asked = ({"role": "user", "content": "2+3?"},)
    seen = seen_by_a_function(trajectory, builders.completion(2, text="plain"), source=asked)
    assert seen["completions"] == [list(MESSAGES), [{"role": "assistant", "content": "plain"}]]
    seen["completions"][0][0]["tool_calls"][0]["type"] = "changed"
    assert MESSAGES[0]["tool_calls"][0]["type"] == "function"
    assert seen_by_a_function(trajectory, source="2+3?")["completions"] == ["5"]


def test_functions_get_what_became_of_the_environment() -> None:
    """TRL's functions read the score of a game from it; another function may not change it."""
    states = {"score": 3, "moves": [1, 2]}
    seen = seen_by_a_function(of_turns(snapshot=states), builders.completion(2))
    environment, other = seen["environments"]
    assert environment.score == 3 and environment.moves == [1, 2] and other is None
    environment.moves.append(3)
    assert states["moves"] == [1, 2] and not hasattr(environment, "board")
    with pytest.raises(AttributeError, match="no attribute board that can leave its process; there are score, moves"):
        _ = environment.board
    assert "environments" not in seen_by_a_function(builders.completion(2))


def test_functions_get_the_whole_tree_of_an_agent() -> None:
    """A function that judges how an agent worked needs to know what was said before what, and how it ended."""
    said = ({"role": "user", "content": "again"}, {"role": "assistant", "content": "6"})
    second = dataclasses.replace(builders.branch(2, 3), parent=0, after=0, messages=said)
    agent = AgentRecord(ended="crashed", status=2, output="no", seconds=1.5, counts={"retries": 1.0})
    tree = of_turns(
        turns=(turn(0, 1, calls=("look", ""), failed=(False, True), seconds=(0.5, 0.0), num_unreadable=1), turn(2, 3)),
        branches=(dataclasses.replace(builders.branch(0, 1), messages=MESSAGES), second),
        reward=0.5,
        metrics={"agent/tests": 3.0},
        agent=agent,
    )
    seen = seen_by_a_function(tree, builders.completion(2))
    called = {"calls": ["look", ""], "failed": [False, True], "seconds": [0.5, 0.0], "unreadable_calls": 1}
    neutral = {"num_tokens": 1, "unknown_calls": 0, "reward": 0.0}
    found, other = seen["trajectories"]
    assert other is None
    assert found == {
        "turns": [
            {"branch": 0, **neutral, **called},
            {"branch": 1, **neutral, "calls": [], "failed": [], "seconds": [], "unreadable_calls": 0},
        ],
        "branches": [
            {"parent": None, "after": None, "messages": list(MESSAGES)},
            {"parent": 0, "after": 0, "messages": list(said)},
        ],
        "ended_by": "stop",
        "text": "5",
        "reward": 0.5,
        "metrics": {"agent/tests": 3.0},
        "agent": {"ended": "crashed", "status": 2, "output": "no", "seconds": 1.5, "counts": {"retries": 1.0}},
    }
    assert json.loads(json.dumps(found)) == found
    found["branches"][0]["messages"][0]["tool_calls"][0]["type"] = "changed"
    found["agent"]["counts"]["retries"] = 5.0
    assert MESSAGES[0]["tool_calls"][0]["type"] == "function" and agent.counts == {"retries": 1.0}
    assert "trajectories" not in seen_by_a_function(builders.completion(2))


def test_a_trajectory_of_one_line_is_one_branch_to_functions() -> None:
    """They need no case of their own for what has no tree."""
    (found,) = seen_by_a_function(of_turns(0.5, messages=MESSAGES))["trajectories"]
    assert found["branches"] == [{"parent": None, "after": None, "messages": list(MESSAGES)}]
    assert [one["branch"] for one in found["turns"]] == [0] and found["agent"] is None


def test_a_group_with_agents_that_have_failed_keeps_the_others_scores() -> None:
    """Functions are asked about those that have ended; the others leave the group's statistics."""

    def calls(trajectories: list) -> list[float]:
        return [float(len(one["turns"])) for one in trajectories]

    silent = of_turns(ended_by="error", agent=AgentRecord(ended="silent", status=0, output="", seconds=1.0))
    (found,) = score_with_functions([group(of_turns(0.0, 0.0), silent, of_turns(0.0))], [calls]).groups
    assert [score.reward for score in found.scores] == pytest.approx([2.0, NAN, 1.0], nan_ok=True)


def test_functions_do_not_see_a_completion_whose_environment_was_lost() -> None:
    """It has no attributes to read: the function would fail, and with it the run. The others keep theirs."""

    def score(environments: list, level: list, log_extra: Callable) -> list[float]:
        log_extra("seen", level)
        return [environment.counter + step / 10 for environment, step in zip(environments, level, strict=True)]

    def count(completion_ids: list, trainer_state: TrainerState) -> list[float]:
        return [trainer_state.global_step] * len(completion_ids)

    lost = of_turns(ended_by="error")
    first = group(of_turns(snapshot={"counter": 1}), lost, columns={"level": 1})
    second = group(lost, of_turns(snapshot={"counter": 2}), columns={"level": 2})
    batch = score_with_functions([first, group(lost), second], [score, count], state=TrainerState(global_step=3))
    scores = [score for found in batch.groups for score in found.scores]
    assert [score.reward for score in scores] == pytest.approx([4.1, NAN, NAN, NAN, 5.2], nan_ok=True)
    assert [score.parts["count"] for score in scores] == pytest.approx([3, NAN, NAN, NAN, 3], nan_ok=True)
    assert [dict(score.extras) for score in scores] == [{"seen": 1}, {}, {}, {}, {"seen": 2}]


def test_functions_are_not_called_when_every_environment_was_lost() -> None:
    """Not every function knows what to do with nothing."""

    def never(**_: object) -> list[float]:
        raise AssertionError

    lost = of_turns(ended_by="error")
    (found,) = score_with_functions([group(lost, lost)], [never]).groups
    assert all(math.isnan(score.reward) and math.isnan(score.parts["never"]) for score in found.scores)
    assert len(found.scores) == 2


def test_a_function_that_asks_for_environments_is_refused_without_any() -> None:
    """It would fail in the first step, after hours of waiting for machines."""

    def reward(completions: list, environments: list, trajectories: list) -> list[float]:
        return []

    assert "asks for environments, trajectories" in missing_arguments([reward], [])[0]
    assert missing_arguments([reward], [], has_environments=True) == []


@pytest.mark.parametrize(
    ("messages", "value"),
    [
        (MESSAGES[:2], 0.0),
        (({"role": "assistant", "content": "<think>a</think>b", "tool_calls": []},), 1.0),
        (({"role": "assistant", "content": "<think>a</think>b", "tool_calls": [{}]},), 0.0),
        ((*MESSAGES, {"role": "assistant", "content": "<think>a</think>b"}), 1.0),
        (({"role": "assistant", "content": None},), 0.0),
        ((), 0.0),
    ],
)
def test_builtin_functions_read_the_answer_and_not_a_call(messages, value) -> None:
    """The first message of a trajectory is a call; what a tool returned is not the model's answer."""
    assert think_format_reward([list(messages)]) == [value]


def test_functions_and_turns_make_one_reward() -> None:
    """The same sum as with verifiers, weights included; who lost its environment has no value under any function."""

    def length(completions: list[str], **_: object) -> list[float]:
        return [float(len(text)) for text in completions]

    lost = of_turns(1.0, ended_by="error")
    own = Rewarder(from_values({"reward_weights": [2.0]}), [length], turns=TurnRewards(aggregator="sum"))
    try:
        (found,) = own.score([group(of_turns(1.0, 4.0), lost, builders.completion(2, text="123"))], CONTEXT).groups
    finally:
        own.close()
    assert found.rewards.tolist() == pytest.approx([7.0, NAN, 6.0], nan_ok=True)
    assert [score.parts["length"] for score in found.scores] == pytest.approx([1.0, NAN, 3.0], nan_ok=True)


def test_verifiers_of_a_run_add_to_the_turns() -> None:
    """The setting would be read and do nothing."""
    row = {"verifiers": ("integer",), "ground_truths": ("5",)}
    for aggregator, reward in (("last", 14.0), ("sum", 15.0)):
        own = Rewarder(from_values({"verification_reward": 10}), turns=TurnRewards(aggregator=aggregator))
        try:
            (found,) = own.score([group(of_turns(1.0, 4.0), **row)], CONTEXT).groups
        finally:
            own.close()
        assert found.rewards.tolist() == [reward]


@pytest.mark.parametrize(
    ("rewards", "whole", "score", "aggregator"),
    [
        ([1e300], None, 0.0, "last"),
        ([1.0], -1.7e308, 0.0, "last"),
        ([3e38, 3e38], None, 0.0, "sum"),
        ([1e308, 1e308], None, 0.0, "sum"),
        ([1.0], None, 3e38, "last"),
    ],
)
def test_a_reward_beyond_float32_is_no_score(rewards, whole, score, aggregator, caplog) -> None:
    """An agent or an environment that gives 1e300 would make the advantages of its group infinite or nothing."""
    assert math.isnan(scored(of_turns(*rewards, reward=whole), score=score, aggregator=aggregator).reward)
    assert "beyond 3.40282e+38 (float32)" in caplog.text
    assert scored(of_turns(3e38), score=0.0).reward == 3e38
