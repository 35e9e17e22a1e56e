"""The tool calculate: one operation on two numbers, exact as long as decimals can be."""

from __future__ import annotations

import re
from decimal import Context, Decimal

from mgrpo.environments.offered.functions import FunctionTool

_NUMBER = r"([+-]?\d{1,40}(?:\.\d{1,40})?)"
_EXPRESSION = re.compile(rf"\s*{_NUMBER}\s*([-+*/])\s*{_NUMBER}\s*", re.ASCII)
# Sums and products of such numbers are exact.
_EXACT = Context(prec=200)
_QUOTIENT = Context(prec=12)


def calculate(expression: str) -> str:
    """Calculate one operation on two numbers.

    Args:
        expression: Two numbers with one of + - * / between them, for example 12 * 7.
    """
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise ValueError(f"{expression[:60]!r} is not two numbers with one of + - * / between them, such as 12 * 7")
    left, right = Decimal(found[1]), Decimal(found[3])
    if found[2] == "/" and not right:
        raise ZeroDivisionError(f"{expression.strip()} divides by zero")
    operations = {"+": _EXACT.add, "-": _EXACT.subtract, "*": _EXACT.multiply, "/": _QUOTIENT.divide}
    value = operations[found[2]](left, right)
    return f"{value.normalize(_EXACT):f}" if value else "0"


class Calculate(FunctionTool):
    """The function as an environment."""

    def __init__(self) -> None:
        super().__init__(calculate, is_repeatable=True)
