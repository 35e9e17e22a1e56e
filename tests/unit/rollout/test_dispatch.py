"""The dispatcher with engines that answer when they are told to: who samples what, and what becomes of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import EngineError, NotFiniteError, RefusedError, Sampling
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.requests import EVALUATION, Request, RequestBounds, prompt_seeds
from mgrpo.types import Prompt, RolloutGroup
from tests.builders import prompt
from tests.scripted_engine import ScriptedEngine, Told


def numbered(index: int) -> Prompt:
    """Prompt i has i + 1 tokens."""
    return prompt([index] * (index + 1), id=(0, index))


def dispatcher(
    *,
    num_engines: int = 1,
    seeds_prompts: bool = False,
    answers: bool = True,
    limit: int | None = None,
    engine: Callable[..., ScriptedEngine] = ScriptedEngine,
    **settings,
) -> Dispatcher:
    """Two samples for each prompt; the engines sample."""
    config = from_values(
        {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 2, "response_length": 64, **settings}
    )
    engines = [engine(answers=answers) for _ in range(num_engines)]
    fleet = Fleet(Roster(engines, config.engine), seed=1, seeds_prompts=seeds_prompts)
    own = Dispatcher(
        fleet,
        config.rollout,
        run_seed=1,
        decode=lambda tokens: ["" for _ in tokens],
        stop_token_ids=(),
        samples_per_engine=limit,
    )
    own.thread.submit(own.resume).result()
    return own


def train(own: Dispatcher, prompts: Sequence[Prompt]) -> list[Future[RolloutGroup]]:
    """Send training prompts; their groups when they are there."""
    groups: list[Future[RolloutGroup]] = [Future() for _ in prompts]

    def fail(err: Exception, failing: Sequence[Future[RolloutGroup]] = groups) -> None:
        for group in failing:
            if not group.done():
                group.set_exception(err)

    own.listen(Told(fail))
    requests = [
        own.for_training(0, asked, group.set_result, failed=partial(fail, failing=[group]))
        for asked, group in zip(prompts, groups, strict=True)
    ]
    own.thread.submit(lambda: own.send(requests)).result()
    return groups


def given(own: Dispatcher) -> list[list[int]]:
    """The prompts that each engine has been given and has not answered, by their row."""
    return [[int(tokens[0]) for tokens, _ in engine.queued.values()] for engine in own.fleet.engines]


def answer(own: Dispatcher, engine: int, *rows: int) -> None:
    """Have an engine finish prompts, and wait until that is known."""
    queued = own.fleet.engines[engine].queued
    own.fleet.engines[engine].answer(*[number for number, (tokens, _) in queued.items() if tokens[0] in rows])
    own.thread.submit(lambda: None).result()


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_answer_goes_to_its_prompt(num_engines: int) -> None:
    """An engine's answers come in any order."""
    own = dispatcher(num_engines=num_engines)
    for step in range(2):
        asked = [numbered(4 * step + i) for i in range(4)]
        for wanted, group in zip(asked, train(own, asked), strict=True):
            assert group.result(10).prompt is wanted and len(group.result().completions) == 2
            assert all(c.tokens.tolist() == wanted.tokens.tolist() for c in group.result().completions)
        groups = own.wait(own.sample_evaluation(asked))
        assert [group.prompt for group in groups] == asked


def test_a_group_goes_to_the_engine_with_the_least_to_write() -> None:
    """Equal numbers of requests are not equal work: one long prompt holds its engine for as long as many short ones."""
    own = dispatcher(num_engines=2, answers=False, response_length=1)
    train(own, [numbered(60), *(numbered(i) for i in range(4))])
    assert given(own) == [[60], [0, 1, 2, 3]]
    answer(own, 0, 60)
    train(own, [numbered(5), numbered(6)])
    assert given(own) == [[5, 6], [0, 1, 2, 3]]


def test_the_expected_length_is_that_of_the_answers_so_far() -> None:
    """At first the longest possible one; it changes with the steps alone, so that a resumed run chooses the same engines."""
    own = dispatcher(response_length=64)
    groups = [group.result(10) for group in train(own, [numbered(1), numbered(3)])]
    assert own.loads.state_dict() == {"lengths": [0, 0]}
    own.loads.learn(groups)
    assert own.loads.state_dict() == {"lengths": [2 * 2 + 2 * 4, 4]}
    request = own.for_training(0, numbered(9), print, failed=print)
    assert own.loads.cost(request) == 10 + 2 * 3
    again = dispatcher()
    assert again.loads.cost(request) == 10 + 2 * 64
    again.loads.load_state_dict(own.loads.state_dict())
    assert again.loads.cost(request) == own.loads.cost(request)


