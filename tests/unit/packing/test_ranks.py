"""Documents onto mini-batches, ranks and micro-batches: properties, hand-worked cases, and the long search."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mgrpo.packing import Cost, balance, mini_batches, pack
from tests.unit.packing import long_search

# No deadline: a shared machine is slow now and then. No database: a test leaves no files.
property_test = settings(database=None, deadline=None, max_examples=150)

LIMIT = 32
COST = Cost(a=1.0, b=0.1)
"""Attention outweighs the matrices from 10 tokens on."""
lengths_of_documents = st.lists(st.integers(1, LIMIT - LIMIT % 5), max_size=60)
multiples = st.sampled_from([1, 2, 4, 5, 8])


def rounded_up(size: int, multiple_of: int) -> int:
    return -(-size // multiple_of) * multiple_of


def costliest(ranks: list[list[list[int]]], lengths: list[int], cost: Cost) -> float:
    """a * len + b * len^2 over a rank's documents, of the rank with most."""
    return max(sum(cost.of(lengths[index]) for own in packs for index in own) for packs in ranks)


@property_test
@given(lengths_of_documents, multiples, st.integers(1, 5), st.integers(1, 4))
def test_balanced_packs_hold_every_document_once_with_equal_counts_on_all_ranks(
    lengths, multiple_of, dp, num_mini_batches
):
    """Unequal numbers of micro-batches hang pipeline and data-parallel collectives; lost documents waste generation."""
    pack_length = LIMIT - LIMIT % multiple_of
    plan = balance(lengths, pack_length, dp=dp, num_mini_batches=num_mini_batches, multiple_of=multiple_of, cost=COST)
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
        tight = pack([lengths[index] for index in sorted(members)], pack_length, multiple_of=multiple_of)
        assert len(ranks[0]) == max(1, -(-len(tight) // dp))
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize("dp", [1, 8, 16, 96, 600])
def test_no_token_is_dropped_at_any_number_of_ranks(dp):
    """Rounding packs down to a multiple of dp loses 42 % of 512 long answers at dp=96, and a mini-batch at random."""
    lengths = long_search.long_answers(np.random.default_rng(0), 512)
    plan = balance(lengths, 35840, dp=dp, num_mini_batches=3)
    assert len(plan) == 3
    assert sorted(i for ranks in plan for packs in ranks for own in packs for i in own) == list(range(512))
    for ranks in plan:
        assert len(ranks) == dp and len({len(packs) for packs in ranks}) == 1


@property_test
@given(lengths_of_documents, st.integers(1, 6))
def test_dummy_packs_only_where_documents_run_out(lengths, dp):
    """A dummy beside a pack of several documents is an idle rank, or memory that need not have been used."""
    ranks = balance(lengths, LIMIT, dp=dp, cost=COST)[0]
    for packs in ranks:
        sizes = sorted(map(len, packs))
        assert sizes[0] > 0 or sizes[-1] <= 1
    if len(lengths) >= dp:
        assert all(any(packs) for packs in ranks)


@settings(property_test, max_examples=400)
@given(lengths_of_documents, st.integers(1, 6))
# Full packs that happen to lie in order and be even; packing longest first finds worse ones that no swap mends.
@example([10, 17, 5, 9, 15, 8], 2)
def test_never_worse_than_next_fit(lengths, dp):
    """What the peer trains with needs no search at all: to lose against it would make ours a bad bargain."""
    ours = balance(lengths, LIMIT, dp=dp, cost=COST)[0]
    theirs = long_search.consecutive(long_search.next_fit(lengths, LIMIT), dp)
    assert len(ours[0]) <= len(theirs[0])
    if len(ours[0]) == len(theirs[0]):
        assert costliest(ours, lengths, COST) <= costliest(theirs, lengths, COST) * (1 + 1e-9)


@pytest.mark.parametrize("dp", [8, 32, 96])
@pytest.mark.parametrize("name", ["log-normal to 32k", "maths, mean 200", "constant 1000", "one giant, tiny"])
def test_costliest_rank_is_within_five_percent_of_a_long_search(name, dp):
    """All ranks wait for the costliest one at the end of every optimizer step."""
    lengths_of, pack_length = long_search.LENGTHS[name]
    lengths = lengths_of(np.random.default_rng(dp), 512)
    batch = long_search.Batch(lengths=lengths, pack_length=pack_length, dp=dp, cost=Cost())
    assert long_search.gap(batch, steps=100_000, seed=1) <= 0.05


@settings(property_test, max_examples=60)
@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=7), st.integers(2, 3))
def test_few_documents_are_near_the_best_of_all_assignments(lengths, dp):
    """With a handful of documents there is no average to hide a bad choice in."""
    ours = balance(lengths, 1000, dp=dp, cost=COST)[0]
    best = min(
        max(sum(COST.of(n) for n, r in zip(lengths, ranks, strict=True) if r == rank) for rank in range(dp))
        for ranks in itertools.product(range(dp), repeat=len(lengths))
    )
    assert costliest(ours, lengths, COST) <= 1.2 * best


