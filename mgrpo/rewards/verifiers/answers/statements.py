r"""The value that an answer's text states, if it states one.

Words around a value are units or explanations and are left out, unless they withdraw it ("not 5", "at least 5", "5 or more",
"about 5"): then nothing is stated. "and", "or" and commas make a list, which is one value of several members. In a chain
`x = 2 + 3 = 5` the last member is the value, provided that the members are equal; a false chain states nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from mgrpo.rewards.verifiers.answers.digits import with_decimal_point
from mgrpo.rewards.verifiers.answers.expressions import is_same_value
from mgrpo.rewards.verifiers.answers.units import multiplied, multiplies


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMPARING = _words(
    "not don't doesn't can't cannot without except least most more less fewer greater smaller larger bigger higher lower over under "
    "above below than between exceeding beyond other another any up"
)
_WITHDRAWING = _COMPARING | _words(
    "no never neither nor unless isn't aren't wasn't won't couldn't wrong incorrect false about approximately approx around roughly "
    "nearly almost circa maybe perhaps possibly probably likely might may could guess rather instead actually wait sorry "
    "otherwise else either"
)
_JOINING = frozenset(("and", "or"))
_SHORT_WORDS = _words("is it to of in at we so be by an as on if are am pm cm mm km kg mg ml ft mi hr mph the rs per")
_FUNCTIONS = _words(
    "sqrt sin cos tan cot sec csc log exp arcsin arccos arctan sinh cosh tanh gcd lcm min max mod det deg abs"
)

# Private characters that replace words.
_WORDS, _JOIN, _NOTHING = "\ue000", "\ue001", "\ue002"
_TEXT = re.compile(
    r"\\(?P<command>text(?:bf|it|rm|normal|sf)?|mbox|mathrm|mathbf|mathit)\s*\{(?P<text>[^{}]*)\}"
    r"(?P<power>\s*\^\s*(?:\{\s*-?[0-9]\s*\}|[0-9]))?"
)
_WORD = re.compile(
    r"(?<![\\A-Za-z_^])(?<!begin\{)(?<!end\{)(?P<word>[A-Za-z]+(?:['’][a-z]+)?)(?:\^(?:\{[0-9]\}|[0-9]))?(?![A-Za-z_^({])"
)
_TEXT_WORD = re.compile(r"(?P<word>[A-Za-z]+(?:['’][a-z]+)?)")
_TEXT_ONLY = re.compile(r"[A-Za-z\s~/.'’^-]*[A-Za-z][A-Za-z\s~/.'’^-]*")
_UNIT = re.compile(rf"{_WORDS}(?:\s*/\s*[A-Za-z](?![A-Za-z])|\s*(?:[/*]|\\cdot|\\times)?\s*{_WORDS})+")

_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
        "≈": r"\approx ", "≃": r"\simeq ", "≅": r"\cong ", "≒": r"\doteq ", "∼": r"\sim ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "°": r"^\circ ", "±": r"\pm ", "∪": r"\cup ",
        "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "½": r"\frac12 ", "¼": r"\frac14 ", "¾": r"\frac34 ", "²": "^2", "³": "^3",
        "€": "", "£": "", "\u00a0": " ", "%": r"\%", "，": ",",
    }
)  # fmt: skip
_DROPPED = re.compile(
    r"\\\\|\\[()\[\]]|\\?[$\x22]|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\(?:text)?color\s*\{[^{}]*\}|\\displaystyle|\\limits"
)


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, fixed, period = match.groups()
    above = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{(10 ** len(period) - 1) * 10 ** len(fixed)}}}"


_REPLACED = (
    (re.compile(r"\\\\?%"), r"\\%"),
    (re.compile(r"(?<=[0-9A-Za-z)}])\*\*(?=[-0-9A-Za-z({])"), "^"),
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"\b(?:wrong|incorrect|false) (?=[a-z]{3,20}s\b)"), ""),  # "5 wrong answers" are 5
    (re.compile(r"(?<=[0-9]) +m ?/ ?s(?![A-Za-z0-9_(])"), r"\\text{ m/s}"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9]|\\pi)\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])(pi|infinity)(?![A-Za-z])"), lambda match: r"\pi" if match[1] == "pi" else r"\infty"),
    (re.compile(r"(?<![0-9.,])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"_\{(\w)\}"), r"_\1"),
    (re.compile(r"(?<![0-9.])([0-9]{1,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s*\{([0-9]{1,20})\}"), _repeating),
    (re.compile(r"(?<![0-9.])([0-9](?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})(?![0-9])"), r"\1\\times 10^{\2}"),
)
_THOUSANDS = re.compile(r"(?<![0-9.,}])[0-9]{1,3}(?:(?:,\\!\s*|(?:,|\{,\}|\\[,!;: ]|~)+)[0-9]{3})+(?![0-9]|,[0-9])")
_LIST_BRACKET = re.compile(r"\\\{|[(\[]")
_RELATION = re.compile(
    r"[<>]|\\(?:l|g)(?:e|eq|eqslant|t)(?![A-Za-z])|\\n(?:e|eq|ot|sim|cong|less|gtr|leq|geq|in|otin)(?![A-Za-z])|\\in(?![A-Za-z])"
    r"|\\(?:sub|sup)set|\\(?:sim|cong|simeq|propto|equiv|ll|gg|lesssim|gtrsim|lnot|neg)(?![A-Za-z])|!="
)
_APPROXIMATELY = re.compile(r"\\(?:approx|thickapprox|doteq)(?![A-Za-z])")
_APPROXIMATION = re.compile(r"\\(?:approx(?:eq)?|thickapprox|doteq|simeq|cong|sim)(?![A-Za-z])")
_BARE_NAME = re.compile(r"(?:\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?|\\?[A-Za-z]\s*\([A-Za-z0-9,\s]*\)|[A-Z]{2,3})'*")
_LETTER = re.compile(r"\\(?:frac|sqrt|cdot|times|pi|circ|pm|div)|([A-Za-z])")
_LOOSE_WORDS = re.compile(rf"\s*{_WORDS}\s*(?=[-+*/=<>)\]}}]|\\[lg]e|$)|(?<=[-+*/=<>(\[{{])\s*{_WORDS}\s*|^\s*{_WORDS}")
_TWO_NUMBERS = re.compile(r"(?<![_^])[0-9.]\s+[0-9.]")
_SPACED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_DEPTH = re.compile(r"\\begin|\\end|\\[{}]|\\.|[(){}\[\]]|[,;=\ue001]", re.DOTALL)
_BEFORE = " \t\r\n,;:*#\ue000"
_AFTER = f"{_BEFORE}."


class Statement(NamedTuple):
    """One value, in LaTeX."""

    name: str
    """The text before the first "=" of a chain: x, or f(3), or a + b; "" without."""
    value: str
    is_relation: bool
    """True for an inequality, a membership and other relations except equality."""


def is_withdrawn(words: Iterable[str]) -> bool:
    """True if words in lower case withdraw the value next to them, or make it uncertain."""
    return not _WITHDRAWING.isdisjoint(words)


def compares(word: str) -> bool:
    """True if a word in lower case withdraws only a value next to it: before "is" it describes the subject."""
    return word in _COMPARING


def read(text: str) -> Statement | None:
    """The value that a text states; None if it states none, or several that are not a list, or withdraws it."""
    text = _without_words(_plain(text))
    if _NOTHING in text:
        return None
    text, approximately = _before(text, _APPROXIMATELY)
    statement = _value(_stripped(text))
    if approximately and statement and is_bare_name(statement.value):
        return None
    return statement


def approximation(text: str) -> tuple[str, str] | None:
    """The texts before and after the last sign of approximation; None without one."""
    text = _plain(text)
    signs = list(_APPROXIMATION.finditer(text))
    return (text[: signs[-1].start()], text[signs[-1].end() :]) if signs else None


def is_bare_name(text: str) -> bool:
    """True if a text is a variable or empty, and so states no value."""
    text = _stripped(text)
    return not text or (text not in (r"\pi", "e") and _BARE_NAME.fullmatch(text) is not None)


def num_words(text: str) -> int:
    """The number of words of two letters and more outside LaTeX's commands."""
    return sum(len(match["word"]) > 1 for match in _WORD.finditer(text))


