"""Words of a text: runs of letters, bare words, and the Penn Treebank tokens that nltk's `word_tokenize` makes.

The rules of nltk 3.10 are matched with its own engine, `regex`, in which combining marks belong to words.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable

from mgrpo.rewards.constraints.sentences import punkt_sentences

PUNCTUATION_AND_SPACE = string.punctuation + " "
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

# The characters that a rule needs in a sentence, its pattern, and the replacement. The rules are applied in this order
# to one sentence, which is split at white space afterwards. Clitics (n't, 's) come last because the space behind them
# marks them.
_TREEBANK_RULES: tuple[tuple[str, str, str], ...] = (
    ("«“‘„`", r"[«“‘„]|`+", r" \g<0> "),
    ('"', r'\A"', "``"),
    ('"`', r"``", " `` "),
    ("\"'", r"""([ (\[{<])(?:"|'')""", r"\1 `` "),
    ("'", r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' "),
    (".", r"""([^.])\.([\])}>"' »”’]*+)\s*$""", r"\1 . \2 "),
    (":,", r"([:,])([^\d])", r" \1 \2"),
    (":,", r"[:,]$", r" \g<0> "),
    (".", r"\.{2,}", r" \g<0> "),
    (";@#$%&‒–—―", r"[;@#$%&‒–—―]", r" \g<0> "),
    (".", r"""([^.])\.([\])}>"']*)\s*$""", r"\1 .\2 "),
    ("?!", r"[?!]", r" \g<0> "),
    ("'", r"([^'])' ", r"\1 ' "),
    ("*[](){}<>", r"[*\[\](){}<>]", r" \g<0> "),
    ("-", r"--", " -- "),
    ("»”’", r"[»”’]", r" \g<0> "),
    ("'\"", r"""''|\"""", " '' "),
    ("'", r"\A|\s+|\Z", " "),
    ("'", r"([^' ])('[sSmMdD]?) ", r"\1 \2 "),
    ("'", r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", r"\1 \2 "),
)
_CONTRACTION = re.compile(r"cannot|d'ye|gimme|gonna|gotta|lemme|more'n|wanna|'tis|'twas", re.IGNORECASE)
_CONTRACTIONS: tuple[re.Pattern[str], ...] = (
    re.compile(r"\b(can)(not)\b", re.IGNORECASE),
    re.compile(r"\b(d)('ye)\b", re.IGNORECASE),
    re.compile(r"\b(gim)(me)\b", re.IGNORECASE),
    re.compile(r"\b(gon)(na)\b", re.IGNORECASE),
    re.compile(r"\b(got)(ta)\b", re.IGNORECASE),
    re.compile(r"\b(lem)(me)\b", re.IGNORECASE),
    re.compile(r"\b(more)('n)\b", re.IGNORECASE),
    re.compile(r"\b(wan)(na)(?=\s|\Z)", re.IGNORECASE),
    re.compile(r" ('t)(is)\b", re.IGNORECASE),
    re.compile(r" ('t)(was)\b", re.IGNORECASE),
)


def says_something(text: str) -> bool:
    """True if the text has a letter or a digit of any script; marks alone are the form of an answer without its content."""
    return any(char.isalnum() for char in text)


def letter_runs(text: str) -> list[str]:
    r"""The words of a word count: runs of `\w`."""
    return _letter_runs()(text)


def bare(text: str) -> str:
    """The text without ASCII punctuation."""
    return text.translate(_NO_PUNCTUATION)


def treebank_tokens(text: str) -> list[str]:
    """Words and punctuation marks as separate tokens, sentence by sentence: "I can't." gives I, ca, n't and a full stop."""
    tokens: list[str] = []
    for sentence in punkt_sentences(text):
        chars = set(sentence)
        for needed, substitute, replacement in _treebank_rules():
            if not chars.isdisjoint(needed):
                sentence = substitute(replacement, sentence)
        if _CONTRACTION.search(sentence):
            for contraction in _CONTRACTIONS:
                sentence = contraction.sub(r" \1 \2 ", sentence)
        tokens += sentence.split()
    return tokens


@functools.cache
def _letter_runs() -> Callable[[str], list[str]]:
    import regex

    return regex.compile(r"\w+").findall


@functools.cache
def _treebank_rules() -> list[tuple[frozenset[str], Callable[[str, str], str], str]]:
    import regex

    return [
        (frozenset(needed), regex.compile(pattern).sub, replacement) for needed, pattern, replacement in _TREEBANK_RULES
    ]
