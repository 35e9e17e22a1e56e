"""The verdict in a judge's reply. A reply from which two verdicts, or none, can be read is an `Unreadable`.

A judge may quote the answer it judges, and an answer may hold what looks like a verdict. So a verdict counts where the
whole reply is one JSON object; elsewhere only if everything in the reply that looks like a score has the same value, and one of
them is where the judge's own would be: in an object that the reply starts or ends with, and that closes.
"""

from __future__ import annotations

import json
import re

_OBJECTS = json.JSONDecoder(strict=False, object_pairs_hook=lambda pairs: pairs)
_FENCE = re.compile(r"```[A-Za-z]*")
_INVALID_ESCAPE = re.compile(r'\\(\\|["/bfnrt]|u[0-9A-Fa-f]{4})|\\')
_SCORE = re.compile(r"""["']score\\*["']\s*:\s*\\*["']?([^"'\\,}\n]{0,40})""", re.IGNORECASE)
_REST_OF_OBJECT = re.compile(r"[\\\"'\s}`\]]*")
_NUMBER = re.compile(r"([-+]?(?:[0-9]{1,9}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))(?:\s*/\s*([0-9]{1,4}))?")
_DECISION = re.compile(r"final\s+decision\W{0,12}(yes|no)\b(?!\s*(?:/|or\b))", re.IGNORECASE)
# A verdict is a few sentences. Longer replies are refused, since reading them would be slow.
_LONGEST = 200_000


class Unreadable(ValueError):
    """A reply without exactly one verdict."""


def read_score(reply: str, *, top: float) -> float:
    """The one SCORE of the reply, between 0 and `top`.

    Numbers, numbers in quotes and "7/10" (of `top` only) are scores; true and false are, where the scale ends at 1.
    """
    whole = _score_of_object(_unfenced(reply))
    if whole is not None:
        return _number(whole, top)
    visible = _without_thinking(reply)
    whole = _score_of_object(visible)
    if whole is not None:
        return _number(whole, top)
    matches = list(_SCORE.finditer(visible))
    if not matches:
        raise Unreadable(f"the reply holds no SCORE: {visible[:200]!r}")
    values = {_number(match.group(1).strip(), top) for match in matches}
    begin = max(visible.find("{"), 0)
    own = _score_of_object(visible[begin:], may_go_on=begin == 0)
    if own is not None:
        values.add(_number(own, top))
    if len(values) > 1:
        raise Unreadable(f"the reply holds several scores, {sorted(values)}: {visible[:200]!r}")
    if own is None and not any(_is_verdict(match) for match in (matches[0], matches[-1])):
        raise Unreadable(f"the reply neither starts nor ends with its verdict: {visible[:200]!r}")
    return values.pop()


def read_decision(reply: str) -> float:
    """1.0 for "Final Decision: Yes", 0.0 for No."""
    visible = _without_thinking(reply)
    decisions = {match.lower() for match in _DECISION.findall(visible)}
    if len(decisions) != 1:
        many = "both decisions" if decisions else "no final decision"
        raise Unreadable(f"the reply holds {many}: {visible[-200:]!r}")
    return float(decisions == {"yes"})


def _without_thinking(reply: str) -> str:
    """What follows the last `</think>`, without `<answer>` tags or a code fence around it."""
    _, end, visible = reply.rpartition("</think>")
    if not end and visible.lstrip().startswith("<think>"):
        raise Unreadable(f"the reply is only thinking: {visible[:200]!r}")
    if len(visible) > _LONGEST:
        raise Unreadable(f"the reply has {len(visible):,} characters")
    return _unfenced(visible.replace("<answer>", "").replace("</answer>", ""))


def _unfenced(text: str) -> str:
    text = text.strip()
    if fence := _FENCE.match(text):
        text = text[fence.end() :].removesuffix("```")
    return text.strip()


def _is_verdict(match: re.Match) -> bool:
    """Whether this score, in a reply that is not JSON, is the judge's own and not a quotation in its broken text."""
    text = match.string
    before = text[: match.start()].rstrip("\\ \t\r\n")
    if before == "{":  # nothing has been quoted yet
        return True
    rest = _REST_OF_OBJECT.match(text, match.end())
    assert rest is not None  # it also matches the empty text
    end = rest.end()
    is_key = not before or before.endswith(("{", ","))
    is_closed = text.count("{", 0, end) <= text.count("}", 0, end)
    return is_key and is_closed and (text.startswith("{") or end == len(text))


def _score_of_object(text: str, *, may_go_on: bool = False) -> object:
    """The SCORE of a text that is one JSON object and nothing else, unless it `may_go_on`; None for any other text."""
    if not text.startswith("{") or len(text) > _LONGEST:
        return None
    # LaTeX in a string ("\( x \)") is a common fault of judges' JSON.
    for form in (text, _INVALID_ESCAPE.sub(lambda match: match.group() if match.group(1) else r"\\", text)):
        try:
            pairs, end = _OBJECTS.raw_decode(form)
        except (ValueError, RecursionError):
            continue
        scores = [value for key, value in pairs if key.strip().lower() == "score"]
        if len(scores) != 1 or not (may_go_on or _REST_OF_OBJECT.fullmatch(form, end)):
            return None
        return scores[0]
    return None


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
