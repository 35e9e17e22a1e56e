"""A step's batch: every completion of every group that is trained on, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mgrpo.layout import Layout
from mgrpo.packing import from_slice
from mgrpo.parallel import backend
from mgrpo.run.records import Rollouts
from mgrpo.types import Lesson, ScoredGroup
from tests.builders import completion, prompt, scored_group, teacher_scores
from tests.unit.packing.test_document import equal_scores
from tests.unit.run.producing import config

if TYPE_CHECKING:
    from mgrpo.run.records import Batch


def group(number: int, rewards: tuple[float, float] = (0.0, 1.0)) -> ScoredGroup:
    """Two completions whose tokens no other group has."""
    completions = [completion(range(100 * number + 10 * i, 100 * number + 10 * i + 2 + i)) for i in range(2)]
    return scored_group(rewards, completions=completions, of=prompt([number, number], id=(0, number)))


def batch(num_groups: int, num_dropped: int = 0, extra: Sequence[ScoredGroup] = (), **settings: object) -> Batch:
    backend.install()  # before the first import of Megatron
    from mgrpo.run.produce.step_batch import make_batch

    groups = [group(number) for number in range(num_groups)]
    dropped = [group(50 + number, (1.0, 1.0)) for number in range(num_dropped)]
    return make_batch(
        Rollouts(groups=[*groups, *extra], dropped=dropped),
        config(**settings),
        layout=Layout(world_size=2),
        hidden=64,
        reward_weights={},
        policy_version=3,
    )


def responses(own: Batch) -> list[tuple[int, ...]]:
    """The response tokens of every sequence in the packs of both data-parallel ranks."""
    return sorted(
        tuple(pack.targets[a:b].tolist())
        for part in own.slices
        for mini_batch in from_slice(own.index, part.filled())
        for pack in mini_batch
        for a, b in zip(pack.response_cu_seqlens[:-1], pack.response_cu_seqlens[1:], strict=True)
    )


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_every_completion_is_trained_on_once(num_mini_batches: int, share_prompts: bool) -> None:
    """One that is lost or doubled changes the objective, and no metric shows it."""
    own = batch(5, 2, num_mini_batches=num_mini_batches, shared_prompt_packing=share_prompts)
    expected = [tuple(c.tokens.tolist()) for number in range(5) for c in group(number).group.completions]
    assert responses(own) == sorted(expected)
    assert own.lengths is not None and own.lengths.responses == sum(map(len, expected))
    assert [tuple(sample.tokens.tolist()) for sample in own.samples] == expected


def test_dropped_groups_count_as_sampled_and_are_not_trained_on() -> None:
    """Without any the run would end: it takes an empty batch for "every prompt is solved"."""
    assert batch(3, 2).num_sampled == 5
    only_dropped = batch(0, 4)
    assert only_dropped.num_sampled == 4 and responses(only_dropped) == []
    assert batch(0).num_sampled == 0


def test_the_batch_remembers_which_weights_sampled_it() -> None:
    """Its tokens and log-probabilities belong to that policy."""
    assert batch(1).policy_version == 3


@pytest.mark.parametrize("only", [True, False])
def test_teachers_and_their_words_reach_the_packs(only: bool) -> None:
    """And with distillation_only nothing that they have not judged is trained."""
    judged = group(7)
    rng = np.random.default_rng(0)
    completions = tuple(
        replace(own, taught=teacher_scores(len(own.tokens), 2, rng)) for own in judged.group.completions
    )
    prompt_of = replace(judged.group.prompt, teacher=1)
    judged = replace(
        judged,
        group=replace(judged.group, prompt=prompt_of, completions=completions),
        lessons=((Lesson(prompt=prompt_of.tokens),),) * 2,
    )
    own = batch(1, 0, teacher_model_name_or_path="x:A,y:B", distillation_only=only, extra=[judged])
    packs = [pack for part in own.slices for packs in from_slice(own.index, part.filled()) for pack in packs]
    found = {
        tuple(pack.targets[a:b].tolist()): (teacher, pack.taught.part(slice(a, b)), pack.loss_mask[a:b].tolist())
        for pack in packs
        for teacher, a, b in zip(
            pack.teachers.tolist(), pack.response_cu_seqlens[:-1], pack.response_cu_seqlens[1:], strict=True
        )
    }
    assert len(found) == 4
    for sampled in completions:
        teacher, scores, mask = found[tuple(sampled.tokens.tolist())]
        assert teacher == 1 and equal_scores(scores, sampled.taught)
        assert mask == (~np.isnan(sampled.taught.logprobs)).tolist()
    for sampled in group(0).group.completions:
        teacher, scores, mask = found[tuple(sampled.tokens.tolist())]
        assert teacher == -1 and np.isnan(scores.logprobs).all() and mask == [not only] * len(mask)
    assert any(sample.advantage for sample in own.samples) != only
