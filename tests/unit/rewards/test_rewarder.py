"""How verifiers, reward functions, weights and penalties meet in a run."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mgrpo.config.load import from_values
from mgrpo.rewards.rewarder import Scoring
from mgrpo.types import Completion, Prompt, RolloutGroup


def group(*texts: str, verifiers=("integer",), truths=("5",)) -> RolloutGroup:
    completions = tuple(
        Completion(
            tokens=np.arange(len(text) + 1, dtype=np.int32),
            logprobs=np.zeros(len(text) + 1, np.float32),
            policy_versions=np.zeros(len(text) + 1, np.int32),
            finish_reason="stop",
            text=text,
        )
        for text in texts
    )
    prompt = Prompt(
        id=(2, 7),
        tokens=np.zeros(1, np.int32),
        text="2+3=",
        verifiers=verifiers,
        ground_truths=truths,
        columns={"hint": "x"},
    )
    return RolloutGroup(prompt=prompt, completions=completions)


@pytest.fixture
def scoring():
    """Makes them, and ends their processes."""
    made = []

    def make(functions=(), **values):
        made.append(Scoring(from_values(values), functions))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_scores_are_weighed_and_measured_against_the_weighed_highest(scoring):
    """A weight that the scale forgets makes every answer to a row of two verifiers unsolved."""
    own = scoring(verifier_weights=["max_length=0.5"], verification_reward=10)
    scored = own.score([group("5", "6", verifiers=("integer", "max_length"), truths=("5", 2))])
    assert scored[0].rewards.tolist() == [15.0, 5.0]
    assert own.scale.shares(scored[0]).tolist() == [1.0, 1 / 3]


def test_functions_named_by_words_score_as_the_callers_do(scoring, tmp_path):
    """The command line and the Python door are one thing."""
    (tmp_path / "reward.py").write_text(
        "def length(completions, hint, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    named = scoring([f"{tmp_path}/reward.py:length"])
    given = scoring([lambda completions, **kwargs: [float(len(text)) for text in completions]])
    groups = [group("5", "66")]
    assert named.score(groups)[0].rewards.tolist() == given.score(groups)[0].rewards.tolist() == [1.0, 2.0]
    assert named.scale is None and list(named.weights) == ["length"]


def test_a_function_sees_the_state_of_the_run_and_what_it_logs_is_kept(scoring):
    """Curricula depend on the step; a logged number that is lost is a debugging session."""
    seen = []

    def reward(completions, trainer_state, log_metric, log_extra, **kwargs):
        seen.append(trainer_state)
        log_metric("answers", len(completions))
        log_extra("first", [text[:1] for text in completions])
        return [None, 1.0]

    own = scoring([reward], num_mini_batches=2)
    own.done = 3
    (scored,) = own.score([group("5", "66")])
    assert (seen[0].global_step, seen[0].epoch) == (6, 2.0)
    assert math.isnan(scored.rewards[0]) and scored.rewards[1] == 1.0
    assert [score.extras for score in scored.scores] == [{"first": "5"}, {"first": "6"}]
    assert own.metrics() == {"custom/answers": 2.0} and own.metrics() == {}


def test_length_costs_functions_and_verifiers_alike(scoring):
    """The soft punishment is added after whatever decided."""
    values = {"overlong_cache_length": 2, "response_length": 4, "max_prompt_token_length": 4, "pack_length": 8}
    for own in (
        scoring(verification_reward=1, **values),
        scoring([lambda completions, **kwargs: [1.0, 1.0]], **values),
    ):
        (scored,) = own.score([group("5", "5  ")])
        assert scored.rewards.tolist() == [1.0, 0.0]
    assert list(own.weights)[-1] == "overlong"


def test_a_verifier_without_a_score_leaves_the_completion_without(scoring):
    """Scored 0 it would enter the group's baseline as a wrong answer."""
    (scored,) = scoring().score([group("5", truths=("five",))])
    assert math.isnan(scored.rewards[0])
    assert dataclasses.asdict(scored.scores[0])["extras"] == {}
