"""Lengths into packs: properties over random inputs, their number against an oracle, and a few worked examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.packing import pack
from mgrpo.packing.bins import longest_first

# No deadline: a shared machine is slow now and then. No database: a test leaves no files.
property_test = settings(database=None, deadline=None, max_examples=150)

LIMIT = 32
lengths_of_documents = st.lists(st.integers(1, LIMIT - LIMIT % 5), max_size=60)
multiples = st.sampled_from([1, 2, 4, 5, 8])


def rounded_up(size: int, multiple_of: int) -> int:
    return -(-size // multiple_of) * multiple_of


def fewest_by_trying_everything(lengths: list[int], limit: int) -> int:
    """Every document into every pack or a new one; packs of equal size count as one. States after each document."""
    states = {()}
    for length in sorted(lengths, reverse=True):
        states = {
            tuple(sorted((*sizes[:number], size + length, *sizes[number + 1 :])))
            for sizes in states
            for number, size in enumerate((*sizes, 0))
            if size + length <= limit
        }
    return min(map(len, states))


@property_test
@given(lengths_of_documents, multiples)
def test_packs_hold_every_document_once_within_the_limit(lengths, multiple_of):
    """Dropped documents are lost samples; a pack over the limit is an out-of-memory error hours into a run."""
    packs = pack(lengths, LIMIT - LIMIT % multiple_of, multiple_of=multiple_of)
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    assert all(packs)
    for members in packs:
        assert rounded_up(sum(lengths[index] for index in members), multiple_of) <= LIMIT


@settings(property_test, max_examples=300)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_hardly_more_packs_than_necessary(lengths):
    """Every extra pack is another forward and backward on every rank. The bound is the proven one of first fit decreasing."""
    assert len(pack(lengths, 20)) <= fewest_by_trying_everything(lengths, 20) * 11 / 9 + 2 / 3


@property_test
@given(st.lists(st.integers(1, LIMIT), max_size=60))
def test_never_more_packs_than_next_fit(lengths):
    """Other trainers cut packs from the documents in order, which now and then leaves no gap where sorting does."""
    num_packs, room = 0, 0
    for length in lengths:
        if length > room:
            num_packs, room = num_packs + 1, LIMIT
        room -= length
    assert len(pack(lengths, LIMIT)) <= num_packs


def test_documents_that_fill_packs_in_their_order_stay_there():
    """Longest first, 5 4 | 4 3 2 | 2 takes three packs."""
    assert pack([5, 3, 2, 4, 4, 2], 10) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [64, 512])
def test_long_tails_need_hardly_more_packs_than_their_tokens(count, seed):
    """A step of completions with a 32k tail: all its tokens must be in packs, so no packing has fewer."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(7000), 0.9, count), 64, 32768).astype(int).tolist()
    assert len(pack(lengths, 35840)) <= -(-sum(lengths) // 35840) + 1


def test_longest_documents_are_placed_first():
    """In input order these lengths take three packs: a third more forward passes."""
    assert pack([3, 4, 7, 6], 10) == [[0, 2], [1, 3]]


def test_thousands_of_documents_fill_their_packs():
    """Many short documents leave no excuse for empty room: at most a percent over what their tokens need."""
    lengths = np.random.default_rng(0).integers(100, 9000, 8000).tolist()
    packs = pack(lengths, 16384)
    assert sorted(index for members in packs for index in members) == list(range(8000))
    assert len(packs) <= 1.01 * sum(lengths) / 16384


def test_a_document_that_does_not_fit_is_an_error_that_names_it():
    """Cutting or skipping it would train on something else than what was sampled."""
    with pytest.raises(ValueError, match="document 1 has 9 tokens, more than the 8"):
        pack([3, 9], 8)


@pytest.mark.parametrize(("pack_length", "rounded"), [(2, 4), (9, 12), (0, 4)])
def test_a_length_that_packs_cannot_be_padded_to_is_refused(pack_length, rounded):
    """Rounded here as well as by the layout, a pack could be longer or shorter than the memory was planned for."""
    with pytest.raises(ValueError, match=f"pack_length={pack_length} must be a multiple of 4.*use {rounded}"):
        pack([1], pack_length, multiple_of=4)


def test_longest_first_breaks_ties_by_index():
    """Packs would depend on the order in which documents are listed, and with it a run that is repeated."""
    assert longest_first([3, 1, 2, 0], [5, 5, 7, 5]) == [2, 0, 1, 3]
