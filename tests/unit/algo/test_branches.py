"""Completions whose turns were sampled from contexts of their own: what is trained of each branch, and what it weighs."""

from __future__ import annotations

import functools
import itertools
from typing import get_args

import numpy as np
import pytest
import torch

from mgrpo.algo import denominators, policy_loss
from mgrpo.algo.credit.turn_credit import TurnCredit
from mgrpo.algo.training_samples import train_samples
from mgrpo.config.loss import Aggregation
from mgrpo.types import Completion, ScoredGroup, TrainSample
from tests import builders
from tests.unit.algo.loss_cases import RESPONSE_LENGTH, batch, loss_config

samples_of = functools.partial(train_samples, normalization="centered", ddof=0, eps=0.0)


def with_branches(**fields: object) -> Completion:
    """Three turns, of which the second begins a branch and the third follows it there."""
    branches = (builders.branch(0, 2), builders.branch(3, 7, [5, 6, 8, 9]))
    record = builders.trajectory("1101011", branches=branches, **fields)
    return builders.completion(
        range(10, 17), logprobs=np.arange(-7, 0), version=[4, 4, 0, 5, 0, 6, 6], trajectory=record
    )


def group(*rewards: float, **fields: object) -> ScoredGroup:
    others = [builders.completion(3) for _ in rewards[1:]]
    return builders.scored_group(rewards, completions=[with_branches(**fields), *others])


def values(array: np.ndarray | None) -> list | None:
    return None if array is None else array.tolist()


def test_each_branch_is_a_sample_after_its_own_context() -> None:
    """Trained after anything else, a token's probability would not be that of the policy that sampled it."""
    first, second, other = samples_of([group(1.0, 0.0)], policy_version=6)
    assert [sample.prompt_tokens.tolist() for sample in (first, second)] == [[5, 6], [5, 6, 8, 9]]
    assert [sample.tokens.tolist() for sample in (first, second)] == [[10, 11], [13, 14, 15, 16]]
    assert [values(sample.is_sampled) for sample in (first, second)] == [None, [True, False, True, True]]
    assert [sample.loss_mask.tolist() for sample in (first, second)] == [[True] * 2, [True, False, True, True]]
    assert [sample.rollout_logprobs.tolist() for sample in (first, second)] == [[-7, -6], [-4, 0, -2, -1]]
    assert [values(sample.ages) for sample in (first, second)] == [[2, 2], [1, 0, 0, 0]]
    assert [(sample.advantage, sample.group, sample.continues) for sample in (first, second, other)] == [
        (0.5, 0, False),
        (0.5, 0, True),
        (-0.5, 0, False),
    ]


def test_every_sampled_token_is_trained_once() -> None:
    """Trained again where it is context, an early turn would weigh more than a late one."""
    parts = samples_of([group(1.0, 0.0)])[:2]
    trained = [token for part in parts for token in part.tokens[part.loss_mask].tolist()]
    completion = with_branches()
    assert trained == completion.tokens[completion.loss_mask].tolist()


def test_turns_of_branches_have_advantages_of_their_own() -> None:
    """Returns 1 + 3 + 4, 3 + 4 and 4; 2 for the other. Their mean is 5.25."""
    turns = (builders.turn(0, 2, reward=1.0), builders.turn(3, 4, reward=3.0), builders.turn(5, 7))
    first, second, _ = samples_of([group(4.0, 2.0, turns=turns)], turn_credit=TurnCredit())
    assert first.token_advantages.tolist() == [2.75, 2.75]
    assert second.token_advantages.tolist() == [1.75, 1.75, -1.25, -1.25]
    # Metrics and traces show one of the completion.
    assert first.advantage == second.advantage == pytest.approx((2 * 2.75 + 1.75 - 2 * 1.25) / 5)


def test_branches_of_a_completion_without_a_score_train_nothing() -> None:
    first, second, _ = samples_of([group(float("nan"), 1.0)])
    assert not first.loss_mask.any() and not second.loss_mask.any() and second.is_sampled.sum() == 3


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("seed", range(3))
def test_branches_weigh_together_what_one_sequence_does(aggregation: Aggregation, seed: int) -> None:
    """Else a completion of many turns counts as many completions, and its short turns more than its long ones."""
    settings = {"loss_denominator": "50"} if aggregation == "constant" else {}
    config = loss_config(aggregation=aggregation, local_batch_size=2, beta=0.1, **settings)
    whole = batch(seed)
    whole["advantages"] = whole["advantages"].repeat_interleave(whole["cu_seqlens"].diff().long())
    ends = whole["cu_seqlens"].tolist()
    # The sequences have 3, 1, 7, 2, 5 and 4 tokens. A branch may be without any that is trained.
    cuts = sorted({*ends, ends[0] + 1, ends[2] + 2, ends[2] + 5, ends[4] + 3})
    completions = np.searchsorted(ends, cuts[:-1], side="right").astype(np.int32)

    def gradient(cuts: list[int], completions: np.ndarray, per_batch: int) -> list[float]:
        """Of the sum over micro-batches of so many sequences."""
        count = len(cuts) - 1
        numbers = np.arange(count, dtype=np.int32)
        trained = np.array([whole["loss_mask"][a:b].sum() for a, b in itertools.pairwise(cuts)], np.int32)
        found = denominators(numbers, completions, trained, config=config, response_length=RESPONSE_LENGTH)
        logprobs = whole["logprobs"].clone().requires_grad_()
        for start in range(0, count, per_batch):
            own = numbers[start : start + per_batch]
            a, b = cuts[own[0]], cuts[own[-1] + 1]
            rest = {name: values[a:b] for name, values in whole.items() if name not in ("logprobs", "cu_seqlens")}
            policy_loss(
                logprobs[a:b],
                cu_seqlens=torch.tensor(cuts[own[0] : own[-1] + 2]).int() - a,
                config=config,
                denominator=found if isinstance(found, float) else torch.from_numpy(found[own]).double(),
                **rest,
            ).loss.backward()
        return logprobs.grad.tolist()

    expected = gradient(ends, np.arange(len(ends) - 1, dtype=np.int32), 99)
    assert any(expected)
    assert gradient(cuts, completions, 99) == pytest.approx(expected, rel=1e-6)
    assert gradient(cuts, completions, 2) == pytest.approx(expected, rel=1e-6)


def test_denominators_of_branches_by_hand() -> None:
    """Completion 0 has branches of 1 and 3 trained tokens, completion 1 one of 2: shares 1/4, 3/4 and 1 of 2 completions."""
    numbers, completions, trained = (np.array(own, np.int32) for own in ([0, 1, 2], [0, 0, 1], [1, 3, 2]))

    def found(**settings: object) -> list[float] | float:
        config = loss_config(**settings)
        own = denominators(numbers, completions, trained, config=config, response_length=10)
        return own if isinstance(own, float) else own.tolist()

    assert found(aggregation="seq_mean") == pytest.approx([8, 8 / 3, 2])
    assert (found(aggregation="luspo"), found(aggregation="dr_grpo"), found(aggregation="token")) == (2, 20, 6)
    assert found(aggregation="local_token", local_batch_size=1) == [8, 8, 4]


def test_no_sample_is_changed_where_nothing_branches() -> None:
    samples: list[TrainSample] = samples_of([builders.scored_group([1.0, 0.0])])
    assert [sample.continues for sample in samples] == [False, False]
