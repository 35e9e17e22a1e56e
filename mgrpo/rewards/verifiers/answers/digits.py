r"""Numbers in digits, read exactly: separators of thousands, decimal commas, and decimals times powers of ten."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

DECIMALS = 6
"""Places to which decimals agree."""
SMALL = 1e-3
"""Numbers below it agree to significant digits instead."""
TOLERANCE = 5e-6
"""Relative, of small numbers: half a unit of the sixth significant digit."""

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:(?:,|\{,\}|\\[,!;: ]|~)+[0-9]{3})+|[0-9]+)?(?:(?<=[0-9])\.?|\.[0-9]+)")
_SEPARATOR = re.compile(r"[^-+.0-9]")
_POWER_OF_TEN = re.compile(
    r"(?<![\w.^,}])(?P<factor>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:\\times|\\cdot|\\ast|\*|×|·)\s*"
    r"(?:10|\{10\})\s*\^\s*(?:\{\s*(?P<braced>[-+]?[0-9]{1,3})\s*\}|(?P<bare>-?[0-9]{1,3}))(?![0-9.^!])"
)
# Thousands with points leave a comma no other meaning.
_BRACED_COMMA = re.compile(
    r"(?<![0-9.,}])(?P<whole>[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+)\{,\}(?P<decimals>[0-9]+)(?![0-9.]|,[0-9]|\{,\})"
)
_COMMA = re.compile(
    r"(?<![0-9.,}])(?P<whole>[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+)(?:\{,\}|,)(?P<decimals>[0-9]+)(?![0-9.]|,[0-9]|\{,\})"
)


def plain_number(text: str) -> Decimal | None:
    r"""The value of a number in digits, perhaps with separators of thousands: 1,234.5 or 1\,234 or 1{,}234."""
    if not _NUMBER.fullmatch(text) or not any(character in "0123456789" for character in text):
        return None
    return Decimal(_SEPARATOR.sub("", text))


def without_powers_of_ten(text: str) -> str:
    r"""The text with decimals times powers of ten in digits: 1.1\times10^{17} as 110000000000000000.

    As a product it would be a floating-point number.
    """
    return _POWER_OF_TEN.sub(_in_digits, text)


def with_decimal_point(text: str, *, braced_only: bool) -> str:
    """The text with a point in place of each comma that can be a decimal comma: 3{,}5 and, unless `braced_only`, 3,5.

    A comma in braces separates no list, so that only thousands are another reading of it.
    """
    return (_BRACED_COMMA if braced_only else _COMMA).sub(_with_point, text)


def agree(number: Decimal, other: Decimal) -> bool:
    """Compare numbers in digits: integers exactly, others to 6 places, below 0.001 to 6 significant digits."""
    if number == other:
        return True
    one, two = Fraction(number), Fraction(other)
    if one.denominator == two.denominator == 1:
        return False
    largest = max(abs(one), abs(two))
    if largest < Fraction(SMALL):
        return abs(one - two) <= Fraction(TOLERANCE) * largest
    return round(one, DECIMALS) == round(two, DECIMALS)


def unit_of_last_digit(number: Decimal) -> float:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # it is finite
    return float(10.0**exponent)


def _in_digits(match: re.Match[str]) -> str:
    number = Decimal(match["factor"]).scaleb(int(match["braced"] or match["bare"]))
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _with_point(match: re.Match[str]) -> str:
    whole, decimals = match["whole"], match["decimals"]
    if "." not in whole and len(whole) <= 3 and len(decimals) == 3 and not whole.startswith("0"):
        return match[0]
    return f"{whole.replace('.', '')}.{decimals}"
