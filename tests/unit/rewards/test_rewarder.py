"""How verifiers, reward functions, weights and penalties meet in a run."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rewards.rewarder import Rewarder, logged_metrics
from mgrpo.types import RewardContext, RolloutGroup
from tests import builders

TRAINING = RewardContext(step=3, seed=1, max_tokens=8)


def group(*texts: str, verifiers=("integer",), truths=("5",)) -> RolloutGroup:
    of = builders.prompt([0], id=(2, 7), text="2+3=", verifiers=verifiers, ground_truths=truths, columns={"hint": "x"})
    return builders.rollout_group([builders.completion(len(text) + 1, text=text) for text in texts], of)


@pytest.fixture
def rewarder():
    """Makes them, and ends their processes."""
    made = []

    def make(functions=(), verifiers=(), **values):
        made.append(Rewarder(from_values(values), functions, verifiers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_scores_are_weighed_and_measured_against_the_weighed_highest(rewarder):
    """A weight that the scale forgets makes every answer to a row of two verifiers unsolved."""
    own = rewarder(verifier_weights=["max_length=0.5"], verification_reward=10)
    scored = own.score([group("5", "6", verifiers=("integer", "max_length"), truths=("5", 2))], TRAINING).groups
    assert scored[0].rewards.tolist() == [15.0, 5.0]
    assert own.scale.shares(scored[0]).tolist() == [1.0, 1 / 3]


@pytest.mark.parametrize(("verifiers", "highest"), [(["passthrough"], 0.0), (["passthrough", "integer"], 10.0)])
def test_rewards_of_environments_are_not_measured_by_a_verifier(rewarder, verifiers, highest):
    """A run whose program gives at most 1 said "reward 0.156 of 10"."""
    own = rewarder(verifiers=verifiers, verification_reward=10)
    assert own.scale.max_possible_score == highest
    scored = own.score([group("5", verifiers=("passthrough",))], TRAINING).groups
    assert own.scale.highest(scored[0]) == 0.0


def test_functions_named_by_words_score_as_the_callers_do(rewarder, tmp_path):
    """The command line and the Python door are one thing."""
    (tmp_path / "reward.py").write_text(
        "def length(completions, hint, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    named = rewarder([f"{tmp_path}/reward.py:length"])
    given = rewarder([lambda completions, **kwargs: [float(len(text)) for text in completions]])
    groups = [group("5", "66")]
    scored = [one.score(groups, TRAINING).groups[0] for one in (named, given)]
    assert scored[0].rewards.tolist() == scored[1].rewards.tolist() == [1.0, 2.0]
    assert named.scale is None and list(named.weights) == ["length"]


def test_a_function_sees_the_state_of_the_run_and_what_it_logs_is_kept(rewarder):
    """Curricula depend on the step; a logged number that is lost is a debugging session."""
    seen = []

    def reward(completions, trainer_state, log_metric, log_extra, **kwargs):
        seen.append(trainer_state)
        log_metric("answers", len(completions))
        log_extra("first", [text[:1] for text in completions])
        return [None, 1.0]

    own = rewarder([reward], num_mini_batches=2)
    batch = own.score([group("5", "66")], TRAINING)
    (scored,) = batch.groups
    assert (seen[0].global_step, seen[0].epoch) == (6, 2.0)
    assert math.isnan(scored.rewards[0]) and scored.rewards[1] == 1.0
    assert [score.extras for score in scored.scores] == [{"first": "5"}, {"first": "6"}]
    assert batch.logged == {"answers": [2.0]}
    assert logged_metrics(batch.logged) == {"custom/answers": 2.0}
    assert logged_metrics({"answers": [2.0, 3.0]}, "eval/") == {"eval/custom/answers": 2.5}


def test_length_costs_functions_and_verifiers_alike(rewarder):
    """The soft punishment is added after whatever decided."""
    values = {"overlong_cache_length": 2, "response_length": 4, "max_prompt_token_length": 4, "pack_length": 8}
    for own in (
        rewarder(verification_reward=1, **values),
        rewarder([lambda completions, **kwargs: [1.0, 1.0]], **values),
    ):
        for max_tokens, expected in ((4, [1.0, 0.0]), (5, [1.0, 0.5])):
            context = RewardContext(step=0, seed=1, max_tokens=max_tokens)
            (scored,) = own.score([group("5", "5  ")], context).groups
            assert scored.rewards.tolist() == expected
    assert list(own.weights)[-1] == "overlong"


def test_a_verifier_without_a_score_leaves_the_completion_without(rewarder):
    """Scored 0 it would enter the group's baseline as a wrong answer."""
    (scored,) = rewarder().score([group("5", truths=("five",))], TRAINING).groups
    assert math.isnan(scored.rewards[0])
    assert dataclasses.asdict(scored.scores[0])["extras"] == {}


def test_what_a_function_draws_depends_on_the_seed_alone(rewarder):
    """A resumed run would train on other rewards, and every evaluation would change the training after it."""

    def draws(completions, rng, **kwargs):
        return [rng.random() + random.random() + np.random.rand() for _ in completions]

    def draws_later(completions, rng, **kwargs):
        yield from draws(completions, rng)

    async def draws_async(completions, rng, **kwargs):
        return draws(completions, rng)

    own = rewarder([draws, draws_later, draws_async])

    def parts(seed):
        (scored,) = own.score([group("5", "66")], RewardContext(step=0, seed=seed, max_tokens=8)).groups
        return [tuple(score.parts.values()) for score in scored.scores]

    seed = 2**61 + 1
    first, other, again = parts(seed), parts(1), parts(seed)
    assert first == again
    assert len({value for values in (first, other) for row in values for value in row}) == 12


def test_what_is_logged_stays_beside_a_length_penalty(rewarder):
    """The table of samples would lose its columns with overlong_cache_length."""

    def logs(completions, log_extra, **kwargs):
        log_extra("text", completions)
        return [1.0] * len(completions)

    own = rewarder([logs], overlong_cache_length=2, response_length=4, max_prompt_token_length=4, pack_length=8)
    (scored,) = own.score([group("5", "66")], TRAINING).groups
    assert [score.extras for score in scored.scores] == [{"text": "5"}, {"text": "66"}]


def test_functions_whose_values_have_another_name_are_noted_at_the_start(rewarder, caplog):
    """A metric of one's own function would be looked for in vain."""

    def format(completions, **kwargs):
        return [1.0] * len(completions)

    def mine(completions, **kwargs):
        return [1.0] * len(completions)

    rewarder([format, mine]).start()
    (note,) = [record.getMessage() for record in caplog.records]
    assert note.startswith("reward function format is called format_2 in metrics")
    caplog.clear()
    rewarder([mine, mine]).start()
    (note,) = [record.getMessage() for record in caplog.records]
    assert note.startswith("reward function mine is called mine_2 in metrics") and "another one" in note
