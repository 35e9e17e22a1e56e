"""Which rows a mix takes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.data.amounts import Entry, entries


def rows(amount: str, num_rows: int) -> list[int]:
    return Entry(source="a", amount=amount, split="train").rows(num_rows).tolist()


def random_rows(num_rows: int, size: int) -> list[int]:
    return np.random.RandomState(42).choice(num_rows, size=size, replace=False).tolist()


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("1.0", list(range(20))),
        ("20", list(range(20))),
        ("0.5", random_rows(20, 10)),
        ("10", random_rows(20, 10)),
        ("1", random_rows(20, 1)),
        ("0", []),
        ("2.0", list(range(20)) * 2),
        ("1.25", list(range(20)) + random_rows(20, 5)),
        ("45", list(range(20)) * 2 + random_rows(20, 5)),
        ("0.35", random_rows(20, 7)),
    ],
)
def test_amounts_with_a_point_are_shares_and_others_counts(amount: str, expected: list[int]) -> None:
    """A mix written for Open Instruct must train on the same rows here."""
    assert rows(amount, 20) == expected


def test_the_random_rest_is_pinned() -> None:
    """numpy promises that RandomState's stream never changes; another one would be other data under the same name."""
    assert rows("3", 10) == [8, 1, 5]
    assert rows("1.2", 5) == [0, 1, 2, 3, 4, 1]


@pytest.mark.parametrize(("amount", "num_rows", "expected"), [("0.29", 100, 28), ("0.57", 100, 56), ("1.1", 10, 11)])
def test_shares_are_rounded_as_doubles_are(amount: str, num_rows: int, expected: int) -> None:
    """0.29 x 100 is 28.999... in double precision, and 28 rows in Open Instruct: decimals would give another row."""
    assert len(rows(amount, num_rows)) == expected


@settings(deadline=None)
@given(num_rows=st.integers(1, 300), count=st.integers(0, 1000))
def test_a_count_is_whole_passes_and_a_rest_without_repeats(num_rows: int, count: int) -> None:
    """A row that is taken more often than another by more than one pass is trained on too much."""
    taken = rows(str(count), num_rows)
    passes, rest = divmod(count, num_rows)
    assert len(taken) == count
    assert taken[: passes * num_rows] == list(range(num_rows)) * passes
    tail = taken[passes * num_rows :]
    assert len(set(tail)) == rest and set(tail) <= set(range(num_rows))


@settings(deadline=None)
@given(num_rows=st.integers(1, 300), share=st.floats(0, 5, allow_nan=False).map(lambda value: f"{value:.6f}"))
def test_a_share_is_the_count_of_its_rows(num_rows: int, share: str) -> None:
    """Both ways to write an amount must select alike, or a run cannot be repeated from its statistics."""
    assert rows(share, num_rows) == rows(str(int(float(share) * num_rows)), num_rows)


@pytest.mark.parametrize(
    ("amount", "num_rows", "warns"),
    [("1", 101, True), ("10", 101, True), ("11", 101, False), ("1", 100, False), ("1.0", 101, False)],
)
def test_a_few_rows_of_many_are_warned_about(
    caplog: pytest.LogCaptureFixture, amount: str, num_rows: int, warns: bool
) -> None:
    """ "1" instead of "1.0" trains on a single row."""
    with caplog.at_level(logging.WARNING):
        Entry(source="a", amount=amount, split="train").warn_if_few(num_rows)
    assert ("a share needs a point" in caplog.text) == warns


@pytest.mark.parametrize(
    ("mixer_list", "splits", "message"),
    [
        (["a.jsonl"], ["train"], "expected pairs"),
        (["a.jsonl", "1.0", "b.jsonl", "1.0", "c.jsonl", "1.0"], ["train", "test"], "2 splits for 3 data sets"),
        *(
            (["a.jsonl", amount], ["train"], "neither a share")
            for amount in ("all", "-0.5", "-1", "nan.", "inf.", "1e3", "", "99999999999", "1.0e300")
        ),
    ],
)
def test_a_mix_that_makes_no_sense_says_why(mixer_list: list[str], splits: list[str], message: str) -> None:
    """Found before any file is opened."""
    with pytest.raises(ValueError, match=message):
        entries(mixer_list, splits)


def test_splits_are_one_for_all_or_one_each() -> None:
    """A held-out split must not become the training split of the next data set."""
    assert [entry.split for entry in entries(["a", "1.0", "b", 2], ["x"])] == ["x", "x"]
    assert [(e.source, e.amount, e.split) for e in entries(["a", 1.0, "b", 2], ["x", "y"])] == [
        ("a", "1.0", "x"),
        ("b", "2", "y"),
    ]
