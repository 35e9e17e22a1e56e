r"""Words after a number: those that multiply it ("5 million"), and units of measure, which may be missing but not differ."""

from __future__ import annotations

import re
from decimal import Decimal

_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TEXT_BEGIN = r"\\(?:text(?:bf|it|rm|normal|sf)?|mbox|mathrm|mathbf|mathit)\s*\{"
_GAP = rf"(?:[\s~{{}}]|\\[,;:! ])*(?:{_TEXT_BEGIN}[\s~]*)?"
_MULTIPLIED = re.compile(
    rf"(?<![0-9.,])([0-9]{{1,15}}(?:\.[0-9]{{1,15}})?)({_GAP})({'|'.join(_MULTIPLIERS)})s?(?![A-Za-z])", re.IGNORECASE
)
_MULTIPLYING = frozenset((*_MULTIPLIERS, *(f"{word}s" for word in _MULTIPLIERS)))
_PERCENT = re.compile(rf"([0-9])({_GAP})(?:percent|per cent|percentage)(?![A-Za-z])(?! point)", re.IGNORECASE)

_SPELLINGS = (
    "mm millimeter millimeters millimetre millimetres", "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres", "km kilometer kilometers kilometre kilometres", "inch inches", "ft foot feet",
    "yard yards yd", "mile miles mi", "mg milligram milligrams", "g gram grams", "kg kilogram kilograms", "ounce ounces oz",
    "pound pounds lb lbs", "s second seconds sec secs", "minute minutes min mins", "h hour hours hr hrs", "day days",
    "week weeks", "month months", "year years", "ml milliliter milliliters millilitre millilitres",
    "l liter liters litre litres", "gallon gallons", "dollar dollars", "cent cents", "euro euros", "degree degrees",
    "radian radians", "mile/h mph", "mile/gallon mpg", "km/h kmh kph",
)  # fmt: skip
_UNITS = {word: words.split()[0] for words in _SPELLINGS for word in words.split()}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_SIGNS = {"per": "/", "squared": "^2", "cubed": "^3", "²": "^2", "³": "^3"}
_SPELLED_SIGN = re.compile(r"\b(?:per|squared|cubed)\b|[²³]")
_DOLLARS = re.compile(r"\\\$\s*([0-9.,]*[0-9])")
_UNIT_WITH_POWER = (
    rf"(?:(?P<power>{'|'.join(_POWERS)})\b\.?{_GAP})?"
    r"(?P<unit>[A-Za-z]+)(?![A-Za-z])[\s}]*(?:\^[\s{]*(?P<exponent>[0-9])[\s}]*)?"
)
_UNIT = re.compile(
    rf"[0-9}}]{_GAP}{_UNIT_WITH_POWER}(?:/{_GAP}{_UNIT_WITH_POWER.replace('(?P<', '(?P<below_')})?"
    r"|[0-9}]\s*\^?\s*\{?\s*(?:\\circ|°)"
)
_IN_TEXT = re.compile(rf"{_TEXT_BEGIN}[^{{}}]*\Z")


def multiplied(text: str) -> str:
    r"""The text with "5 million" as 5000000 and "5 percent" as 5\%."""
    for _ in range(3):
        text = _MULTIPLIED.sub(_product, text)
    return _PERCENT.sub(r"\1\\%\2", text)


def multiplies(word: str) -> bool:
    """True if a word in lower case multiplies the number before it."""
    return word in _MULTIPLYING


def units(text: str) -> list[str]:
    """The units of measure that follow the numbers of a text, as known ones: "5 hours" has h, "5 meters per second squared" m/s2.

    A single letter alone, not "m/s", is a unit in a text command only.
    """
    text = _SPELLED_SIGN.sub(lambda match: _SIGNS[match[0]], _DOLLARS.sub(r"\1 dollars ", text))
    found = []
    for match in _UNIT.finditer(text):
        word, below = (match["unit"] or "degree").lower(), (match["below_unit"] or "").lower()
        if word not in _UNITS or (
            len(word) == 1 and below not in _UNITS and not _IN_TEXT.search(text[: match.start("unit")][-30:])
        ):
            continue
        unit = _UNITS[word] + (match["exponent"] or _POWERS.get(match["power"], ""))
        if below in _UNITS:
            unit += f"/{_UNITS[below]}{match['below_exponent'] or _POWERS.get(match['below_power'], '')}"
        found.append(unit)
    return found


def _product(match: re.Match[str]) -> str:
    number, gap, word = match.groups()
    return f"{format(Decimal(number) * _MULTIPLIERS[word.lower()], 'f')}{gap}"
