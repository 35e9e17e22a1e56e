"""Experts of tokens on their way into packs: a row stays with its token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo.packing import assemble, from_slice, plan_step, teacher_packs, to_slices
from mgrpo.types import unrouted
from tests.unit.packing.test_document import groups_of_samples, make_samples, property_test, share

PADDINGS = st.sampled_from([(1, 1), (2, 1), (4, 4), (6, 2)])


def rows_of(tokens, dtype):
    """Rows that say which tokens they are of, `[tokens, 3, 2]`."""
    places = np.arange(6).reshape(3, 2)
    return ((tokens[:, None, None] * 7 + places) % 250).astype(dtype)


def with_rows(sample, dtype):
    read = np.concatenate([sample.prompt_tokens, sample.tokens[:-1]])
    return replace(sample, routes=rows_of(read, dtype))


@property_test
@given(groups_of_samples, share, PADDINGS, st.integers(1, 3), st.sampled_from([np.uint8, np.uint16]), st.booleans())
def test_rows_stay_with_their_tokens(groups, share_prompts, multiples, dp, dtype, has_turns):
    """Shared prompts, last tokens that are not read, and padding shift rows: every later token would train other experts."""
    samples = [with_rows(sample, dtype) for sample in make_samples(groups, has_turns=has_turns)]
    padding = dict(zip(("multiple_of", "document_multiple_of"), multiples, strict=True))
    plan = plan_step(
        samples, pack_length=36, dp=dp, num_mini_batches=1, share_prompts=share_prompts and multiples[1] == 1, **padding
    )
    index, slices = to_slices(samples, plan, **padding)
    for part in slices:
        for pack in (pack for packs in from_slice(index, part.filled()) for pack in packs):
            if not len(pack.samples):
                assert pack.routes is None
                continue
            assert pack.routes.shape == (len(pack.tokens), 3, 2) and pack.routes.dtype == dtype
            # Padding is the token 0, which no sample has.
            is_read = pack.tokens > 0
            assert np.array_equal(pack.routes[is_read], rows_of(pack.tokens[is_read], dtype))
            assert (pack.routes[~is_read] == np.iinfo(dtype).max).all()


def test_a_shared_prompt_has_the_rows_of_its_first_sample():
    """An engine may have computed the end of a prompt once for each sample, with other rounding."""
    first, second = (with_rows(sample, np.uint8) for sample in make_samples([(3, [4, 2])]))
    other = replace(second, routes=np.concatenate([unrouted(3, second.routes), second.routes[3:]]))
    pack = assemble([first, other], [[0, 1]])
    assert np.array_equal(pack.routes[:6], first.routes)
    assert np.array_equal(pack.routes[6:], second.routes[3:])
    alone = assemble([first, other], [[1], [0]])
    assert (alone.routes[:3] == 255).all()


def test_teachers_choose_their_own_experts():
    """They are other models, and may read other prompts."""
    samples = [with_rows(sample, np.uint8) for sample in make_samples([(3, [4, 2]), (2, [5])], taught="prompt")]
    plan = plan_step(samples, pack_length=36, dp=1, num_mini_batches=1, multiple_of=1, share_prompts=False)
    index, (part,) = to_slices(samples, plan, multiple_of=1, document_multiple_of=1)
    data = part.filled()
    assert all(pack.routes is not None for packs in from_slice(index, data) for pack in packs)
    assert all(pack.routes is None for packs in teacher_packs(index, data, 0) for pack in packs)


def test_a_row_is_missing_or_one_too_many():
    """Better no run than one whose experts are off by a token."""
    (sample,) = make_samples([(3, [4])])
    short = replace(with_rows(sample, np.uint8), routes=rows_of(np.arange(5), np.uint8))
    with pytest.raises(AssertionError, match="a row for each token"):
        assemble([short], [[0]])