def has_words(text: str) -> bool:
    """True if there are words outside text commands."""
    text = _WORD.sub(_bare_word, _plain(text))
    return any(sign in text for sign in (_WORDS, _JOIN, _NOTHING))


def spelling(text: str) -> str:
    """The text without its formatting: spaces, dollar signs, text commands, sizes of brackets, and case in words."""
    text = _TEXT.sub(lambda match: match["text"] + (match["power"] or ""), _plain(text))
    text = _stripped(_SPACE.sub("", text))
    if len(text) == 3 and text[0] == "(" and text[2] == ")":
        text = text[1]
    return text.lower() if re.fullmatch(r"[^\\0-9]*[A-Za-z]{2}[^\\0-9]*", text) else text


def _plain(text: str) -> str:
    if not _LIST_BRACKET.search(text):
        text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    text = with_decimal_point(text, braced_only=True)
    text = multiplied(_DROPPED.sub(_dropped, text.translate(_SIGNS)))
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)
    return text


def _dropped(match: re.Match[str]) -> str:
    sign = match[0]
    return sign if sign == r"\\" else "" if sign[1:].isalpha() and "quad" not in sign else " "


def _without_words(text: str) -> str:
    """The text with private characters in place of its words."""
    text = _TEXT.sub(_text_command, text)
    return _UNIT.sub(_WORDS, _WORD.sub(_bare_word, text))


