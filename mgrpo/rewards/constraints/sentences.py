"""Sentences of a text, by the two rules that constraints use: IFEval's own splitting, and nltk's Punkt for English.

Punkt is a trained model; in place of its tables there are short lists of ordinary English (`vocabulary`). docs/ifeval.md
reports how often the two agree.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from mgrpo.rewards.constraints.vocabulary import ABBREVIATIONS, COMMON_WORDS, FREQUENT_STARTERS, STARTERS

_NEXT_SENTENCE = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s|That\s|This\s|Wherever)"
)
_COMPANY = r" (Inc|Ltd|Jr|Sr|Co)\."
# `<prd>` marks a full stop that ends nothing, `<stop>` the end of a sentence. The order matters: a later rule
# reads the text that an earlier one has left.
_SPLIT_RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\n", " "),
    (r"(Mr|St|Mrs|Ms|Dr)\.", r"\1<prd>"),
    (r"\.(com|net|org|io|gov|edu|me)", r"<prd>\1"),
    (r"([0-9])\.([0-9])", r"\1<prd>\2"),
    (r"\.{2,}", lambda dots: "<prd>" * len(dots.group()) + "<stop>"),
    (r"Ph\.D\.", "Ph<prd>D<prd>"),
    (r"\s([A-Za-z])\. ", r" \1<prd> "),
    (r"([A-Z]\.[A-Z]\.(?:[A-Z]\.)?) " + _NEXT_SENTENCE, r"\1<stop> \2"),
    (r"([A-Za-z])\.([A-Za-z])\.([A-Za-z])\.", r"\1<prd>\2<prd>\3<prd>"),
    (r"([A-Za-z])\.([A-Za-z])\.", r"\1<prd>\2<prd>"),
    (_COMPANY + " " + _NEXT_SENTENCE, r" \1<stop> \2"),
    (_COMPANY, r" \1<prd>"),
    (r" ([A-Za-z])\.", r" \1<prd>"),
    (r"\.”", "”."),
    (r'\."', '".'),
    (r'!"', '"!'),
    (r'\?"', '"?'),
    (r"[.?!]", r"\g<0><stop>"),
    (r"<prd>", "."),
)
_COMPILED_SPLIT_RULES = [(re.compile(pattern), replacement) for pattern, replacement in _SPLIT_RULES]

_NON_WORD = r"[)\";}\]*:@'({\[‘’“”«»?!]"
_RUN = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_WORD = rf"""{_RUN}|(?=[^("`{{\[:;&#*@)}}\]\-,])\S+?(?=\s|$|{_NON_WORD}|{_RUN}|,(?=$|\s|{_NON_WORD}|{_RUN}))|\S"""
_CANDIDATE = rf"[.?!](?=(?P<after>{_NON_WORD}|\s+(?P<word>\S+)))"
_CLOSING = r"(?m)[\"')\]}‘’“”«»]+?(?:\s+|(?=--)|$)"
_NUMBER = r"-?[.,]?\d[\d,.-]*\.?"
_INITIAL = r"[^\W\d]\."


def split_sentences(text: str) -> list[str]:
    """Sentences by IFEval's rules. A quotation mark behind the last full stop is swapped with it."""
    text = f" {text}  "
    for pattern, replacement in _COMPILED_SPLIT_RULES:
        text = pattern.sub(replacement, text)
    sentences = [sentence.strip() for sentence in text.split("<stop>")]
    return sentences if sentences[-1] else sentences[:-1]


def punkt_sentences(text: str) -> list[str]:
    """Sentences as nltk's `sent_tokenize` finds them."""
    closing = _patterns()["closing"]
    spans = [*_spans(text)]
    sentences: list[str] = []
    taken = 0
    for (start, end), following in zip(spans, [*spans[1:], None], strict=True):
        start += taken
        # Closing quotes and brackets belong to the sentence before them.
        closed = closing.match(text[slice(*following)]) if following else None
        taken = closed.end() if closed else 0
        if following and closed:
            end = following[0] + len(closed.group().rstrip())
        if closed or start < end:
            sentences.append(text[start:end])
    return sentences


def _spans(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for mark, context in _marks_in_context(text):
        if _holds_break(context):
            yield start, mark.end()
            start = mark.start("word") if mark["word"] else mark.end()
    yield start, len(text.rstrip())


def _marks_in_context(text: str) -> Iterator[tuple[Any, str]]:
    """The marks that may end a sentence, each with its word and the text behind it; of marks in one word the last."""
    word_start, word_end, mark = 0, 0, None
    for found in _patterns()["candidate"].finditer(text):
        before = text[word_end : found.start()]
        space = max(before.rfind(char) for char in " \t\n\r\x0b\x0c")
        next_start = word_end + space + 1 if space > 0 else word_start
        if mark and word_end <= next_start:
            yield mark, text[word_start:word_end] + mark.group() + mark["after"]
        word_start, word_end, mark = next_start, found.start(), found
    if mark:
        yield mark, text[word_start:word_end] + mark.group() + mark["after"]


def _holds_break(context: str) -> bool:
    find_words = _patterns()["word"].findall
    tokens = [token for line in context.split("\n") if line.strip() for token in find_words(line)]
    return any(_ends_sentence(token, following) for token, following in itertools.pairwise(tokens))


def _ends_sentence(token: str, following: str) -> bool:
    """True if the full stop, question or exclamation mark of `token` ends a sentence, given the next token."""
    if token in ("?", "!"):
        return True
    if not token.endswith("."):
        return False
    is_ellipsis = len(token) > 1 and not token.strip(".")
    word = token[:-1].lower()
    is_abbreviation = not is_ellipsis and (word in ABBREVIATIONS or word.rpartition("-")[2] in ABBREVIATIONS)
    is_upper = following[0].isupper()
    next_word = following.lower()
    if next_word.endswith(".") and next_word[:-1] not in ABBREVIATIONS:
        next_word = next_word[:-1]
    is_inner = following in (";", ":", ",", ".", "!", "?") or following[0].islower()
    if _patterns()["initial"].fullmatch(token):
        return not (is_abbreviation or is_inner or (is_upper and next_word not in COMMON_WORDS))
    if is_ellipsis or is_abbreviation:
        return is_upper and (next_word in STARTERS or next_word in FREQUENT_STARTERS)
    return not (is_inner and _patterns()["number"].fullmatch(token))


@functools.cache
def _patterns() -> dict[str, Any]:
    import regex

    sources = {"word": _WORD, "candidate": _CANDIDATE, "closing": _CLOSING, "number": _NUMBER, "initial": _INITIAL}
    return {name: regex.compile(source) for name, source in sources.items()}
