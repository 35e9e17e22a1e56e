"""Rewards on hand-worked cases, one for every branch of the composition."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.compose import has_r1_format, score_groups
from mgrpo.rewards.verifier import Item
from mgrpo.types import Completion, RolloutGroup, Score
from tests import builders

FORMATTED = "thoughts</think>\n<answer>5</answer>"
PLAIN = "5"


class FakePool:
    """Scores what the completion's ground truth says, so that cases are written by hand."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def verify_many(self, items: list[Item]) -> list[float]:
        self.items += items
        return [float(item.answer.ground_truth) for item in items]


def _group(
    *texts: str, verifiers: tuple[str, ...] = ("math",), scores: tuple[object, ...] = (1.0,), finish: str = "stop"
) -> RolloutGroup:
    of = builders.prompt(id=(0, 3), text="2+3=", verifiers=verifiers, ground_truths=scores)
    return builders.rollout_group([_completion(text, finish) for text in texts], of)


def _completion(text: str, finish: str) -> Completion:
    return builders.completion([7, 8], finish_reason=finish, text=text)


def _one(config: Reward, text: str, **group: object) -> Score:
    (scored,) = score_groups([_group(text, **group)], FakePool(), config)
    return scored.scores[0]


OFF = Reward(verification_reward=10.0, r1_style_format_reward=1.0)
GATE = replace(OFF, apply_r1_style_format_reward=True)
ADD = replace(GATE, additive_format_reward=True)
ONLY_FORMAT = replace(GATE, apply_verifiable_reward=False)
NOTHING = replace(OFF, apply_verifiable_reward=False)


@pytest.mark.parametrize(
    ("config", "text", "verifier_score", "reward"),
    [
        (OFF, PLAIN, 1.0, 10.0),
        (OFF, PLAIN, 0.0, 0.0),
        (OFF, PLAIN, 0.25, 2.5),
        (GATE, FORMATTED, 1.0, 10.0),
        (GATE, FORMATTED, 0.0, 0.0),
        (GATE, PLAIN, 1.0, 0.0),
        (ADD, FORMATTED, 1.0, 11.0),
        (ADD, FORMATTED, 0.0, 1.0),
        (ADD, PLAIN, 1.0, 10.0),
        (ADD, PLAIN, 0.0, 0.0),
        (ONLY_FORMAT, FORMATTED, 0.0, 1.0),
        (ONLY_FORMAT, PLAIN, 1.0, 0.0),
        (NOTHING, FORMATTED, 1.0, 0.0),
        # The gate asks for the format; what the format is worth must not matter.
        (replace(GATE, r1_style_format_reward=0.5), FORMATTED, 1.0, 10.0),
        (replace(GATE, r1_style_format_reward=2.0), PLAIN, 1.0, 0.0),
        (replace(ADD, r1_style_format_reward=0.5), FORMATTED, 1.0, 10.5),
        (replace(ONLY_FORMAT, r1_style_format_reward=0.5), FORMATTED, 1.0, 0.5),
        (replace(OFF, verification_reward=0.5), PLAIN, 1.0, 0.5),
    ],
)
def test_each_case_of_the_composition(config: Reward, text: str, verifier_score: float, reward: float) -> None:
    """A wrong branch trains for the wrong thing without any error."""
    assert _one(config, text, scores=(verifier_score,)).reward == reward


@pytest.mark.parametrize("config", [OFF, GATE, ADD, ONLY_FORMAT, NOTHING])
def test_the_stop_rule_overwrites_everything(config: Reward) -> None:
    """Truncated completions must get the penalty even when their format or answer was right, or could not be scored."""
    penal = replace(config, non_stop_penalty=True, non_stop_penalty_value=-10.0)
    for score in (1.0, math.nan):
        assert _one(penal, FORMATTED, finish="length", scores=(score,)).reward == -10.0
        assert _one(config, FORMATTED, finish="length").reward == _one(config, FORMATTED, finish="stop").reward
    assert _one(penal, FORMATTED, finish="stop").reward == _one(config, FORMATTED, finish="stop").reward


def test_several_verifiers_are_summed() -> None:
    """A row with two verifiers scored by one of them would train half of the task."""
    score = _one(OFF, PLAIN, verifiers=("math", "GSM8K"), scores=(1.0, 0.5))
    assert score.reward == 15.0
    assert score.parts == {"math": 1.0, "gsm8k": 0.5, "correct": 0.0}


@pytest.mark.parametrize("config", [OFF, GATE, ADD])
def test_one_verifier_without_a_score_leaves_the_completion_without(config: Reward) -> None:
    """Counting it as 0 would call an unchecked answer wrong and shift the group's baseline."""
    score = _one(config, FORMATTED, verifiers=("math", "integer"), scores=(1.0, math.nan))
    assert math.isnan(score.reward)
    assert score.parts["math"] == 1.0 and math.isnan(score.parts["integer"]) and math.isnan(score.parts["correct"])


def test_parts_name_the_ingredients() -> None:
    """Metrics are made of them."""
    assert _one(ADD, FORMATTED, scores=(0.0,)).parts == {"math": 0.0, "correct": 0.0, "format": 1.0}
    assert _one(ONLY_FORMAT, PLAIN).parts == {"format": 0.0}
    assert _one(OFF, PLAIN).parts == {"math": 1.0, "correct": 1.0}


def test_scores_stay_beside_their_completions() -> None:
    """A shift by one between groups of different sizes and numbers of verifiers would reward strangers."""
    groups = [
        _group("a", "b", scores=(0.25,)),
        _group("c", verifiers=("math", "integer"), scores=(0.5, 0.25)),
        _group("d", verifiers=(), scores=()),
        _group("e", "f", "g", scores=(1.0,)),
    ]
    pool = FakePool()
    scored = score_groups(groups, pool, OFF)
    assert [list(group.rewards) for group in scored] == [[2.5, 2.5], [7.5], [0.0], [10.0] * 3]
    assert [item.answer.completion for item in pool.items] == ["a", "b", "c", "c", "e", "f", "g"]
    assert [group.group for group in scored] == groups
    assert score_groups(groups, pool, NOTHING)[0].scores[0].parts == {} and len(pool.items) == 7


R1_TEXTS = [
    FORMATTED,
    "</think><answer></answer>",
    "</think> \n\t <answer>x\ny</answer> tail",
    "</think> no <answer>x</answer>",
    "<answer>x</answer></think>",
    "</think><answer>x",
    "</think> x </think><answer>x</answer>",
    "</answer></think><answer>",
    "<think>a</think>",
    "",
]


@pytest.mark.parametrize("text", R1_TEXTS)
def test_the_format_is_the_one_of_open_instruct(text: str) -> None:
    """Its pattern is the oracle; ours only avoids its quadratic time."""
    oracle = re.compile(r".*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    assert has_r1_format(text) == (oracle.match(text) is not None)


def test_the_format_check_is_linear_in_hostile_text() -> None:
    """It runs on rank 0, where nothing stops it."""
    began = time.process_time()
    assert not has_r1_format("</think><answer>" * 20_000)
    assert time.process_time() - began < 0.5


def test_importing_the_worker_loads_nothing_heavy() -> None:
    """Its start overlaps with the engines' only if it is short, and a torch in every worker costs its memory."""
    code = (
        "import sys, mgrpo.rewards.verifier_worker, mgrpo.rewards.worker_pool, mgrpo.data;"
        "print([name for name in ('torch', 'numpy', 'ray', 'math_verify', 'sympy', 'transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
