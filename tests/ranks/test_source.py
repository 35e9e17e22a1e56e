"""The source on rank 0 and its silent twin: the same batches, the same end."""

from __future__ import annotations

import numpy as np

from mgrpo.packing import from_slice
from tests.ranks import source_cases

FOUR_STEPS = {"total_episodes": 4 * 8}


def test_every_rank_gets_its_part_of_the_same_batches(run_ranks):
    """Ranks that take another's part train on some samples twice; with another index they wait in other collectives."""
    rank_0, other = (
        [batch for batch, _ in drawn] for drawn in run_ranks(2, source_cases.draw, settings=FOUR_STEPS, steps=4)
    )
    assert [index for index, _ in rank_0] == [index for index, _ in other]
    assert [index["num_sampled"] for index, _ in rank_0] == [("int64", [4])] * 4
    for (index, own), (_, others) in zip(rank_0, other, strict=True):
        arrays = {name: np.array(values, dtype) for name, (dtype, values) in index.items()}
        packs = [from_slice(arrays, np.frombuffer(data, np.uint8)) for data in (own, others)]
        trained = [[int(i) for row in mini_batches for pack in row for i in pack.samples] for mini_batches in packs]
        assert all(trained) and sorted(trained[0] + trained[1]) == list(range(8))
        assert arrays["num_sequences"].tolist() == [8]


def test_there_is_no_batch_when_every_prompt_is_solved(run_ranks):
    """Twenty prompts of four per step: the sixth step has none, and every rank must leave the loop there."""
    settings = {"total_episodes": 10 * 8, "no_resampling_pass_rate": 0.9}
    for drawn in run_ranks(2, source_cases.draw, settings=settings, steps=6, solves=True):
        assert [batch is not None for batch, _ in drawn] == [True] * 5 + [False]


def test_the_next_prompts_are_queued_ahead_but_not_before_an_evaluation_or_the_end(run_ranks):
    """An evaluation would sample them with it, with weights that are a step too old."""
    settings = FOUR_STEPS | {"local_eval_every": 2}
    rank_0, _ = run_ranks(2, source_cases.draw, settings=settings, steps=4)
    assert [submitted for _, submitted in rank_0] == [2, 2, 4, 4]
    rank_0, _ = run_ranks(2, source_cases.draw, settings=FOUR_STEPS, steps=4)
    assert [submitted for _, submitted in rank_0] == [2, 3, 4, 4]


def test_an_evaluation_is_rank_0s(run_ranks):
    """The others have nothing to do with it but to wait."""
    assert run_ranks(2, source_cases.evaluate) == [["a3", "a3", "b3"], None]


def test_a_stopped_step_is_aborted_and_sampled_again_after_a_resume(run_ranks):
    """A generation may take an hour, and the prompts of a step that was not trained must not be lost."""
    rank_0, other = run_ranks(2, source_cases.stop_in_the_second_step)
    assert rank_0["is_stopped"] and other["is_stopped"]
    assert rank_0["is_aborted"] and not other["is_aborted"]
    before, after = rank_0["states"]
    assert before == after and other["states"] == ({}, {})
    assert rank_0["resumed"] == [4, 5, 6, 7]
