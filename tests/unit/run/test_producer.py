"""What is sampled, kept, sampled in place of others, and sampled again after a resume."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from mgrpo.rollout.engine import EngineError, RefusedError
from mgrpo.rollout.requests import EVALUATION, sampler_seed
from mgrpo.types import Prompt, PromptId, Score, ScoredGroup
from tests.builders import prompt
from tests.scripted_engine import ScriptedEngine
from tests.unit.run.producing import collect, evaluator, producer

EQUAL, MIXED = (1.0, 1.0), (0.0, 1.0)


def odd_ones_are_equal(index: int) -> tuple[float, ...]:
    return EQUAL if index % 2 else MIXED


def indices(groups) -> list[int]:
    return [scored.group.prompt.id[1] for scored in groups]


def test_without_active_sampling_a_dropped_group_makes_the_batch_smaller() -> None:
    """And the next step starts with fresh prompts."""
    own = producer(odd_ones_are_equal)
    rollouts = collect(own)
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2], [1, 3])
    assert indices(collect(own).groups) == [4, 6]


def test_active_sampling_fills_the_batch() -> None:
    """The gradient's noise should not grow as the policy solves more prompts."""
    rollouts = collect(producer(odd_ones_are_equal, active_sampling=True))
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2, 4, 6], [1, 3, 5])


def test_active_sampling_gives_up_after_its_rounds() -> None:
    """A policy that solves everything would otherwise sample for ever."""
    rollouts = collect(producer(lambda index: EQUAL, active_sampling=True))
    assert rollouts.groups == [] and len(rollouts.dropped) == 40


def test_solved_prompts_are_counted_in_their_step_and_not_sampled_again() -> None:
    """Exclusion saves what a solved prompt would cost in every epoch."""
    own = producer(odd_ones_are_equal, no_resampling_pass_rate=0.9)
    counts = [collect(own).num_excluded for step in range(1, 6)]
    assert counts == [2, 2, 2, 2, 2]
    assert indices(collect(own).groups) == [0, 2, 4, 6]


def test_when_every_prompt_is_solved_nothing_is_sampled() -> None:
    """The trainer ends the run then."""
    own = producer(lambda index: EQUAL, no_resampling_pass_rate=0.9)
    for _ in range(5):
        collect(own)
    rollouts = collect(own)
    assert rollouts.groups == rollouts.dropped == []


def test_every_round_of_every_step_draws_rewards_from_a_seed_of_its_own() -> None:
    """Reward functions that draw random numbers would draw the same ones for every step; a resumed run repeats them."""
    first, again = (producer(odd_ones_are_equal, active_sampling=True) for _ in range(2))
    for own in (first, again):
        for _ in range(2):
            collect(own)
    contexts = first.rewarder.contexts
    assert len({context.seed for context in contexts}) == len(contexts)
    assert [context.step for context in contexts] == [0, 0, 0, 1, 1, 1, 1]
    assert contexts == again.rewarder.contexts


def test_what_functions_log_is_the_mean_over_the_rounds() -> None:
    """And what judges have cost is the sum since the start, which the rewarder keeps."""
    rollouts = collect(producer(odd_ones_are_equal, active_sampling=True))
    assert rollouts.reward_metrics == {"judge/requests": 2.0, "custom/calls": 2.0}


def test_a_state_taken_while_a_batch_is_under_way_is_the_one_before_it() -> None:
    """SIGTERM finds a batch half sampled: its prompts are drawn again."""
    own = producer(lambda index: EQUAL, no_resampling_pass_rate=0.9)
    before = own.state_dict()
    own.dispatcher.wait(own.take())
    assert own.state_dict() == before
    own.hand_over(prepare=False)
    assert own.state_dict()["sampler"]["excluded"] == [0, 1, 2, 3]


def test_prompts_that_are_queued_ahead_are_handed_out_again() -> None:
    """The next batch is in the engines already when a step is saved; the engines forget it."""
    own, resumed = producer(), producer()
    collect(own, prepare=True)
    resumed.load_state_dict(json.loads(json.dumps(own.state_dict())))
    assert indices(collect(resumed).groups) == indices(collect(own).groups) == [4, 5, 6, 7]


