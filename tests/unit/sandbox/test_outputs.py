"""The rule that says whether a program printed what it should: Open Instruct's, worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo.sandbox.outputs import same_output


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("2\n", "2"),
        ("\n\n 1 2 \n3\n\n", "1 2\n 3"),
        ("a\r\nb", "a\nb"),
        ("1.0 2", "1 2.00"),
        ("1e3", "1000"),
        ("1_000", "1000"),
        ("-0", "0"),
        ("1 \t 2", "1 2"),
        ("inf", "Infinity"),
        ("nan", "nan"),
        ("", " \n"),
        ("1\nx\n2.50", "1.0\nx\n2.5"),
        ("9" * 100_000 + ".0", "9" * 100_000),
    ],
)
def test_these_outputs_are_the_same(printed, expected):
    """White space at the ends and the notation of numbers are not what a data set asks for: rewards would be noise."""
    assert same_output(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("12", "1 2"),
        ("1 2", "2 1"),
        ("a  b", "a b"),
        ("yes", "YES"),
        ("1\n\n2", "1\n2"),
        ("1 2", "1\n2"),
        ("0.30000000000000004", "0.3"),
        ("nan", "NaN"),
        ("sNaN", "snan"),
        ("", "0"),
        ("0x10", "16"),
        ("1 a", "1.0 a"),
        ("1e999999999999999999 1", "1e999999999999999999 2"),
    ],
)
def test_these_outputs_differ(printed, expected):
    """A rule that is laxer than the peers' pays for wrong programs."""
    assert not same_output(printed, expected)


@given(st.text())
def test_space_around_lines_never_matters(text):
    """Whatever a program prints, also what no one would call text."""
    assert same_output(text, text)
    spaced = "\n".join(f" {line}\t" for line in text.split("\n"))
    assert same_output(f"\n{spaced} \n", text) and same_output(text, f"\n{spaced} \n")


@given(st.text(), st.text())
def test_sameness_has_no_direction(first, second):
    """Which of the two was expected says nothing about whether they are the same."""
    assert same_output(first, second) == same_output(second, first)
