"""Sets of tokens that travel with what was sampled from them, against lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.types import KeptTokens
from tests.builders import kept_tokens, sets_of

# No deadline: a shared machine is slow now and then. No database: a test leaves no files.
property_test = settings(database=None, deadline=None, max_examples=100)
some_sets = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8)


@property_test
@given(some_sets, st.data())
def test_a_part_has_the_sets_of_its_tokens(sets, data):
    """Of a branch, or a completion among others: a set that moved by one token would not even hold it."""
    start = data.draw(st.integers(0, len(sets)))
    end = data.draw(st.integers(start, len(sets)))
    assert sets_of(kept_tokens(*sets).part(start, end)) == sets[start:end]


@property_test
@given(st.lists(some_sets, max_size=4))
def test_sets_are_joined_in_the_order_of_their_tokens(parts):
    """Turns of a trajectory, or samples of a pack."""
    joined = KeptTokens.joined([kept_tokens(*sets) for sets in parts])
    assert sets_of(joined) == [own for sets in parts for own in sets]


@property_test
@given(some_sets, st.randoms(use_true_random=False))
def test_chosen_tokens_keep_their_sets(sets, random):
    """Those that are predicted, or lie on a context-parallel rank."""
    chosen = [random.random() < 0.5 for _ in sets]
    found = kept_tokens(*sets).where(np.array(chosen, np.bool_))
    assert sets_of(found) == [own for own, is_chosen in zip(sets, chosen, strict=True) if is_chosen]


@property_test
@given(some_sets)
def test_a_token_without_a_set_is_its_own(sets):
    """A logprob over nothing is not finite, and its gradient neither, also where the loss leaves it out."""
    tokens = np.arange(100, 100 + len(sets), dtype=np.int32)
    found = kept_tokens(*sets).filled(tokens)
    assert sets_of(found) == [own or [100 + place] for place, own in enumerate(sets)]


def test_no_sets_at_all():
    """Between turns, and in a batch of evaluations."""
    assert sets_of(KeptTokens.none(3)) == [[], [], []] and sets_of(KeptTokens.joined([])) == []


def test_a_large_step_has_more_ids_than_32_bits_count():
    """64 of each of 50 million tokens: an offset that wraps around gives tokens the sets of others."""
    sizes = np.full(3, 2**30, np.int32)
    assert KeptTokens.of_sizes(np.zeros(0, np.int32), sizes).offsets.tolist() == [0, 2**30, 2**31, 3 * 2**30]
