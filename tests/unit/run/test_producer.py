"""What is sampled, kept, sampled in place of others, and sampled again after a resume."""

from __future__ import annotations

import pytest

from mgrpo.data.sampler import Sampler
from mgrpo.rollout.collect import EVALUATION, sampler_seed
from mgrpo.rollout.engine import EngineError
from tests.unit.run.producing import evaluator, producer

EQUAL, MIXED = (1.0, 1.0), (0.0, 1.0)


def odd_ones_are_equal(index: int) -> tuple[float, ...]:
    return EQUAL if index % 2 else MIXED


def indices(groups) -> list[int]:
    return [scored.group.prompt.id[1] for scored in groups]


def test_without_active_sampling_a_dropped_group_makes_the_batch_smaller() -> None:
    """And the next step starts with fresh prompts."""
    own = producer(odd_ones_are_equal)
    rollouts = own.collect(1)
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2], [1, 3])
    assert indices(own.collect(2).groups) == [4, 6]


def test_active_sampling_fills_the_batch() -> None:
    """The gradient's noise should not grow as the policy solves more prompts."""
    rollouts = producer(odd_ones_are_equal, active_sampling=True).collect(1)
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2, 4, 6], [1, 3, 5])


def test_active_sampling_gives_up_after_its_rounds() -> None:
    """A policy that solves everything would otherwise sample for ever."""
    rollouts = producer(lambda index: EQUAL, active_sampling=True, active_sampling_max_rounds=3).collect(1)
    assert rollouts.groups == [] and indices(rollouts.dropped) == list(range(12))


def test_solved_prompts_are_counted_in_their_step_and_not_sampled_again() -> None:
    """Exclusion saves what a solved prompt would cost in every epoch."""
    own = producer(odd_ones_are_equal, no_resampling_pass_rate=0.9)
    counts = [own.collect(step).num_excluded for step in range(1, 6)]
    assert counts == [2, 2, 2, 2, 2]
    assert indices(own.collect(6).groups) == [0, 2, 4, 6]


def test_when_every_prompt_is_solved_nothing_is_sampled() -> None:
    """The trainer ends the run then."""
    own = producer(lambda index: EQUAL, no_resampling_pass_rate=0.9)
    for step in range(1, 6):
        own.collect(step)
    rollouts = own.collect(6)
    assert rollouts.groups == rollouts.dropped == []


def test_every_round_of_every_step_draws_rewards_from_a_seed_of_its_own() -> None:
    """Reward functions that draw random numbers would draw the same ones for every step; a resumed run repeats them."""
    first, again = (producer(odd_ones_are_equal, active_sampling=True) for _ in range(2))
    for own in (first, again):
        for step in (1, 2):
            own.collect(step)
    contexts = first.rewarder.contexts
    assert len({context.seed for context in contexts}) == len(contexts)
    assert [context.step for context in contexts] == [0, 0, 0, 1, 1, 1, 1]
    assert contexts == again.rewarder.contexts


def test_what_functions_log_is_the_mean_over_the_rounds() -> None:
    """And what judges have cost is the sum since the start, which the rewarder keeps."""
    rollouts = producer(odd_ones_are_equal, active_sampling=True).collect(1)
    assert rollouts.reward_metrics == {"judge/requests": 2.0, "custom/calls": 2.0}


def test_a_state_taken_while_a_batch_is_under_way_is_the_one_before_it() -> None:
    """SIGTERM finds a batch half sampled: its prompts are drawn again."""
    own = producer(lambda index: EQUAL, no_resampling_pass_rate=0.9)
    before = own.state_dict()
    own.collect(1)
    assert own.state_dict() == before
    own.take_over()
    assert own.state_dict()["sampler"]["excluded"] == [0, 1, 2, 3]


def test_prompts_that_are_queued_ahead_are_handed_out_again() -> None:
    """The next batch is in the engines already when a step is saved; the engines forget it."""
    own = producer()
    own.collect(1)
    own.take_over()
    own.submit_ahead()
    sampler = Sampler(20, 1, shuffle=False)
    sampler.load_state_dict(own.state_dict()["sampler"])
    assert sampler.take(4) == [(0, index) for index in (4, 5, 6, 7)]
    resumed = producer()
    resumed.load_state_dict(own.state_dict())
    assert indices(resumed.collect(2).groups) == indices(own.collect(2).groups) == [4, 5, 6, 7]


def test_prompts_queued_ahead_are_submitted_once() -> None:
    """Sampled twice they would cost a step's time and change the random stream."""
    own = producer()
    own.submit_ahead()
    own.collect(1)
    assert len(own.dispatcher.fleet.engines[0].batches) == 1


def test_an_aborted_batch_ends_the_wait_for_it() -> None:
    """The state is saved at once after SIGTERM, not when the longest answer is there."""
    own = producer()
    own.submit_ahead()
    own.abort()
    with pytest.raises(EngineError, match="aborted"):
        own.collect(1)
    assert own.state_dict()["sampler"]["position"] == 0


def test_an_evaluation_leaves_no_trace_in_training_and_does_not_depend_on_it() -> None:
    """A run would be another one for every choice of local_eval_every, and `mgrpo eval` would differ from the run."""
    own = evaluator(eval_response_length=9)
    results = [own.evaluate(done) for done in (0, 6)]
    assert [indices(result.groups) for result in results] == [[0, 1, 2]] * 2
    first, second = own.rewarder.contexts
    assert (first.step, second.step) == (0, 6)
    assert first.seed == second.seed and first.max_tokens == second.max_tokens == 9
    # The stream of evaluations, then that of the step that comes next.
    calls = own.dispatcher.fleet.engines[0].calls
    assert [call[1] for call in calls if call[0] == "seed"] == [
        sampler_seed(1, step, 0) for step in (EVALUATION, 1, EVALUATION, 7)
    ]


def test_an_evaluation_keeps_every_group_and_names_its_sources() -> None:
    """Accuracy over the prompts that are neither all right nor all wrong is no accuracy."""
    result = evaluator().evaluate(0)
    assert indices(result.groups) == [0, 1, 2] and list(result.sources) == ["a", "a", "b"]
    assert result.reward_metrics == {"eval/custom/calls": 1.0}
