"""The verifiers: functions (completion, ground truth) -> score, 1.0 right and 0.0 wrong, and the table of their names.

They run in worker processes (`worker`), which own every limit: a verifier needs no timeout and may take no notice of
memory. A ground truth it cannot read is a ValueError: that sample has no score, which is not the same as wrong.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Callable
from decimal import Decimal

Verifier = Callable[[str, object], float]

THINK_END = "</think>"
_NUMBER = re.compile(r"(?:(?<![0-9.])[-+])?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_DIGIT_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_BOX = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

# Characters. An answer longer than its label by more than the margin is wrong unparsed, and text without a box is read
# from its end only: parsers of mathematics need seconds for thousands of characters, and no right answer hides there.
_ANSWER_MARGIN = 300
_TAIL = 1000


def integer(completion: str, ground_truth: object) -> float:
    """1.0 if the stripped completion is the integer, written the one canonical way: "+5", "05" and "5.0" are not 5."""
    label = _single(ground_truth)
    if isinstance(label, int) and not isinstance(label, bool):
        expected = str(label)
    elif isinstance(label, str) and re.fullmatch(r"[-+]?[0-9]+", label.strip()):
        expected = str(int(label))
    else:
        raise ValueError(f"ground_truth={_shown(label)} is not an integer; write an int or a string of digits")
    return float(completion.strip() == expected)


def gsm8k(completion: str, ground_truth: object) -> float:
    """1.0 if the last number of the completion equals the last number of the label in value: 1,000 = 1000.0."""
    expected = _last_number(_text(ground_truth))
    if expected is None:
        raise ValueError(f"ground_truth={_shown(ground_truth)} holds no number; gsm8k needs one")
    return float(_last_number(completion) == expected)


def math(completion: str, ground_truth: object) -> float:
    r"""1.0 if the completion's answer is mathematically the label's.

    The answer is looked for after the last `</think>`: it is the last complete `\boxed{...}` if there is one. Otherwise
    it is what math-verify finds at the end of the text ("Answer: 7", "$x=7$", "the answer is 7 apples"); and where the
    label is a plain number, the last number of the text counts too, as in `gsm8k`.
    """
    label = _text(ground_truth).strip()
    boxed_label = last_boxed(label)
    label = _bare(label if boxed_label is None else boxed_label)
    if not label:
        raise ValueError("ground_truth is empty; math needs an expression")
    text = completion.rpartition(THINK_END)[2]
    answer = last_boxed(text)
    if answer is not None:
        return float(_same_value(_bare(answer), label))
    tail = _tail(text)
    if _PLAIN_NUMBER.fullmatch(label) and _last_number(tail) == Decimal(label):
        return 1.0
    return float(_math_verify_equal(label, tail))


def last_boxed(text: str) -> str | None:
    r"""Contents of the last `\boxed{...}` whose braces close; None without one."""
    # Braces are paired in one pass over the text, so that a thousand unclosed boxes cost no more than one.
    boxes = {match.end() - 1 for match in _BOX.finditer(text)}
    if not boxes:
        return None
    last_start, last_end = -1, -1
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(match.start())
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start in boxes and start > last_start:
                last_start, last_end = start, match.start()
    return text[last_start + 1 : last_end] if last_start >= 0 else None


VERIFIERS: dict[str, Verifier] = {"integer": integer, "math": math, "gsm8k": gsm8k}


def known_verifiers() -> tuple[str, ...]:
    """Names that a row's `dataset` may hold."""
    return tuple(sorted(VERIFIERS))


def find(name: str) -> Verifier:
    """The verifier called `name`, in any case; an unknown name is a ValueError that says which are near."""
    if isinstance(name, str) and name.lower() in VERIFIERS:
        return VERIFIERS[name.lower()]
    near = difflib.get_close_matches(str(name).lower(), VERIFIERS, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown verifier {name!r}; {meant}known verifiers: {', '.join(known_verifiers())}")


def warm_up(name: str) -> None:
    """Do the imports of a verifier, and the work that only its first call has, before anyone waits for a score."""
    if find(name) is math:
        _math_verify_equal(r"\frac{1}{2}", r"\boxed{0.5}")


def _single(ground_truth: object) -> object:
    """The label itself: data sets made for several verifiers a row wrap a lone label into a list."""
    if isinstance(ground_truth, list) and len(ground_truth) == 1:
        return ground_truth[0]
    return ground_truth


def _text(ground_truth: object) -> str:
    label = _single(ground_truth)
    if isinstance(label, bool) or not isinstance(label, (str, int, float)):
        raise ValueError(f"ground_truth={_shown(label)} is neither text nor a number")
    return str(label)


def _shown(value: object) -> str:
    return repr(value)[:80]


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(_DIGIT_COMMA.sub("", text))
    return Decimal(numbers[-1]) if numbers else None


def _tail(text: str) -> str:
    """The end of the text, from the start of a line if there is one: a cut through `$x$` would turn text into formulas."""
    if len(text) <= _TAIL:
        return text
    tail = text[-_TAIL:]
    return tail.partition("\n")[2] or tail


def _bare(expression: str) -> str:
    """The expression without the dollar signs and spaces around it."""
    return expression.strip().strip("$").strip()


def _same_value(answer: str, label: str) -> bool:
    if answer == label:
        return True
    if len(answer) > len(label) + _ANSWER_MARGIN:
        return False
    if _PLAIN_NUMBER.fullmatch(answer) and _PLAIN_NUMBER.fullmatch(label):
        # Decimals that differ still go to math-verify, which allows for rounding.
        if Decimal(answer) == Decimal(label):
            return True
        if "." not in answer + label:
            return False
    return _math_verify_equal(label, f"\\boxed{{{answer}}}")


def _math_verify_equal(label: str, text: str) -> bool:
    """Whether math-verify reads in `text` the value of `label`; its own timeouts are off, the worker has a better one."""
    import math_verify

    # It warns on every process start that its timeouts are off, which is meant here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answers = math_verify.parse(text, parsing_timeout=None)
    return bool(answers) and math_verify.verify(_parsed_label(label), answers, timeout_seconds=None)


@functools.lru_cache(maxsize=1024)
def _parsed_label(label: str) -> list:
    """math-verify's reading of a label, kept because a whole group shares it."""
    import math_verify

    parsed = math_verify.parse(f"\\boxed{{{label}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"ground_truth={_shown(label)} is no expression that math-verify can read")
    return parsed