def test_prompts_queued_ahead_are_submitted_once_and_sampled_after_the_update() -> None:
    """Sampled twice they would cost a step's time; sampled before, they would come from the old weights."""
    own = producer(engine=(engine := ScriptedEngine()))
    collect(own, prepare=True)
    assert len(engine.batches) == 2 and list(engine.queued) == [4, 5, 6, 7]
    own.begin()
    collect(own)
    assert len(engine.batches) == 2 and not engine.queued
    # One pause after each step, and one start for each.
    assert [call[0] for call in engine.calls] == ["resume", "pause"] * 2


def test_without_new_weights_engines_go_on_and_further_groups_begin() -> None:
    """Few weight syncs are to save the pause, which waits for the longest answer; a step that starts nothing anew would dry them up."""
    own = producer(
        engine=(engine := ScriptedEngine()),
        **{"async_steps": 1, "max_staleness": 4, "weight_sync_steps": 3, "use_rho_correction": True},
    )
    for done in range(1, 4):
        assert indices(collect(own).groups) == [4 * done - 4 + place for place in range(4)]
        if done == 3:
            own.pause()
        own.begin()
    # Of the weights that all of them had.
    assert own.dispatcher.thread.submit(lambda: own.groups.stream.born).result() == {
        number: 0 if number < 16 else 3 for number in range(12, 20)
    }
    assert [call[0] for call in engine.calls] == ["resume", "pause", "resume"]


def test_an_aborted_batch_ends_the_wait_for_it() -> None:
    """The state is saved at once after SIGTERM, not when the longest answer is there."""
    own = producer(engine=ScriptedEngine(answers=False))
    taking = own.take()
    own.begin()
    own.abort()
    with pytest.raises(EngineError, match="aborted"):
        own.dispatcher.wait(taking)
    assert own.state_dict()["sampler"]["position"] == 0


@pytest.mark.parametrize("call", ["submit", "poll", "resume"])
def test_an_engine_that_fails_ends_the_wait_with_its_reason(call: str) -> None:
    """Otherwise the run would wait for `rollout_timeout`, an hour, and blame the engine's speed."""
    own = producer(engine=ScriptedEngine(fails=call))
    with pytest.raises(EngineError, match=rf"could not \w+: {call} has failed"):
        own.dispatcher.wait(own.take())


def test_an_error_of_rewards_or_data_ends_the_wait_with_itself() -> None:
    """They run in threads of their own, in which an exception vanishes."""

    def fails(index: int) -> tuple[float, ...]:
        raise ZeroDivisionError(f"row {index}")

    with pytest.raises(ZeroDivisionError, match="row 0"):
        collect(producer(fails))
    own = producer()
    own.groups.prompt = fails
    with pytest.raises(ZeroDivisionError, match="row"):
        collect(own)


def test_engines_that_do_not_answer_in_time_are_named() -> None:
    """A hung engine must not hold the run for ever."""
    own = producer(engine=ScriptedEngine(answers=False), rollout_timeout=1)
    with pytest.raises(EngineError, match="could not generate within rollout_timeout=1 s: no answer from the engine"):
        own.dispatcher.wait(own.take())


def settle(own) -> None:
    """Wait until the producer has done what there is to do."""
    for _ in range(3):
        own.thread.submit(lambda: own.scoring.thread.submit(lambda: None)).result().result()
    own.thread.submit(lambda: None).result()


def asynchronous(engine: ScriptedEngine, **settings):
    return producer(odd_ones_are_equal, engine=engine, use_rho_correction=True, **settings)


def test_ahead_of_training_as_many_steps_are_sampled_as_was_asked_and_no_more() -> None:
    """The next step's groups are there when the learners come back; older weights than allowed sample nothing."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1)
    own.begin()
    settle(own)
    assert list(engine.queued) == list(range(8))
    engine.answer(*range(8))
    assert indices(collect(own).groups) == [0, 2]
    settle(own)
    assert not engine.queued, "the engines have the weights of step 0 until the next sync"
    own.thread.submit(own._pause).result().result(10)
    own.begin()
    settle(own)
    assert list(engine.queued) == [8, 9, 10, 11]
    assert [call[0] for call in engine.calls] == ["resume", "pause", "resume"]
    assert indices(collect(own).groups) == [4, 6]


def test_before_an_update_the_engines_finish_what_they_have_begun() -> None:
    """Each completion then comes from one policy."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1)
    own.begin()
    settle(own)
    engine.answer(0, 1, 2, 3)
    collect(own)
    paused = own.thread.submit(own._pause).result()
    assert not paused.done()
    engine.answer(4, 5, 6, 7)
    paused.result(10)


