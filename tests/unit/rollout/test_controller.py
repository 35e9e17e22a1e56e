"""The controller with engines that answer at once: who is sampled, kept and sampled in place of others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mgrpo.config import from_values
from mgrpo.rollout.controller import Controller
from mgrpo.types import Prompt, Score, ScoredGroup


class Engine:
    """Answers every prompt with its own tokens; remembers the batches it was given."""

    def __init__(self) -> None:
        self.batches: dict[int, tuple] = {}
        self.queue = SimpleNamespace(remote=lambda number, *batch: self.batches.__setitem__(number, batch))
        self.generate = SimpleNamespace(remote=self.answer)

    def answer(self, number: int) -> dict[str, np.ndarray]:
        tokens, cu_seqlens, sampling = self.batches[number]
        each = [tokens[a:b] for a, b in itertools.pairwise(cu_seqlens) for _ in range(sampling.num_samples)]
        total = sum(map(len, each))
        return {
            "tokens": np.concatenate([np.zeros(0, np.int32), *each]),
            "logprobs": np.zeros(total, np.float32),
            "policy_versions": np.zeros(total, np.int32),
            "cu_seqlens": np.concatenate(([0], np.cumsum([len(tokens) for tokens in each]))).astype(np.int64),
            "finish_reasons": np.zeros(len(each), np.int8),
        }


def controller(keep, *, num_engines: int = 1, **settings) -> Controller:
    """Four prompts a step, two samples each; prompt i has i + 1 tokens."""
    config = from_values(
        {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 2, "response_length": 64, **settings}
    )
    numbers = itertools.count()

    def next_prompts(n: int) -> list[Prompt]:
        indices = itertools.islice(numbers, n)
        return [
            Prompt(id=(0, i), tokens=np.full(i + 1, i, np.int32), text="", verifiers=(), ground_truths=())
            for i in indices
        ]

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
    control = controller(lambda groups: [False] * len(groups))
    prompts = control.next_prompts(5)
    rollouts = control.evaluate(prompts, num_samples=3, temperature=0.5).result()
    assert indices(rollouts.groups) == [0, 1, 2, 3, 4] and rollouts.dropped == []
    assert control.cluster.engines[0].batches[0][2].temperature == 0.5
