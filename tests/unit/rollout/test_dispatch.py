"""The dispatcher with engines that answer at once: who samples what, and in which order groups come back."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.config import from_values
from mgrpo.rollout.collect import EVALUATION
from mgrpo.rollout.dispatch import Dispatcher, prompt_seeds
from mgrpo.rollout.engine import EngineError, NotFiniteError
from mgrpo.rollout.fleet import Fleet
from mgrpo.types import Prompt
from tests.builders import prompt
from tests.scripted_engine import ScriptedEngine


def numbered(index: int) -> Prompt:
    """Prompt i has i + 1 tokens."""
    return prompt([index] * (index + 1), id=(0, index))


def dispatcher(*, num_engines: int = 1, seeds_prompts: bool = False, **settings) -> Dispatcher:
    """Two samples for each prompt."""
    config = from_values(
        {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 2, "response_length": 64, **settings}
    )
    fleet = Fleet([ScriptedEngine() for _ in range(num_engines)], config.engine, seed=1, seeds_prompts=seeds_prompts)
    return Dispatcher(fleet, config.rollout, run_seed=1, decode=lambda tokens: ["" for _ in tokens], stop_token_ids=())


def indices(groups) -> list[int]:
    return [group.prompt.id[1] for group in groups]


@pytest.mark.parametrize("num_engines", [1, 3])
def test_groups_come_in_the_order_of_their_prompts(num_engines: int) -> None:
    """Arrival order would make a run depend on the speed of its engines."""
    own = dispatcher(num_engines=num_engines)
    for step in range(2):
        asked = [numbered(4 * step + i) for i in range(4)]
        groups = own.take(own.submit(asked)).groups
        assert indices(groups) == [4 * step + i for i in range(4)]
        assert all(len(c.tokens) == len(group.prompt.tokens) for group in groups for c in group.completions)


def test_an_aborted_batch_is_an_error() -> None:
    """Half an answer that is taken for a whole one would be trained on as truncated."""
    own = dispatcher()
    submitted = own.submit([numbered(0)])
    own.fleet.abort()
    with pytest.raises(EngineError, match="aborted"):
        own.take(submitted)


class BrokenEngine(ScriptedEngine):
    """Its second token has a log-probability that is not finite."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def _echo(self, batch):
        answer = super()._echo(batch)
        answer["logprobs"][1] = self.value
        return answer


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_broken_weights_sample_is_refused(value: float) -> None:
    """A diverged policy gives each prompt equal answers: every group is filtered, and no other check sees a number of it."""
    own = dispatcher()
    own.fleet.engines = [BrokenEngine(value)]
    for submit in (own.submit, own.submit_evaluation):
        with pytest.raises(NotFiniteError, match=r"1 of [12] completions .* policy version 0 are broken or have"):
            own.take(submit([numbered(1)]))


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
    own.submit_evaluation([numbered(0)])
    own.submit([numbered(1)])
    (engine,) = own.fleet.engines
    asked, trained = (engine.batches[number].sampling for number in (0, 1))
    assert (asked.num_samples, asked.max_tokens, asked.temperature, asked.top_p) == expected
    assert (trained.num_samples, trained.max_tokens, trained.temperature, trained.top_p) == (2, 64, 0.7, 1.0)


def test_without_stop_strings_engines_draw_from_one_stream() -> None:
    """One generator per request is vLLM's slow path on a CPU."""
    own = dispatcher()
    own.submit([numbered(0)])
    assert own.fleet.engines[0].batches[0].seeds is None


@pytest.mark.parametrize("stop_strings", [(), ("</answer>",)])
def test_on_gpus_or_with_stop_strings_every_prompt_has_its_own_seed_wherever_it_is_sampled(stop_strings) -> None:
    """On GPUs engines would share their noise; an ended row stays in the batch for a moment, and must not change others.

    A resumed run begins with fewer calls behind it, and an evaluation may come at any time: neither changes a seed.
    """
    seeds = {}
    for num_engines, is_resumed in ((1, False), (3, False), (3, True)):
        own = dispatcher(num_engines=num_engines, seeds_prompts=not stop_strings, stop_strings=list(stop_strings))
        if not is_resumed:
            own.submit([numbered(i) for i in range(4)])
        own.submit_evaluation([numbered(i) for i in range(4)])
        own.submit([numbered(4 + i) for i in range(4)])
        batches = [engine.batches.values() for engine in own.fleet.engines]
        assert all(batch.sampling.stop_strings == stop_strings for share in batches for batch in share)
        by_call = [np.concatenate([batch.seeds for batch in call]).tolist() for call in zip(*batches, strict=True)]
        seeds[num_engines, is_resumed] = by_call
    assert seeds[1, False] == seeds[3, False] and seeds[3, True] == seeds[3, False][1:]
    assert len({seed for call in seeds[1, False] for seed in call}) == 12


def test_seeds_of_prompts_differ_between_runs_epochs_and_rows() -> None:
    """Samples of one prompt take neighbouring seeds, so that prompts must lie far apart."""
    prompts = [prompt(id=(epoch, index)) for epoch in range(3) for index in range(40)]
    seeds = np.sort(
        np.concatenate([prompt_seeds(run, prompts, stream) for run in (1, 2) for stream in (0, EVALUATION)])
    )
    assert seeds.dtype == np.int64 and seeds[0] >= 0 and seeds[-1] < 2**62
    assert np.diff(seeds).min() > 10_000
