"""Denials of a value in the sentence around it: "it is not 42", "42 is wrong", "I do not think the answer is 42".

Only words that are tied to the value count: "it is not 41 but 42" and "the values that x cannot take are 1 and 2" state theirs.
A verdict or a choice (no, false, C) is usually the subject of such words, "it is not possible: no" and "C is false", so that fewer
of them deny it. A few words on either side are read.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LONGEST_WINDOW = 160
_REMARK = re.compile(r"\A[\s$*_)\]}\\]*,(?= (?:which|but) )")
_BREAK = re.compile(r"[.!?](?=\s|$)|[;,\n]|(?<!\bis)(?<!\bare)(?<!\bnot):")
_NO_WORD = re.compile(r"\\[a-z]+|[^a-z0-9'.]+")
_QUESTION = re.compile(r"[\s$*_)\]}\\]*\?")
_RETRACTION = re.compile(r"[ $*_)\]}\\.,;!(-]*\b(?:no|nope|wrong|incorrect|false)\b\s*(?:[.,;!)]|$)")
_COMMAND = re.compile(r"\\[a-z]+")
_ALPHANUMERIC = re.compile(r"[A-Za-z0-9]+")
_CHOICE = re.compile(r"[A-Z]")
_DIRECT_NOT = re.compile(r"(?:\b(?:not|never|cannot)|n't)(?: be)?[ $*_({\\[}]*\Z")

_NEGATIVE = _words("no false none")
_VERDICTS = _NEGATIVE | _words("yes true")
_COPULAS = _words("is are was were equals")
_SUBJECTS = _words("it this that answer value result solution number total sum")
# Words between a denial and the value that it denies.
_BETWEEN = _words(
    "be been equal to the a an our my its true correct right case so certain sure possible think thinking believe say claim "
    "suppose expect get accept agree really actually simply exactly just even necessarily final"
)
_WRONG = _words("wrong incorrect false mistaken invalid")
# Words before "the wrong answer" that leave the value its subject; others may speak of the answers that were counted.
_OPENING = _words(
    "so thus hence then the a an my your one this that it is was would be common obvious quite simply clearly"
)
_RIGHT = _words("right correct true valid acceptable it")
_ARTICLES = _words("the a an my our your")
_ADVERBS = _words(
    "clearly simply obviously certainly definitely actually really also quite just plainly of course therefore"
)
_NONE = _words("no none nothing")
# "The wrong number is 42" names the number sought, "the wrong answer is 42" denies it.
_DESCRIBED = _words("number value total sum")
_NOT_DENYING_BEFORE_NOT = _words("if why or whether")


def is_denied(text: str, start: int, end: int) -> bool:
    """True if the words around `text[start:end]` deny it, or question it."""
    after = text[end : end + _LONGEST_WINDOW].lower().replace("’", "'")
    if _QUESTION.match(after):
        return True
    before = text[max(0, start - _LONGEST_WINDOW) : start].lower().replace("’", "'")
    following = _clause(_REMARK.sub("", after), 0)
    values = _ALPHANUMERIC.findall(_COMMAND.sub(" ", text[start:end]))
    if len(values) == 1 and (values[0].lower() in _VERDICTS or _CHOICE.fullmatch(values[0])):
        is_negated = values[0].lower() not in _NEGATIVE and bool(_DIRECT_NOT.search(before))
        return is_negated or _is_denied_after(following, wrong=frozenset(("wrong",)), right=frozenset())
    return (
        bool(_RETRACTION.match(after))
        or _is_denied_before(_clause(before, -1))
        or _is_denied_after(following, wrong=_WRONG, right=_RIGHT)
    )


def _clause(window: str, which: int) -> list[str]:
    return _NO_WORD.sub(" ", _BREAK.split(window)[which]).replace(".", " ").split()


def _negates(word: str) -> bool:
    return word in ("not", "never", "cannot") or word.endswith("n't")


def _is_denied_before(words: list[str]) -> bool:
    """True if the last words of a clause, which a value follows, deny it."""
    for place in reversed(range(len(words))):
        word, earlier, later = words[place], words[:place], words[place + 1 :]
        last = earlier[-1] if earlier else ""
        if _negates(word):
            return last not in _NOT_DENYING_BEFORE_NOT and not _is_about_others(earlier, word, later)
        if word == "doubt":
            return last in ("i", "we")
        if word in _WRONG:
            return _OPENING.issuperset(earlier) and _DESCRIBED.isdisjoint(later[:1])
        if (last, word) in (("other", "than"), ("rather", "than"), ("instead", "of"), ("no", "means")):
            return not any(other in _NONE or _negates(other) for other in earlier[:-1])
        # In "the values that x cannot be are 1 and 2" the verb that the value follows has no subject of its own here.
        if word in _COPULAS and last not in _SUBJECTS and last != "not":
            return _negates(last)
        if word not in _BETWEEN | _COPULAS | _SUBJECTS:
            return False
    return False


def _is_about_others(earlier: list[str], denial: str, later: list[str]) -> bool:
    """True if a denial belongs to a description: "the one that is not a solution is", "a number not equal to it is", "x cannot be"."""
    last = earlier[-1] if earlier else ""
    if denial in ("cannot", "can't") and len(last) == 1 and last != "i":
        return True
    if _COPULAS.isdisjoint(later):
        return False
    if denial == "not" and last in _COPULAS:
        return earlier[-2:-1] in (["that"], ["which"], ["who"])
    return last in ("that", "which", "who") or (denial == "not" and later[0] == "equal")


def _is_denied_after(words: list[str], *, wrong: frozenset[str], right: frozenset[str]) -> bool:
    """True if the first words of a clause, which follow a value, deny it, as "is wrong" and "is not right" do."""
    words = [word for word in words[:10] if word not in _ADVERBS]
    while words and words[0] in ("but", "which", "that", "this", "it"):
        words = words[1:]
    if not words:
        return False
    verb, *rest = words
    if verb in ("must", "would", "should", "will", "has", "can", "could", "seems", "looks"):
        is_negated = rest[:1] == ["not"]
        rest = [word for word in rest if word not in ("not", "to", "be")]
    elif verb in _COPULAS or verb.endswith("n't") or verb == "cannot":
        is_negated = verb not in _COPULAS or rest[:1] == ["not"]
        rest = [word for word in rest if word not in ("not", "be")]
    else:
        return False
    while rest and rest[0] in _ARTICLES:
        rest = rest[1:]
    is_about_the_answer = bool({"answer", "solution", "result", "case", "one"}.intersection(rest[:2]))
    if is_negated:
        return bool(rest) and (rest[0] in right or is_about_the_answer) and rest[0] not in _WRONG
    return bool(rest) and rest[0] in wrong
