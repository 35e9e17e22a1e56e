"""Packing and balancing lengths: properties over random inputs, and a few worked examples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.packing import balance, pack

# No deadline: a shared machine is slow now and then. No database: a test leaves no files.
property_test = settings(database=None, deadline=None, max_examples=150)

LIMIT = 32
lengths_of_documents = st.lists(st.integers(1, LIMIT - LIMIT % 5), max_size=60)
multiples = st.sampled_from([1, 2, 4, 5, 8])


def rounded_up(size: int, multiple_of: int) -> int:
    return -(-size // multiple_of) * multiple_of


@property_test
@given(lengths_of_documents, multiples)
def test_packs_hold_every_document_once_within_the_limit(lengths, multiple_of):
    """Dropped documents are lost samples; a pack over the limit is an out-of-memory error hours into a run."""
    packs = pack(lengths, LIMIT, multiple_of=multiple_of)
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    assert all(packs)
    for members in packs:
        assert rounded_up(sum(lengths[index] for index in members), multiple_of) <= LIMIT
    # First fit never leaves two packs that could have been one.
    sizes = sorted(sum(lengths[index] for index in members) for members in packs)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > LIMIT // multiple_of * multiple_of


def test_longest_documents_are_placed_first():
    """In input order these lengths take three packs: a third more forward passes."""
    assert pack([3, 4, 7, 6], 10) == [[0, 2], [1, 3]]


@property_test
@given(lengths_of_documents, multiples, st.integers(1, 5), st.integers(1, 4))
def test_balanced_packs_hold_every_document_once_with_equal_counts_on_all_ranks(
    lengths, multiple_of, dp, num_mini_batches
):
    """Unequal numbers of micro-batches hang pipeline and data-parallel collectives; lost documents waste generation."""
    plan = balance(lengths, LIMIT, dp=dp, num_mini_batches=num_mini_batches, multiple_of=multiple_of)
    assert len(plan) == num_mini_batches
    seen = []
    for ranks in plan:
        assert len(ranks) == dp
        assert len({len(micro_batches) for micro_batches in ranks}) == 1 and len(ranks[0]) >= 1
        members = [index for micro_batches in ranks for chosen in micro_batches for index in chosen]
        seen += members
        assert members or len(lengths) < num_mini_batches
        for micro_batches in ranks:
            for chosen in micro_batches:
                assert rounded_up(sum(lengths[index] for index in chosen), multiple_of) <= LIMIT
        tight = pack([lengths[index] for index in members], LIMIT, multiple_of=multiple_of)
        assert len(ranks[0]) <= max(1, -(-len(tight) // dp))
    assert sorted(seen) == list(range(len(lengths)))


@property_test
@given(lengths_of_documents, st.integers(1, 4))
def test_mini_batches_differ_by_at_most_one_document(lengths, num_mini_batches):
    """Optimizer steps of very different size: with a token mean, the tokens of the small one weigh many times as much."""
    plan = balance(lengths, LIMIT, dp=1, num_mini_batches=num_mini_batches)
    sizes = [sum(lengths[i] for chosen in ranks[0] for i in chosen) for ranks in plan]
    assert max(sizes) - min(sizes) <= max(lengths, default=0)


def test_ranks_share_the_tokens_evenly_instead_of_filling_packs():
    """Filling the first rank's pack to the brim would make the second wait for it."""
    [[left, right]] = balance([10] * 6, 50, dp=2)
    assert [sum(map(len, left)), sum(map(len, right))] == [3, 3]


@pytest.mark.parametrize("dp", [1, 2])
def test_tight_lengths_fall_back_to_first_fit(dp):
    """One more micro-batch than necessary is one more forward and backward on every rank."""
    lengths = [6, 5, 4, 3, 2]  # 6+4 and 5+3+2 fill two packs of 10; spread evenly, 5+4 and 6+3 leave no room for the 2
    ranks = balance(lengths, 10, dp=dp)[0]
    assert sorted(chosen for micro_batches in ranks for chosen in micro_batches) == [[0, 2], [1, 3, 4]]


def test_ranks_without_documents_get_dummy_packs():
    """A last batch smaller than the number of ranks would leave some of them out of the collectives."""
    assert balance([5], 8, dp=3) == [[[[0]], [[]], [[]]]]
    assert balance([], 8, dp=2, num_mini_batches=2) == [[[[]], [[]]], [[[]], [[]]]]


def test_a_document_that_does_not_fit_is_an_error_that_names_it():
    """Cutting or skipping it would train on something else than what was sampled."""
    with pytest.raises(ValueError, match="document 1 has 9 tokens, more than the 8"):
        pack([3, 9], 8)
    with pytest.raises(ValueError, match="document 0 has 10 tokens, more than the 9"):
        balance([10], 11, dp=2, multiple_of=3)
    with pytest.raises(ValueError, match="pack_length=2"):
        pack([1], 2, multiple_of=4)


@property_test
@given(lengths_of_documents)
def test_plans_are_repeatable(lengths):
    """A resumed run would pack, sum and round differently from the uninterrupted one."""
    assert balance(lengths, LIMIT, dp=3, num_mini_batches=2) == balance(list(lengths), LIMIT, dp=3, num_mini_batches=2)