def test_what_an_engine_has_no_room_for_waits_where_it_can_still_go_anywhere() -> None:
    """An engine's own queue is a commitment: an idle engine beside it could not take over."""
    own = dispatcher(num_engines=2, answers=False, limit=4)
    train(own, [numbered(i) for i in range(7)])
    assert given(own) == [[0, 2], [1, 3]]
    answer(own, 1, 3)
    assert given(own) == [[0, 2], [1, 4]]
    answer(own, 1, 1, 4)
    assert given(own) == [[0, 2], [5, 6]]


def test_a_full_engine_does_not_keep_others_from_work() -> None:
    """The one with the least to write may be the one that has no room, where its prompts are short."""
    own = dispatcher(num_engines=2, answers=False, limit=4, response_length=1)
    train(own, [numbered(50), numbered(0), numbered(1), numbered(2)])
    assert given(own) == [[50, 2], [0, 1]]


def test_a_group_larger_than_the_room_of_an_engine_is_sampled_all_the_same() -> None:
    """The run would wait for ever."""
    own = dispatcher(answers=False, limit=1)
    train(own, [numbered(0), numbered(1)])
    assert given(own) == [[0]]
    answer(own, 0, 0)
    assert given(own) == [[1]]


def test_while_the_engines_are_paused_only_an_evaluation_goes_out() -> None:
    """Training prompts that wait here would be sampled beside it, by weights that are no longer new when they are done."""
    own = dispatcher(answers=False, limit=2)
    train(own, [numbered(0), numbered(1)])
    own.holds_training = True
    answer(own, 0, 0)
    assert given(own) == [[]]
    whole = own.sample_evaluation([numbered(7)])
    own.thread.submit(lambda: None).result()
    assert given(own) == [[7]]
    answer(own, 0, 7)
    assert own.wait(whole)[0].prompt.id == (0, 7) and given(own) == [[]]
    own.holds_training = False
    own.thread.submit(own.resume).result()
    assert given(own) == [[1]]


def test_an_aborted_evaluation_is_an_error() -> None:
    """Half an answer that is taken for a whole one would be counted as truncated."""
    own = dispatcher(answers=False)
    whole = own.sample_evaluation([numbered(0)])
    own.thread.submit(lambda: None).result()
    own.fleet.abort()
    with pytest.raises(EngineError, match="aborted"):
        own.wait(whole)
    with pytest.raises(EngineError, match="aborted"):
        own.wait(own.sample_evaluation([numbered(1)]))


def sent(own: Dispatcher, *rows: int) -> tuple[list[Request], list[int]]:
    """Training requests that were sent, and the rows of those that are answered, now and later."""
    came: list[int] = []
    own.listen(Told())
    requests = [
        own.for_training(row, numbered(row), lambda group, row=row: came.append(row), failed=print) for row in rows
    ]
    own.thread.submit(lambda: own.send(requests)).result()
    return requests, came


def withdraw(own: Dispatcher, *requests: Request) -> None:
    for request in requests:
        own.thread.submit(partial(own.withdraw_turn, request)).result()
    own.thread.submit(lambda: None).result()


def test_what_nobody_waits_for_leaves_the_queue_and_its_engine() -> None:
    """An engine would go on with it to its last token, and others would wait behind it."""
    own = dispatcher(answers=False, limit=2)
    (first, second, _), came = sent(own, 0, 1, 2)
    assert given(own) == [[0]]
    withdraw(own, second, first, first)
    assert given(own) == [[2]] and own.fleet.engines[0].calls[1:] == [("withdraw", 0)]
    answer(own, 0, 2)
    assert came == [2] and not own.listener.failure and not own.withdrawn


def test_a_group_that_has_finished_before_its_engine_is_told_to_end_it_is_dropped() -> None:
    """Whoever asked has forgotten it."""
    own = dispatcher(engine=partial(ScriptedEngine, hangs="withdraw"), answers=False)
    (first, _), came = sent(own, 0, 1)
    withdraw(own, first)
    answer(own, 0, 0, 1)
    assert came == [1] and not own.listener.failure and not own.withdrawn
    withdraw(own, first)
    assert given(own) == [[]] and not own.withdrawn