def test_long_search_finds_what_was_hidden():
    """A search that cannot find the known best proves nothing about the distance to it."""
    lengths = [900, 100, 800, 200, 700, 300, 600, 400]
    batch = long_search.Batch(lengths=lengths, pack_length=1000, dp=4, cost=Cost(a=1, b=0))
    poor = [[[0], [1, 3]], [[2], [5]], [[4], [7]], [[6], []]]
    assert long_search.long_search(batch, poor, steps=20_000, seed=0) == 1000


def test_cost_grows_with_the_square_of_the_length():
    """Equal tokens are not equal work: attention makes one long document slower than many short ones."""
    lengths = [8, 5, 4, 3]
    assert balance(lengths, 16, dp=2, cost=Cost(a=1, b=0))[0] == [[[0, 3]], [[1, 2]]]  # 11 and 9 tokens
    # 8 + 8^2 / 4 = 24 for the long one, 11.25 + 8 + 5.25 = 24.5 for the others.
    assert balance(lengths, 16, dp=2, cost=Cost(a=1, b=0.25))[0] == [[[0]], [[1, 2, 3]]]


def test_default_cost_is_that_of_a_layer():
    """The ratio decides when a long document counts double: h = 4096 does at 24,576 tokens (6 h)."""
    assert Cost() == Cost.of_width(4096)
    assert Cost().of(24576) == pytest.approx(2 * 24576)
    # Operations of a layer: 24 s h^2 in its matrices, 4 s^2 h in its attention.
    h, s = 1024, 3000
    assert Cost.of_width(h).of(s) == pytest.approx((24 * s * h**2 + 4 * s**2 * h) / (24 * h**2))


def test_one_giant_has_a_rank_to_itself():
    """The others share the rest: nothing can make the giant's rank faster."""
    ranks = balance([30, 1, 1, 1, 1, 1, 1], LIMIT, dp=3, cost=COST)[0]
    assert ranks[0] == [[0]]
    assert sorted(len(packs[0]) for packs in ranks[1:]) == [3, 3]