def test_a_second_number_lets_a_step_take_what_has_finished() -> None:
    """One long answer then holds up nobody until it would become too old."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1, max_staleness=2)
    own.begin()
    settle(own)
    engine.answer(0, 2, 3, 4, 5)
    rollouts = collect(own)
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2, 4], [3])
    settle(own)
    assert list(engine.queued) == [1, 6, 7]


def test_a_group_without_a_signal_is_replaced_at_once_where_steps_overlap() -> None:
    """Rounds would leave the engines idle until the longest answer of each is there."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1, active_sampling=True)
    own.begin()
    settle(own)
    engine.answer(1)
    settle(own)
    assert 8 in engine.queued and 9 not in engine.queued
    engine.answer(*engine.queued)
    settle(own)
    engine.answer(*engine.queued)
    rollouts = collect(own)
    assert indices(rollouts.groups) == [0, 2, 4, 6] and indices(rollouts.dropped)[:3] == [1, 3, 5]


def test_oversampling_begins_with_more_than_a_step_needs_and_loses_none_of_it() -> None:
    """Surplus groups are the next step's."""
    own = producer(
        odd_ones_are_equal,
        engine=(engine := ScriptedEngine(answers=False)),
        use_rho_correction=True,
        active_sampling=True,
        active_sampling_oversample=1.0,
    )
    own.begin()
    settle(own)
    assert list(engine.queued) == list(range(8))
    engine.answer(*range(8))
    assert indices(collect(own).groups) == [0, 2, 4, 6]
    paused = own.thread.submit(own._pause).result()
    engine.answer(*engine.queued)
    paused.result(10)
    own.begin()
    settle(own)
    engine.answer(*engine.queued)
    assert indices(collect(own).groups) == [8, 10, 12, 14]


def test_the_batch_says_how_long_engines_worked_and_learners_waited() -> None:
    """An asynchronous run has no phase of generation; what is idle shows only here."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1)
    own.begin()
    settle(own)
    engine.answer(*range(8))
    settle(own)
    rollouts = collect(own)
    assert rollouts.num_admitted == 8 and rollouts.engine_s > 0
    assert rollouts.generate_s == 0.0


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


def resumed_from(own, **settings):
    """A producer that continues where the other one is, from a state that went through JSON; and its engine."""
    state = own.state_dict()
    arrays = state.pop("rollouts", {})
    again = asynchronous(engine := ScriptedEngine(answers=False), **settings)
    engine.version = 1
    again.load_state_dict({**json.loads(json.dumps(state)), "rollouts": arrays})
    again.begin()
    settle(again)
    return again, engine


def test_an_asynchronous_state_keeps_what_was_sampled_and_begins_the_newest_batch_again() -> None:
    """Its weights are gone, so that it cannot be sampled again; the newest batch repeats from the present ones."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1)
    own.begin()
    settle(own)
    engine.answer(*range(8))
    collect(own)
    own.thread.submit(own._pause).result().result(10)
    engine.version = 1
    own.begin()
    settle(own)
    engine.answer(8, 9)
    settle(own)
    again, its_engine = resumed_from(own, async_steps=1)
    assert [int(number) for batch in its_engine.batches for number in batch.numbers] == [0, 1, 2, 3]
    its_engine.answer(0, 1, 2, 3)
    engine.answer(10, 11)
    first, second = collect(again), collect(own)
    assert indices(first.groups) == indices(second.groups) == [4, 6]
    for a, b in zip(first.groups + first.dropped, second.groups + second.dropped, strict=True):
        assert a.scores == b.scores
        for x, y in zip(a.group.completions, b.group.completions, strict=True):
            assert x.tokens.tolist() == y.tokens.tolist() and x.text == y.text
            assert x.policy_versions.tolist() == y.policy_versions.tolist() == [0] * len(x.tokens)
    again.thread.submit(again._pause).result().result(10)
    again.begin()
    assert indices(collect(again).groups) == [8, 10]