def test_what_nobody_waits_for_does_not_begin_again_where_its_engine_has_died() -> None:
    own = dispatcher(num_engines=2, engine=partial(ScriptedEngine, hangs="withdraw"), answers=False, limit=4)
    (first, *_), came = sent(own, 0, 1, 2)
    assert given(own) == [[0, 2], [1]]
    withdraw(own, first)
    own.fleet.engines[0].die()
    own.thread.submit(lambda: None).result()
    assert given(own)[1] == [1, 2] and not own.withdrawn and own.listener.replays == [2]
    answer(own, 1, 1, 2)
    assert came == [1, 2]


class BrokenEngine(ScriptedEngine):
    """Its second token has a log-probability that is not finite."""

    def __init__(self, value: float, **settings) -> None:
        super().__init__(**settings)
        self.value = value

    def _echo(self, number, tokens, num_samples):
        answer = super()._echo(number, tokens, num_samples)
        answer["logprobs"][1] = self.value
        return answer


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_broken_weights_sample_is_refused(value: float) -> None:
    """A diverged policy gives each prompt equal answers: every group is filtered, and no other check sees a number of it."""
    own = dispatcher(engine=partial(BrokenEngine, value))
    for group in (train(own, [numbered(1)])[0], own.sample_evaluation([numbered(1)])):
        with pytest.raises(NotFiniteError, match=r"1 of [12] completions .* policy version 0 are broken or have"):
            own.wait(group)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # num_samples, max_tokens, temperature, top_p
        ({}, (2, 64, 0.7, 1.0)),
        ({"eval_temperature": 0.3, "eval_top_p": 0.9, "eval_response_length": 128}, (2, 128, 0.3, 0.9)),
        ({"eval_temperature": 0.0, "eval_pass_at_k": 1, "eval_response_length": 16}, (1, 16, 0.0, 1.0)),
    ],
)
def test_evaluations_have_settings_of_their_own_and_training_keeps_its(settings, expected) -> None:
    """A temperature of 0 is no "not set"; top-p in training would make the ratio of probabilities another one."""
    own = dispatcher(**{"temperature": 0.7, "eval_pass_at_k": 2, **settings})
    own.wait(own.sample_evaluation([numbered(0)]))
    train(own, [numbered(1)])
    (engine,) = own.fleet.engines
    asked, trained = (batch.sampling for batch in engine.batches)
    assert (asked.num_samples, asked.max_tokens, asked.temperature, asked.top_p) == expected
    assert (trained.num_samples, trained.max_tokens, trained.temperature, trained.top_p) == (2, 64, 0.7, 1.0)


def test_without_stop_strings_engines_draw_from_one_stream() -> None:
    """One generator per request is vLLM's slow path on a CPU."""
    own = dispatcher()
    train(own, [numbered(0)])
    assert own.fleet.engines[0].batches[0].seeds is None


def test_with_a_grammar_every_prompt_has_its_own_seed() -> None:
    """It is ready at some moment: were all rows drawn from one stream, the others' samples would depend on it."""
    own = dispatcher(vllm_guided_decoding_regex="[0-9]+", top_k=8)
    train(own, [numbered(0)])
    assert own.fleet.engines[0].batches[0].seeds is not None


@pytest.mark.parametrize("stop_strings", [(), ("</answer>",)])
def test_on_gpus_or_with_stop_strings_every_prompt_has_its_own_seed_wherever_it_is_sampled(stop_strings) -> None:
    """On GPUs engines would share their noise; an ended row stays in the batch for a moment, and must not change others.

    A resumed run begins with fewer calls behind it, and an evaluation may come at any time: neither changes a seed.
    """
    seeds = {}
    for num_engines, is_resumed in ((1, False), (3, False), (3, True)):
        own = dispatcher(num_engines=num_engines, seeds_prompts=not stop_strings, stop_strings=list(stop_strings))
        if not is_resumed:
            train(own, [numbered(i) for i in range(4)])
        own.wait(own.sample_evaluation([numbered(i) for i in range(4)]))
        train(own, [numbered(4 + i) for i in range(4)])
        batches = [engine.batches for engine in own.fleet.engines]
        assert all(batch.sampling.stop_strings == stop_strings for each in batches for batch in each)
        by_call = [sorted(np.concatenate([batch.seeds for batch in call])) for call in zip(*batches, strict=True)]
        seeds[num_engines, is_resumed] = by_call
    assert seeds[1, False] == seeds[3, False] and seeds[3, True] == seeds[3, False][1:]
    assert len({seed for call in seeds[1, False] for seed in call}) == 12


