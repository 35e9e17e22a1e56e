"""The controller with engines that answer at once: who is sampled, kept and sampled in place of others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mgrpo.config import from_values
from mgrpo.rollout.collect import EVALUATION
from mgrpo.rollout.controller import Controller, prompt_seeds
from mgrpo.types import Prompt, Score, ScoredGroup


class Engine:
    """Answers every prompt with its own tokens; remembers the batches it was given."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple] = {}
        self.queue = SimpleNamespace(remote=lambda number, *batch: self.batches.__setitem__(number, batch))
        self.generate = SimpleNamespace(remote=self.answer)

    def answer(self, number: int) -> dict[str, np.ndarray]:
        tokens, cu_seqlens, sampling = self.batches[number][:3]
        each = [tokens[a:b] for a, b in itertools.pairwise(cu_seqlens) for _ in range(sampling.num_samples)]
        total = sum(map(len, each))
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *each]),
            "logprobs": np.zeros(total, np.float32),
            "policy_versions": np.zeros(total, np.int32),
            "cu_seqlens": np.concatenate(([0], np.cumsum([len(tokens) for tokens in each]))).astype(np.int64),
            "finish_reasons": np.zeros(len(each), np.int8),
        }


def prompt(index: int) -> Prompt:
    return Prompt(id=(0, index), tokens=np.full(index + 1, index, np.int32), text="", verifiers=(), ground_truths=())


def controller(keep, *, num_engines: int = 1, **settings) -> Controller:
    """Four prompts a step, two samples each; prompt i has i + 1 tokens."""
    config = from_values(
        {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 2, "response_length": 64, **settings}
    )
    numbers = itertools.count()

    def next_prompts(n: int) -> list[Prompt]:
        return [prompt(i) for i in itertools.islice(numbers, n)]

    def score(groups):
        return [ScoredGroup(group=group, scores=(Score(reward=0.0), Score(reward=1.0))) for group in groups]

    return Controller(
        config,
        SimpleNamespace(engines=[Engine() for _ in range(num_engines)], get=lambda calls, *_: calls),
        next_prompts=next_prompts,
        decode=lambda tokens: ["" for _ in tokens],
        score=score,
        keep=keep,
        stop_token_ids=(),
    )


def indices(groups) -> list[int]:
    return [scored.group.prompt.id[1] for scored in groups]


@pytest.mark.parametrize("num_engines", [1, 3])
def test_groups_come_in_the_order_of_their_prompts(num_engines: int) -> None:
    """Arrival order would make a run depend on the speed of its engines."""
    control = controller(lambda groups: [True] * len(groups), num_engines=num_engines)
    for step in range(2):
        rollouts = control.next_batch().result()
        assert indices(rollouts.groups) == [4 * step + i for i in range(4)] and rollouts.dropped == []
        assert all(
            len(completion.tokens) == len(g.group.prompt.tokens)
            for g in rollouts.groups
            for completion in g.group.completions
        )


def test_without_active_sampling_a_dropped_group_makes_the_batch_smaller() -> None:
    """And the next step starts with fresh prompts."""
    control = controller(lambda groups: [i % 2 == 0 for i in indices(groups)])
    rollouts = control.next_batch().result()
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2], [1, 3])
    assert indices(control.next_batch().result().groups) == [4, 6]


def test_active_sampling_fills_the_batch() -> None:
    """The gradient's noise should not grow as the policy solves more prompts."""
    control = controller(
        lambda groups: [i % 2 == 0 for i in indices(groups)], active_sampling=True, filter_zero_std_samples=True
    )
    rollouts = control.next_batch().result()
    assert (indices(rollouts.groups), indices(rollouts.dropped)) == ([0, 2, 4, 6], [1, 3, 5])


def test_active_sampling_gives_up_after_its_rounds() -> None:
    """A policy that solves everything would otherwise sample for ever."""
    control = controller(
        lambda groups: [False] * len(groups),
        active_sampling=True,
        filter_zero_std_samples=True,
        active_sampling_max_rounds=3,
    )
    rollouts = control.next_batch().result()
    assert rollouts.groups == [] and indices(rollouts.dropped) == list(range(12))


def test_an_evaluation_keeps_every_group() -> None:
    """Accuracy over the prompts that are neither all right nor all wrong is no accuracy."""
    control = controller(lambda groups: [False] * len(groups), eval_pass_at_k=2)
    rollouts = control.evaluate(control.next_prompts(5)).result()
    assert indices(rollouts.groups) == [0, 1, 2, 3, 4] and rollouts.dropped == []


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
    control = controller(lambda groups: [True] * len(groups), **{"temperature": 0.7, "eval_pass_at_k": 2, **settings})
    control.evaluate(control.next_prompts(3)).result()
    control.next_batch().result()
    asked, trained = (control.cluster.engines[0].batches[number][2] for number in (0, 1))
    assert (asked.num_samples, asked.max_tokens, asked.temperature, asked.top_p) == expected
    assert (trained.num_samples, trained.max_tokens, trained.temperature, trained.top_p) == (2, 64, 0.7, 1.0)


def test_without_stop_strings_engines_draw_from_one_stream() -> None:
    """One generator a request is vLLM's slow path."""
    control = controller(lambda groups: [True] * len(groups))
    control.next_batch().result()
    assert len(control.cluster.engines[0].batches[0]) == 3


def test_with_stop_strings_every_prompt_has_its_own_seed_wherever_it_is_sampled() -> None:
    """How long an ended row stays in the batch is a matter of milliseconds, and must change nobody's samples."""
    seeds = {}
    for num_engines in (1, 3):
        control = controller(lambda groups: [True] * len(groups), num_engines=num_engines, stop_strings=["</answer>"])
        control.next_batch().result()
        control.evaluate([prompt(i) for i in range(4)]).result()
        batches = [engine.batches for engine in control.cluster.engines]
        assert all(batch[0][2].stop_strings == batch[1][2].stop_strings == ("</answer>",) for batch in batches)
        seeds[num_engines] = [np.concatenate([batch[number][3] for batch in batches]).tolist() for number in (0, 1)]
    assert seeds[1] == seeds[3]
    trained, evaluated = seeds[1]
    assert len({*trained, *evaluated}) == 8


def test_seeds_of_prompts_differ_between_runs_epochs_and_rows() -> None:
    """Samples of one prompt take neighbouring seeds, so that prompts must lie far apart."""
    prompts = [
        Prompt(id=(e, i), tokens=np.zeros(1, np.int32), text="", verifiers=(), ground_truths=())
        for e in range(3)
        for i in range(40)
    ]
    seeds = np.sort(
        np.concatenate([prompt_seeds(run, prompts, stream) for run in (1, 2) for stream in (0, EVALUATION)])
    )
    assert seeds.dtype == np.int64 and seeds[0] >= 0 and seeds[-1] < 2**62
    assert np.diff(seeds).min() > 10_000
