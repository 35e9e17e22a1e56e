"""The verdict in a judge's reply. A reply whose verdict is not clearly the judge's own is an `Unreadable`.

A judge may quote the answer it judges, and an answer may hold text that looks like a verdict. The prompt therefore gives the
judge a mark that no answer can predict, and the last verdict with the mark counts. Without it, a reply counts only in the
requested form (one JSON object and nothing else, or a decision in the last line), and only if the answer does not
hold the same words.
"""

from __future__ import annotations

import json
import re
import unicodedata

_OBJECTS = json.JSONDecoder(strict=False, object_pairs_hook=lambda pairs: pairs)
_WRAPPING = re.compile(r"\s*(?:<answer>(.*)</answer>|```[A-Za-z]{0,10}(.*)```)\s*", re.DOTALL)
_INVALID_ESCAPE = re.compile(r'\\(\\|["/bfnrt]|u[0-9A-Fa-f]{4})|\\')
_END_OF_OBJECT = re.compile(r"[\\\"'\s}`\]]*")
_NUMBER = re.compile(r"([-+]?(?:[0-9]{1,9}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))(?:\s*/\s*([0-9]{1,4}))?")
# The quotation marks around a key or value of an object, which may be escaped or missing.
_Q = r"[\\\"']{0,4}"
_QUOTATION = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|<answer>.*?(?:</answer>|\Z)|^[ \t]*>[^\n]*"
    r"|“[^“”]*”|«[^«»]*»|\"[^\"\n]*\"|(?<!\w)'[^'\n]*'(?!\w)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_STATEMENT = re.compile(
    r"\b(?:decision|verdict|judge?ment)\W{0,12}(?:is\W{1,12})?(yes|no)\b(?!\s*(?:/|(?:or|doubt|question)\b))",
    re.IGNORECASE,
)
_LAST_LINE = re.compile(
    r"[\s#*_(-]*(?:my\s+)?final\s+(decision|answer)\W{0,12}(?:is\W{1,12})?(yes|no)[\s.!*_)]*", re.IGNORECASE
)
# A verdict is a few sentences. Longer replies are refused, since reading them would be slow.
_LONGEST = 200_000


class Unreadable(ValueError):
    """A reply without a clear verdict."""


def read_score(reply: str, *, top: float, mark: str, answer: str) -> float:
    """The SCORE of the reply, between 0 and `top`.

    Numbers, numbers in quotes and "7/10" (of `top` only) are scores; true and false are, where the scale ends at 1.

    Args:
        mark: text that the prompt requires next to the score.
        answer: text that the judge has read, from which it may quote.
    """
    # First as it is, since the text of an object may hold `</think>`.
    value = _score_of_object(reply, mark, answer)
    if value is None:
        visible = without_thinking(reply)
        value = _score_of_object(visible, mark, answer)
    if value is None:
        pair = rf"mark{_Q}\s*:\s*{_Q}{re.escape(mark)}{_Q}\s*,\s*{_Q}score{_Q}\s*:\s*{_Q}([^\"'\\,}}\n]{{0,40}})"
        marked = re.findall(pair, visible, re.IGNORECASE)
        if not marked:
            raise Unreadable(
                f"the reply is not one object and holds no SCORE with the prompt's mark: {visible[:200]!r}"
            )
        value = marked[-1].strip()
    return _number(value, top)


def read_decision(reply: str, *, mark: str, answer: str) -> float:
    """1.0 for "Final Decision: Yes", 0.0 for No; `mark` and `answer` as in `read_score`.

    Models trained for this very question write no mark. Their No may stand in any words, since no answer gains by it.
    """
    visible = without_thinking(reply)
    marked = re.findall(rf"final\s+decision\W{{0,12}}(yes|no)\W{{1,12}}{re.escape(mark)}", visible, re.IGNORECASE)
    if marked:
        return float(marked[-1].lower() == "yes")
    own = _QUOTATION.sub(" ", visible).strip()
    last_line = _LAST_LINE.fullmatch(own.rpartition("\n")[2])
    stated = [word.lower() for word in _STATEMENT.findall(own)]
    if stated[-1:] == ["no"] or (last_line and last_line.group(2).lower() == "no"):
        return 0.0
    if not last_line or last_line.group(1).lower() != "decision" or "no" in stated:
        raise Unreadable(f"the reply does not end with its final decision: {visible[-200:]!r}")
    if "finaldecisionyes" in _letters(answer):
        raise Unreadable("the reply repeats a decision of the answer, without the mark of the prompt")
    return 1.0


def without_thinking(reply: str) -> str:
    """The text after the last `</think>`."""
    _, end, visible = reply.rpartition("</think>")
    if not end and visible.lstrip().startswith("<think>"):
        raise Unreadable(f"the reply is only thinking: {visible[:200]!r}")
    if len(visible) > _LONGEST:
        raise Unreadable(f"the reply has {len(visible):,} characters")
    return visible.strip()


def _unwrapped(text: str) -> str:
    """The text without the code fence and the `<answer>` tags around the whole of it."""
    for _ in range(2):
        if wrapped := _WRAPPING.fullmatch(text):
            text = wrapped.group(1) or wrapped.group(2) or ""
    return text.strip()


def _score_of_object(reply: str, mark: str, answer: str) -> object:
    """The SCORE of a reply that is one JSON object and nothing else; None for any other reply."""
    text = _unwrapped(reply) if len(reply) <= _LONGEST else ""
    if not text.startswith("{"):
        return None
    for form in json_forms(text):
        try:
            pairs, end = _OBJECTS.raw_decode(form)
        except (ValueError, RecursionError):
            continue
        scores = [value for key, value in pairs if key.strip().lower() == "score"]
        if len(scores) != 1 or not _END_OF_OBJECT.fullmatch(form, end):
            return None
        is_marked = mark in [value for key, value in pairs if key.strip().lower() == "mark"]
        if not is_marked and _letters(text) in _letters(answer):
            raise Unreadable(
                f"the reply repeats a verdict of the answer, without the mark of the prompt: {text[:200]!r}"
            )
        return scores[0]
    return None


def json_forms(text: str) -> tuple[str, str]:
    """A text to read as JSON, and the same with every backslash doubled that begins no escape.

    LaTeX in a string ("\\( x \\)") is a common fault of judges' JSON.
    """
    return text, _INVALID_ESCAPE.sub(lambda match: match.group() if match.group(1) else r"\\", text)


def _letters(text: str) -> str:
    """Letters and digits alone, in one case: the part of a text that a quotation keeps."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).lower()))


def _number(value: object, top: float) -> float:
    if isinstance(value, str):
        word = value.strip().lower()
        if match := _NUMBER.fullmatch(word):
            number = float(match.group(1))
            if match.group(2) and int(match.group(2)) != top:
                raise Unreadable(f"SCORE={value!r} is not of {top:g}")
        elif word in ("true", "false") and top == 1:
            number = float(word == "true")
        else:
            raise Unreadable(f"SCORE={value[:80]!r} is not a number")
    elif isinstance(value, bool) and top == 1:
        number = float(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    else:
        raise Unreadable(f"SCORE={value!r:.80} is not a number")
    if not 0 <= number <= top:
        raise Unreadable(f"SCORE={value!r:.80} is not between 0 and {top:g}")
    return float(number)