def test_an_evaluation_beside_training_draws_from_seeds_of_its_own() -> None:
    """From one stream it would change with what is sampled beside it, and no two evaluations could be compared."""
    own = dispatcher()
    own.fleet.pauses = "recompute"
    train(own, [numbered(0)])
    own.wait(own.sample_evaluation([numbered(1)]))
    trained, evaluated = own.fleet.engines[0].batches
    assert trained.seeds is None and evaluated.seeds.tolist() == prompt_seeds(1, [numbered(1)], EVALUATION).tolist()


def test_seeds_of_prompts_differ_between_runs_epochs_and_rows() -> None:
    """Samples of one prompt take neighbouring seeds, so that prompts must lie far apart."""
    prompts = [prompt(id=(epoch, index)) for epoch in range(3) for index in range(40)]
    seeds = np.sort(
        np.concatenate([prompt_seeds(run, prompts, stream) for run in (1, 2) for stream in (0, EVALUATION)])
    )
    assert seeds.dtype == np.int64 and seeds[0] >= 0 and seeds[-1] < 2**62
    assert np.diff(seeds).min() > 10_000


@pytest.mark.parametrize(("num_engines", "gather_s"), [(1, 0.02), (20, 0.02), (500, 0.5)])
def test_many_engines_hand_over_more_at_a_time(num_engines, gather_s):
    """Rank 0 answers every poll: at a thousand engines with a group each 20 ms it would do nothing else."""
    own = dispatcher(num_engines=num_engines)
    for group in train(own, [numbered(i) for i in range(num_engines)]):
        group.result(10)
    assert {engine.gather_s for engine in own.fleet.engines} == {gather_s}


BOUNDS = RequestBounds(max_model_len=8, vocab=10, has_tokenizer=False, has_masks=False)
GOOD = Sampling(num_samples=2, max_tokens=4, temperature=1.0, stop_token_ids=(1,))


def answered(
    own: Dispatcher, *asked: tuple[Sequence[int], Sampling], stream: int = EVALUATION
) -> list[RolloutGroup | Exception]:
    """What becomes of these requests, sent together."""
    found: list[Future[RolloutGroup]] = [Future() for _ in asked]
    requests = [
        Request(
            prompt=prompt(tokens, id=(0, row)),
            sampling=sampling,
            stream=stream,
            done=future.set_result,
            failed=future.set_exception,
        )
        for row, ((tokens, sampling), future) in enumerate(zip(asked, found, strict=True))
    ]
    own.thread.submit(lambda: own.send(requests)).result()
    return [future.exception(10) or future.result() for future in found]


@pytest.mark.parametrize(
    ("tokens", "change", "problem"),
    [
        ([3], {"temperature": 0.0}, "num_samples=2 with temperature=0 are samples that are all the same, expected num_samples=1 or"),
        ([3], {"temperature": 2.5}, "temperature=2.5, expected a number from 0 to 2"),
        ([3], {"temperature": float("nan")}, "temperature=nan, expected a number from 0 to 2"),
        ([3], {"temperature": -0.1}, "temperature=-0.1, expected"),
        ([3], {"temperature": "hot"}, "temperature='hot', expected a number"),
        ([3], {"num_samples": 0}, "num_samples=0, expected an integer of at least 1"),
        ([3], {"num_samples": 1.5}, "num_samples=1.5, expected an integer of at least 1"),
        ([3], {"top_p": 0.0}, "top_p=0.0, expected a number from"),
        ([3], {"top_p": 1.1}, "top_p=1.1, expected a number from"),
        ([3], {"top_k": -2}, "top_k=-2, expected an integer of at least -1"),
        ([3], {"min_p": 1.5}, "min_p=1.5, expected a number from 0 to 1"),
        ([3], {"max_tokens": 0}, "max_tokens=0, expected an integer of at least 1"),
        ([3], {"prompt_logprobs": -1}, "prompt_logprobs=-1, expected an integer of at least 0"),
        ([3], {"stop_strings": ("",)}, "stop_strings=[''] holds an empty text"),
        ([3], {"stop_strings": ("!",)}, "stop_strings needs engines with a tokenizer"),
        ([3], {"regex": "a"}, "regex needs engines with a tokenizer"),
        ([3], {"regex": "a\0"}, "regex='a\\x00' holds a NUL character"),
        ([3], {"stop_token_ids": (10,)}, "stop_token_ids holds 10, expected ids from 0 to 9"),
        ([3], {"stop_token_ids": (-1,)}, "stop_token_ids holds -1, expected ids from 0 to 9"),
        ([], {}, "its prompt has no tokens, expected at least 1"),
        ([3, 10], {}, "token 10 at place 1 of its prompt, expected ids from 0 to 9"),
        ([-1], {}, "token -1 at place 0 of its prompt, expected ids from 0 to 9"),
        ([3] * 5, {}, "its prompt has 5 tokens, which with max_tokens=4 are more than max_model_len=8"),
        ([3] * 9, {}, "its prompt has 9 tokens, which with max_tokens=4 are more than max_model_len=8"),
    ],
    ids=str,
)  # fmt: skip
def test_a_request_that_every_engine_would_refuse_is_not_queued_and_fails_alone(
    capsys, tokens, change, problem
) -> None:
    """It would end one engine after the other, and with the last the run."""
    own = dispatcher()
    own.bounds = BOUNDS
    first, wrong, last = answered(own, ([3], GOOD), (tokens, replace(GOOD, **change)), ([4] * 4, GOOD))
    assert isinstance(wrong, RefusedError)
    assert str(wrong).startswith(f"the engine cannot answer the request of evaluation row 1: {problem}")
    assert all(isinstance(group, RolloutGroup) for group in (first, last))
    (engine,) = own.fleet.engines
    given = np.concatenate([batch.tokens for batch in engine.batches])
    assert sorted(given.tolist()) == [3, 4, 4, 4, 4], "the engine is given the others alone"
    assert f"requests that no engine can answer: 1; evaluation row 1: {problem}" in capsys.readouterr().err


