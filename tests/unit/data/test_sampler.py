"""Order of prompts: complete, shuffled, and the same after a restart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.data.sampler import Sampler


def test_an_epoch_holds_every_prompt_once() -> None:
    """A prompt drawn twice or never is a different data set."""
    sampler = Sampler(10, seed=1)
    taken = [prompt for _ in range(10) for prompt in sampler.take(3)]
    for epoch in range(3):
        assert sorted(index for number, index in taken if number == epoch) == list(range(10))
    orders = [[index for number, index in taken if number == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(10))
    assert len(set(taken)) == 30


@pytest.mark.parametrize("num_taken", range(9))
def test_a_resumed_sampler_equals_the_uninterrupted_one(num_taken: int) -> None:
    """Otherwise a restarted run trains on other data than the run it continues."""
    whole = Sampler(7, seed=3)
    expected = [whole.take(3) for _ in range(12)]
    first = Sampler(7, seed=3)
    before = [first.take(3) for _ in range(num_taken)]
    state = json.loads(json.dumps(first.state_dict()))
    second = Sampler(7, seed=3)
    second.take(5)
    second.load_state_dict(state)
    assert before + [second.take(3) for _ in range(12 - num_taken)] == expected


def test_the_order_depends_on_the_seed_alone() -> None:
    """Steps of another size must meet the prompts in the same order; another seed in another."""
    assert Sampler(50, seed=1).take(120) == [
        prompt for s in [Sampler(50, seed=1)] for _ in range(12) for prompt in s.take(10)
    ]
    assert Sampler(50, seed=1).take(50) != Sampler(50, seed=2).take(50)


def test_the_order_is_pinned() -> None:
    """A changed stream would break the resume of every saved run."""
    assert Sampler(8, seed=1).take(10) == PINNED


def test_a_step_larger_than_the_data_runs_over_epochs() -> None:
    """Small data sets are how people start."""
    taken = Sampler(4, seed=0).take(10)
    assert [epoch for epoch, _ in taken] == [0] * 4 + [1] * 4 + [2] * 2
    assert len(set(taken)) == 10


def test_a_state_of_other_data_is_refused() -> None:
    """Going on at the same place in another order would repeat some prompts and skip others."""
    state = Sampler(8, seed=1).state_dict()
    with pytest.raises(ValueError, match="num_prompts=8, this run has 9"):
        Sampler(9, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=1, this run has 2"):
        Sampler(8, seed=2).load_state_dict(state)


def test_nothing_to_sample_is_an_error() -> None:
    """It would never return."""
    with pytest.raises(ValueError, match="at least one prompt"):
        Sampler(0, seed=1)


PINNED = [(0, 1), (0, 6), (0, 0), (0, 3), (0, 7), (0, 4), (0, 2), (0, 5), (1, 3), (1, 2)]


def test_excluded_rows_never_come_again_and_the_others_keep_their_order() -> None:
    """A prompt that is always solved teaches nothing; dropping it must not reshuffle the rest of a resumed run."""
    plain, sampler = Sampler(10, seed=3), Sampler(10, seed=3)
    assert sampler.take(4) == plain.take(4)
    sampler.exclude({2, 5, 7})
    assert sampler.num_excluded == 3
    expected = [prompt for prompt in plain.take(40) if prompt[1] not in {2, 5, 7}]
    assert sampler.take(5) + sampler.take(5) + sampler.take(7) == expected[:17]
    assert len(sampler.take(20)) == 7, "a batch never holds more prompts than there are left"

    resumed = Sampler(10, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.take(5) == sampler.take(5)


def test_with_every_row_excluded_there_is_nothing_to_take() -> None:
    """An endless loop over an empty epoch would hang the run silently."""
    sampler = Sampler(3, seed=0)
    sampler.exclude(range(3))
    assert sampler.take(5) == []


def test_without_shuffling_epochs_are_in_the_order_of_the_data() -> None:
    """For data that are a curriculum."""
    sampler = Sampler(4, seed=7, shuffle=False)
    assert sampler.take(6) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    sampler.exclude([2])
    resumed = Sampler(4, seed=7, shuffle=False)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.take(3) == sampler.take(3) == [(1, 3), (2, 0), (2, 1)]
    with pytest.raises(ValueError, match="saved data order has shuffle_dataset=False, this run has True"):
        Sampler(4, seed=7).load_state_dict(sampler.state_dict())


def test_states_of_before_shuffling_was_a_setting_are_read() -> None:
    """A run that began then goes on."""
    sampler = Sampler(8, seed=1)
    sampler.take(3)
    state = sampler.state_dict()
    del state["shuffle"]
    resumed = Sampler(8, seed=1)
    resumed.load_state_dict(state)
    assert resumed.take(9) == sampler.take(9)


def test_a_state_does_not_change_when_the_sampler_goes_on() -> None:
    """It is written by a thread while the next rows are excluded."""
    sampler = Sampler(8, seed=1)
    sampler.exclude({1})
    state = sampler.state_dict()
    before = json.dumps(state)
    sampler.take(3)
    sampler.exclude({2, 3})
    assert json.dumps(state) == before


@settings(deadline=None)
@given(data=st.data(), num_prompts=st.integers(1, 40), seed=st.integers(0, 3))
def test_exclusion_is_leaving_rows_out_of_the_stream(data: st.DataObject, num_prompts: int, seed: int) -> None:
    """Compared with a stream that is filtered one prompt at a time."""
    sampler, order, position, excluded = Sampler(num_prompts, seed), [], 0, set()
    plain = Sampler(num_prompts, seed)
    for _ in range(data.draw(st.integers(1, 8))):
        new = data.draw(st.sets(st.integers(0, num_prompts - 1), max_size=3))
        sampler.exclude(new)
        excluded |= new
        wanted = data.draw(st.integers(0, num_prompts))
        expected: list[tuple[int, int]] = []
        while len(expected) < min(wanted, num_prompts - len(excluded)):
            if position == len(order):
                order += plain.take(num_prompts)
            if order[position][1] not in excluded:
                expected.append(order[position])
            position += 1
        assert sampler.take(wanted) == expected


def test_nearly_all_of_a_million_prompts_may_be_excluded() -> None:
    """Towards its end a run that drops what is solved looks for a few prompts among many; each step waits for it."""
    sampler = Sampler(10**6, seed=1)
    left = set(range(0, 10**6, 50_000))
    sampler.exclude(set(range(10**6)) - left)
    taken = sampler.take(20)
    assert {index for _, index in taken} == left and sampler.num_excluded == 10**6 - 20
    resumed = Sampler(10**6, seed=1)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.take(20) == sampler.take(20)