def _text_command(match: re.Match[str]) -> str:
    inner = match["text"].strip()
    if len(inner) == 1 and inner.isalpha():
        before = match.string[: match.start()].rstrip()
        is_unit = inner not in "ie" and (before[-1:].isdigit() or before.endswith(("}", _WORDS, "/", "circ")))
        return _WORDS if is_unit else inner + (match["power"] or "")
    text = _TEXT_WORD.sub(_text_word, match["text"])
    is_text_only = _TEXT_ONLY.fullmatch(match["text"]) and _JOIN not in text and _NOTHING not in text
    return _WORDS if is_text_only else f" {text} "


def _text_word(match: re.Match[str]) -> str:
    word = match["word"]
    return _meaning(word) or (word if len(word) == 1 and word not in "aI" else _WORDS)


def _bare_word(match: re.Match[str]) -> str:
    """The replacement of letters outside text commands, which may be a product of variables."""
    word = match["word"]
    follows_number = match.start() > 0 and match.string[match.start() - 1].isdigit()
    is_word = (word.lower() in _SHORT_WORDS and not word.isupper()) or (
        len(word) > 2 and not word.isupper() and not follows_number
    )
    # Two capital letters are a line: NO, OR.
    meaning = "" if len(word) == 2 and word.isupper() else _meaning(word)
    return meaning or (_WORDS if is_word and word.lower() not in _FUNCTIONS else match[0])


def _meaning(word: str) -> str:
    word = word.lower().replace("’", "'")
    return _JOIN if word in _JOINING else _NOTHING if word in _WITHDRAWING or multiplies(word) else ""


def _value(text: str) -> Statement | None:
    """A list, of lists perhaps ("1, 2; 3, 4"), or a single value."""
    for separators, sign in (";", "; "), (f",{_JOIN}", ", "):
        parts = _split(text, separators)
        if len(parts) > 1:
            members = [_value(part) for part in parts]
            return _listed([member for member in members if member and member.value], len(members), sign)
    return _item(text)


def _listed(members: list[Statement], num: int, sign: str) -> Statement | None:
    if len(members) < num:
        return None
    texts = [f"{member.name}={member.value}" if member.name else member.value for member in members]
    return Statement("", sign.join(texts), any(member.is_relation for member in members))


def _item(text: str) -> Statement | None:
    """One member of a list, or the only one."""
    text = _stripped(_LOOSE_WORDS.sub(" ", text))
    if _SPACED_NUMBER.fullmatch(text):
        text = text.replace(" ", "")
    if _WORDS in text or _TWO_NUMBERS.search(text):
        return None
    if _RELATION.search(text):
        return None if _RELATION.match(text) else Statement("", text, True)
    first, *others = [_stripped(member) for member in _split(text, "=")]
    if not others:
        return Statement("", first, False)
    while others and not others[-1]:
        others.pop()
    if not others:
        return None
    has_name = not first or any(match[1] for match in _LETTER.finditer(first))
    members = others if has_name else [first, *others]
    value = members[-1]
    for member in members[:-1]:
        if not (_BARE_NAME.fullmatch(member) or is_same_value(member, value)):
            return None
    return Statement(first if has_name else "", value, False)


def _stripped(text: str) -> str:
    return text.lstrip(_BEFORE).rstrip(_AFTER)


def _before(text: str, pattern: re.Pattern[str]) -> tuple[str, bool]:
    match = pattern.search(text)
    return (text[: match.start()], True) if match else (text, False)


def _split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators that are in no bracket."""
    parts, depth, start = [], 0, 0
    for match in _DEPTH.finditer(text):
        token = match[0]
        if token in (r"\begin", r"\{", "(", "{", "["):
            depth += 1
        elif token in (r"\end", r"\}", ")", "}", "]"):
            depth = max(0, depth - 1)
        elif token in separators and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
