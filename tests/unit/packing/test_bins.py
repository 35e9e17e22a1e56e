"""Lengths into packs: properties over random inputs, the fewest packs by an oracle, and a few worked examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.packing import pack
from mgrpo.packing.bins import fewest_packs, lower_bound

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
    packs = pack(lengths, LIMIT, multiple_of=multiple_of)
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    assert all(packs)
    for members in packs:
        assert rounded_up(sum(lengths[index] for index in members), multiple_of) <= LIMIT


@settings(property_test, max_examples=300)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_no_packing_has_fewer_packs(lengths):
    """Every pack more is a forward and backward more, on every rank."""
    fewest = fewest_by_trying_everything(lengths, 20)
    assert lower_bound(lengths, 20) <= fewest
    assert len(pack(lengths, 20)) == fewest


@pytest.mark.parametrize("seed", range(4))
def test_packs_without_a_gap_are_found(seed):
    """Lengths cut from full packs: nothing may be wasted, which longest-first heuristics do not manage."""
    rng = np.random.default_rng(seed)
    lengths = []
    for _ in range(8):
        cuts = np.sort(rng.choice(np.arange(1, 1000), 4, replace=False))
        lengths += np.diff([0, *cuts, 1000]).tolist()
    assert len(pack(rng.permutation(lengths).tolist(), 1000)) == 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [64, 512])
def test_long_tails_need_hardly_more_packs_than_the_bound(count, seed):
    """Best fit alone misses the bound on about every second step of 512 completions with a 32k tail."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(7000), 0.9, count), 64, 32768).astype(int).tolist()
    assert len(pack(lengths, 35840)) <= lower_bound(lengths, 35840) + 1


def test_longest_documents_are_placed_first():
    """In input order these lengths take three packs: a third more forward passes."""
    assert pack([3, 4, 7, 6], 10) == [[0, 2], [1, 3]]


def test_search_beats_best_fit():
    """Longest first, 6 4 | 5 3 | 2 2 2 ... leaves a gap of 2 beside the 5: three packs where two do."""
    lengths = [5, 4, 4, 3, 2, 2]
    assert sorted(sorted(lengths[index] for index in members) for members in pack(lengths, 10)) == [
        [2, 3, 5],
        [2, 4, 4],
    ]


@pytest.mark.parametrize(
    ("lengths", "fewest"),
    [
        ([], 0),
        ([0, 0], 1),
        ([6, 6, 6], 3),  # more than half a pack each
        ([7, 7, 4, 4, 4], 4),  # 26 tokens in packs of 10, but beside a 7 there is no room for a 4
        ([3] * 10, 4),  # 30 tokens, but no pack takes more than three
    ],
)
def test_lower_bound_of_hand_worked_lengths(lengths, fewest):
    """A bound that is too high ends the search too early, one that is too low makes it look for what does not exist."""
    assert lower_bound(lengths, 10) == fewest


def test_packs_count_in_steps_of_the_ranks():
    """Five packs on four ranks run as eight, so that a search for four is worth while and one for five to seven is not."""
    lengths = [5, 4, 4, 3, 2, 2, 10, 10]
    assert len(fewest_packs(range(8), lengths, 10, count_in=4)) == 4
    assert len(fewest_packs(range(8), lengths, 10, count_in=5)) == 5


def test_thousands_of_documents_are_packed_without_the_search():
    """A step must not wait seconds for its packs; best fit of this many is at most a percent over the bound."""
    lengths = np.random.default_rng(0).integers(100, 9000, 8000).tolist()
    packs = pack(lengths, 16384)
    assert sorted(index for members in packs for index in members) == list(range(8000))
    assert len(packs) <= 1.01 * lower_bound(lengths, 16384)


def test_a_document_that_does_not_fit_is_an_error_that_names_it():
    """Cutting or skipping it would train on something else than what was sampled."""
    with pytest.raises(ValueError, match="document 1 has 9 tokens, more than the 8"):
        pack([3, 9], 8)
    with pytest.raises(ValueError, match="pack_length=2"):
        pack([1], 2, multiple_of=4)
