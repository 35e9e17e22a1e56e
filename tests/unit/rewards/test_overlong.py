"""Rewards by length."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.rewards.overlong import overlong_penalty


def test_the_penalty_falls_over_the_last_tokens():
    """Of 100 tokens the last 20: 0 up to 80, -0.5 at 90, -1 at 100 and beyond."""
    lengths = np.array([0, 1, 80, 81, 90, 99, 100, 101, 500])
    got = overlong_penalty(lengths, max_length=100, cache_length=20)
    np.testing.assert_allclose(got, [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1])
    assert not np.signbit(got[:3]).any()  # "-0.0" in the log of rewards


def test_without_a_cache_only_what_is_too_long_is_punished():
    """Dividing by 0 would make the reward of a completion of full length NaN."""
    got = overlong_penalty(np.array([99, 100, 101]), max_length=100, cache_length=0)
    np.testing.assert_array_equal(got, [0, 0, -1])


def test_the_shape_stays():
    """Groups would be mixed."""
    lengths = np.array([[10, 8], [9, 2]])
    np.testing.assert_allclose(overlong_penalty(lengths, max_length=10, cache_length=4), [[-1, -0.5], [-0.75, 0]])


def test_a_cache_longer_than_a_completion_is_an_error():
    """Every completion would be punished, the empty one too."""
    with pytest.raises(ValueError, match="cache_length=11 must lie between 0 and max_length=10"):
        overlong_penalty(np.array([1]), max_length=10, cache_length=11)