def test_tokens_beyond_32_bits_or_of_another_kind_are_refused() -> None:
    """Cast to the engines' type, they would be other tokens."""
    own = dispatcher()
    own.bounds = BOUNDS
    for tokens in (np.array([2**32 + 3]), np.array([3.5]), np.array([[3]])):
        asked = Request(prompt=replace(prompt([3]), tokens=tokens), sampling=GOOD, stream=0, done=print)
        assert asked.problem(BOUNDS) != ""


def test_engines_with_masks_refuse_what_has_none() -> None:
    """They would not say which tokens were left."""
    bounds = replace(BOUNDS, has_masks=True)
    for sampling, is_good in ((GOOD, False), (replace(GOOD, top_k=5), True), (replace(GOOD, top_k=5, num_samples=1, temperature=0), False)):  # fmt: skip
        asked = Request(prompt=prompt([3]), sampling=sampling, stream=0, done=print)
        assert (asked.problem(bounds) == "") is is_good


@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_request_that_an_engine_refuses_fails_alone_and_is_asked_of_no_other(capsys, num_engines) -> None:
    """Its reason is vLLM's, which may know more than this side does."""
    refusing = partial(ScriptedEngine, refuses={5: "the grammar is empty"})
    own = dispatcher(num_engines=num_engines, engine=refusing)
    found = answered(own, ([3], GOOD), ([5], GOOD), ([5, 6], GOOD), ([4], GOOD))
    assert [str(each) for each in found[1:3]] == [
        f"the engine cannot answer the request of evaluation row {row}: the grammar is empty" for row in (1, 2)
    ]
    assert [group.completions[0].tokens.tolist() for group in (found[0], found[3])] == [[3], [4]]
    batches = [batch for engine in own.fleet.engines for batch in engine.batches]
    assert sum(len(batch.numbers) for batch in batches) == 4, "each was given once"
    assert len(own.fleet.members.open) == num_engines and own.loads.num_busy == 0
    assert "evaluation row 1: the grammar is empty" in capsys.readouterr().err
    assert isinstance(answered(own, ([3], GOOD))[0], RolloutGroup), "the engines go on"


def test_a_refused_request_that_was_withdrawn_is_told_to_nobody() -> None:
    own = dispatcher(answers=False, engine=partial(ScriptedEngine, hangs="withdraw"))
    came: list[object] = []
    asked = Request(prompt=prompt([5]), sampling=GOOD, stream=0, done=came.append, failed=came.append)
    own.thread.submit(lambda: own.send([asked])).result()
    own.thread.submit(lambda: own.withdraw(asked, 0)).result()
    (engine,) = own.fleet.engines
    (number,) = engine.queued
    del engine.queued[number]
    engine.refused[number] = "too long"
    engine._hand_over()
    own.thread.submit(lambda: None).result()
    assert not came and not own.withdrawn and own.loads.num_busy == 0