def test_swaps_mend_what_the_limit_forces():
    """Packs without a gap leave no choice but to swap: 6 + 4 and 5 + 5 fill two packs, on each of two ranks."""
    lengths = [6, 6, 4, 4, 5, 5, 5, 5]
    ranks = balance(lengths, 10, dp=2, cost=COST)[0]
    assert [sorted(sum(lengths[i] for i in own) for own in packs) for packs in ranks] == [[10, 10], [10, 10]]
    assert costliest(ranks, lengths, COST) == pytest.approx(sum(map(COST.of, lengths)) / 2)


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_exchanges_even_out_nearly_full_packs(seed):
    """With 1 % of room in 16 packs few documents can move: first choices alone leave a rank up to 2 % over the mean."""
    rng = np.random.default_rng(seed)
    lengths = []
    for _ in range(16):
        cuts = np.sort(rng.choice(np.arange(1, 990), 3, replace=False))
        lengths += np.diff([0, *cuts, 990]).tolist()
    lengths = rng.permutation(lengths).tolist()
    cost = Cost(b=1 / 500)
    ranks = balance(lengths, 1000, dp=4, cost=cost)[0]
    assert [len(packs) for packs in ranks] == [4] * 4
    assert all(sum(lengths[index] for index in own) <= 1000 for packs in ranks for own in packs)
    assert costliest(ranks, lengths, cost) <= 1.009 * sum(map(cost.of, lengths)) / 4


def test_ranks_share_the_tokens_evenly_instead_of_filling_packs():
    """Filling the first rank's pack to the brim would make the second wait for it."""
    [[left, right]] = balance([10] * 6, 50, dp=2)
    assert [sum(map(len, left)), sum(map(len, right))] == [3, 3]


def test_micro_batches_of_a_rank_are_even_and_fall():
    """Ranks that wait for each other in every micro-batch would wait for a full one beside an empty one."""
    [[packs]] = balance([6, 5, 4, 3], 12, dp=1)
    assert packs == [[0, 3], [1, 2]]
    [[packs]] = balance([9, 3, 3, 3], 12, dp=1)
    assert packs == [[0], [1, 2, 3]]


@pytest.mark.parametrize("dp", [1, 2])
def test_tight_lengths_fall_back_to_the_fewest_packs(dp):
    """One more micro-batch than necessary is one more forward and backward on every rank."""
    lengths = [6, 5, 4, 3, 2]  # 6+4 and 5+3+2 fill two packs of 10; spread evenly, 5+4 and 6+3 leave no room for the 2
    ranks = balance(lengths, 10, dp=dp)[0]
    assert sorted(chosen for micro_batches in ranks for chosen in micro_batches) == [[0, 2], [1, 3, 4]]


def test_ranks_without_documents_get_dummy_packs():
    """A last batch smaller than the number of ranks would leave some of them out of the collectives."""
    assert balance([5], 8, dp=3) == [[[[0]], [[]], [[]]]]
    assert balance([], 8, dp=2, num_mini_batches=2) == [[[[]], [[]]], [[[]], [[]]]]


@property_test
@given(lengths_of_documents, st.integers(1, 4))
def test_mini_batches_differ_by_at_most_one_document(lengths, num_mini_batches):
    """Optimizer steps of very different size: with a token mean, the tokens of the small one weigh many times as much."""
    parts = mini_batches(lengths, num_mini_batches)
    assert len(parts) == num_mini_batches
    assert sorted(index for members in parts for index in members) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in members) for members in parts]
    assert max(sizes) - min(sizes) <= max(lengths, default=0)


def test_balance_trains_the_mini_batches_that_are_dealt():
    """Documents of another mini-batch would be trained by another optimizer step."""
    lengths = list(range(1, 25))
    plan = balance(lengths, LIMIT, dp=2, num_mini_batches=3)
    members = [sorted(i for packs in ranks for own in packs for i in own) for ranks in plan]
    assert members == mini_batches(lengths, 3)


def test_a_document_that_does_not_fit_is_an_error_that_names_it():
    """Cutting or skipping it would train on something else than what was sampled."""
    with pytest.raises(ValueError, match="document 0 has 10 tokens, more than the 9"):
        balance([10], 9, dp=2, multiple_of=3)


@property_test
@given(lengths_of_documents)
def test_plans_are_repeatable(lengths):
    """A resumed run would pack, sum and round differently from the uninterrupted one."""
    assert balance(lengths, LIMIT, dp=3, num_mini_batches=2) == balance(list(lengths), LIMIT, dp=3, num_mini_batches=2)