def test_with_updates_in_flight_only_what_was_not_sampled_begins_again() -> None:
    """No prompt is lost, and none is trained on twice."""
    settings = {"async_steps": 2, "inflight_updates": True}
    own = asynchronous(engine := ScriptedEngine(answers=False), **settings)
    own.begin()
    settle(own)
    engine.answer(0, 1, 5, 3, 2)
    settle(own)
    taken = {*indices((rollouts := collect(own)).groups), *indices(rollouts.dropped)}
    again, its_engine = resumed_from(own, **settings)
    rows = [int(row) for batch in its_engine.batches for row in range(len(batch.numbers))]
    assert len(rows) == 12 - 5 + 4, "what had not finished, and a step's worth that there is room for now"
    its_engine.answer(*its_engine.queued)
    settle(again)
    for _ in range(3):
        rollouts = collect(again)
        step = {*indices(rollouts.groups), *indices(rollouts.dropped)}
        assert len(step) == 4 and not step & taken
        taken |= step
    assert taken == set(range(16))


def test_what_waits_for_its_score_when_the_state_is_taken_is_scored_after_it() -> None:
    """It was sampled by weights that are gone."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=1, inflight_updates=True)
    own.scoring.add = lambda part: None
    own.begin()
    settle(own)
    engine.answer(0, 1, 2, 3)
    settle(own)
    again, its_engine = resumed_from(own, async_steps=1, inflight_updates=True)
    assert sum(len(batch.numbers) for batch in its_engine.batches) == 4
    assert indices(collect(again).groups) == [0, 2]


def test_rows_that_are_sampled_again_count_as_solved_again() -> None:
    """Otherwise the batch of a resumed run would say that it has found none."""
    settings = {"async_steps": 1, "no_resampling_pass_rate": 0.9}
    own = asynchronous(engine := ScriptedEngine(answers=False), **settings)
    own.begin()
    settle(own)
    engine.answer(*range(8))
    settle(own)
    assert own.state_dict()["sampler"]["excluded"] == []
    again, its_engine = resumed_from(own, **settings)
    its_engine.answer(*its_engine.queued)
    assert collect(again).num_excluded == 2


def numbers_of(rollouts) -> list[int]:
    """The rows of all groups of a step, in order."""
    return sorted(indices(rollouts.groups) + indices(rollouts.dropped))


def sampled_ahead(**settings):
    """An asynchronous producer, two steps ahead, after one step, with everything sampled."""
    own = asynchronous(engine := ScriptedEngine(answers=False), async_steps=2, max_staleness=4, **settings)
    own.begin()
    settle(own)
    engine.answer(*engine.queued)
    settle(own)
    assert numbers_of(collect(own)) == [0, 1, 2, 3]
    return own


@pytest.mark.parametrize(
    ("settings", "sampled_again"),
    [
        # Fewer prompts a step, for which the deadlines of some have passed; groups of another size, or that were not sampled from
        # sets; no asynchrony any more.
        ({"async_steps": 1, "max_staleness": 2, "num_unique_prompts_rollout": 1}, None),
        ({"async_steps": 2, "max_staleness": 4, "num_samples_per_prompt_rollout": 3}, 12),
        ({"async_steps": 2, "max_staleness": 4, "top_k": 4}, 12),
        ({"async_steps": 0}, 4),
        ({"async_steps": 1}, 0),
    ],
)
def test_a_run_that_is_resumed_with_other_settings_gets_every_prompt_in_turn(settings, sampled_again) -> None:
    """It would wait for ever for groups that are too old, or train on what its settings do not allow."""
    state = sampled_ahead().state_dict()
    again = asynchronous(engine := ScriptedEngine(), **settings)
    again.load_state_dict(state)
    per_step = again.groups.stream.group_count
    rows = []
    for _ in range(8 // per_step):
        if again.groups.takes_turns:
            again.begin()
        rollouts = collect(again)
        rows += numbers_of(rollouts)
        assert all(
            len(group.group.completions) == settings.get("num_samples_per_prompt_rollout", 2)
            for group in rollouts.groups + rollouts.dropped
        )
        again.thread.submit(again._pause).result().result(10)
        again.begin()
    assert rows == list(range(4, 12))
    if sampled_again is not None:
        first = engine.batches[:1] if sampled_again else []
        assert sum(len(batch.numbers) for batch in first) == sampled_again


def test_what_reward_functions_record_may_be_anything() -> None:
    """A value that JSON cannot hold would end the run when its state is saved."""
    own = sampled_ahead()
    group = own.groups.out[4]
    group.scored = ScoredGroup(group=group.sampled, scores=(Score(reward=1.0, extras={"array": np.int64(3)}),) * 2)
    state = own.state_dict()
    del state["rollouts"]
    json.dumps(state)


def test_a_step_waits_for_prompts_while_there_are_some() -> None:
    """Most rows are solved, so steps are short; the run must not end because of the places that stay empty."""
    own = asynchronous(
        engine := ScriptedEngine(answers=False), async_steps=1, max_staleness=3, no_resampling_pass_rate=0.9
    )
    own.groups.sampler.exclude(set(range(19)))
    taking = own.take()
    settle(own)
    assert len(engine.queued) == 2 and not taking.done(), "one row, once for each step"
    engine.answer(*engine.queued)
    assert len(own.dispatcher.wait(taking).dropped) >= 1


def marked(prompt_id: PromptId, opening: str = "") -> Prompt:
    """Its first token is its row."""
    return prompt([prompt_id[1], 7], id=prompt_id, verifiers=["integer"])


@pytest.mark.parametrize("settings", [{}, {"async_steps": 1}], ids=str)
def test_a_prompt_that_engines_refuse_leaves_its_place_empty_and_the_others_are_trained_on(settings) -> None:
    """One row would end the run, or hold its step until `rollout_timeout`."""
    engine = ScriptedEngine(refuses={1: "too long", 6: "too long", 7: "too long"})
    own = producer(engine=engine, prompt=marked, **settings)
    rows = []
    for _ in range(3):
        rollouts = collect(own)
        own.begin()
        rows.append([group.group.prompt.id[1] for group in rollouts.groups])
        assert rollouts.engine_metrics["engines/refused_groups"] == 4 - len(rows[-1])
    assert rows == [[0, 2, 3], [4, 5], [8, 9, 10, 11]]
    asked = np.concatenate([batch.tokens[batch.cu_seqlens[:-1]] for batch in engine.batches])
    assert max(Counter(asked.tolist()).values()) == 1, "each prompt was asked once"


def test_a_step_of_which_engines_refuse_every_prompt_ends_the_run_with_their_reason() -> None:
    """The settings are at fault: every further step would be empty as well."""
    engine = ScriptedEngine(refuses=dict.fromkeys(range(4), "temperature must be in [0, 2], got 3"))
    own = producer(engine=engine, prompt=marked)
    with pytest.raises(
        RefusedError, match=r"the request of training row 0 of epoch 0: temperature must be in \[0, 2\], got 3$"
    ):
        own.dispatcher.wait(own.take())


def test_a_step_that_is_refused_ends_the_run_while_later_groups_are_out() -> None:
    """Their failures come with the run's, and the learners would wait for `rollout_timeout`."""
    engine = ScriptedEngine(answers=False)
    own = producer(engine=engine, prompt=marked, async_steps=1)
    taking = own.take()
    own.thread.submit(lambda: None).result()
    numbers = sorted(engine.queued)
    assert len(numbers) == 8
    for number in numbers[:4]:
        del engine.queued[number]
        engine.refused[number] = "no grammar"
    engine._hand_over()
    with pytest.raises(RefusedError, match=r"no grammar$"):
        taking.result(60)


def test_groups_that_are_scored_together_do_not_wait_for_one_that_was_refused() -> None:
    """It comes last here: those before it have been sampled, and nothing else would have them scored."""
    engine = ScriptedEngine(answers=False)
    own = producer(engine=engine, prompt=marked)
    own.rewarder.functions = ("score",)
    own.groups.scores_cohorts = own.groups.stream.is_ordered
    taking = own.take()
    own.thread.submit(lambda: None).result()
    numbers = sorted(engine.queued)
    engine.answer(*numbers[:3])
    own.thread.submit(lambda: None).result()
    assert not taking.done()
    del engine.queued[numbers[3]]
    engine.refused[numbers[3]] = "too long"
    engine._hand_over()
    assert [group.group.prompt.id[1] for group in own.dispatcher.wait(taking).groups] == [0, 1, 2]


def test_a_held_out_prompt_that_engines_refuse_ends_the_evaluation_with_their_reason() -> None:
    """The number would be that of other prompts, and be compared with those of before."""
    own = evaluator()
    own.dispatcher.fleet.engines[0].refuses = {int(own.prompts[0].tokens[0]): "too long"}
    with pytest.raises(RefusedError, match=r"the request of evaluation row \d: too long$"):
        own.evaluate(0)
