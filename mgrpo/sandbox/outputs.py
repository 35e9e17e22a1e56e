"""Comparison of printed with expected output, by the rule of Open Instruct and LiveCodeBench."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation


def same_output(printed: str, expected: str) -> bool:
    """True if all lines are equal without surrounding white space, or equal as lists of decimal numbers."""
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    try:
        # Lists of decimals: "1.0 2" and "1 2.00" are equal, "1 2" and "12" are not, NaN equals nothing.
        return list(map(Decimal, expected.split())) == list(map(Decimal, printed.split()))
    except InvalidOperation:
        return False
