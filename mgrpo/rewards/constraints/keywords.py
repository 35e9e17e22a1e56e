"""Constraints on which words and letters a response holds (IFEval and Open Instruct).

Keywords are regular expressions there, and so they are here.
"""

from __future__ import annotations

import itertools
import re

from mgrpo.rewards.constraints.label_arguments import (
    Character,
    Count,
    FirstWord,
    Position,
    Relation,
    Text,
    Word,
    Words,
    holds,
)
from mgrpo.rewards.constraints.patterns import compiled
from mgrpo.rewards.constraints.sentences import split_sentences
from mgrpo.rewards.constraints.word_constraints import treebank_tokens

_NOT_GIVEN = Text("")


def keywords_exist(response: str, *, keywords: Words) -> bool:
    return all(compiled(keyword).occurs_in(response) for keyword in keywords)


def keyword_frequency(response: str, *, keyword: Word, frequency: Count, relation: Relation) -> bool:
    return holds(relation, _occurrences(keyword, response), frequency)


def keyword_once(response: str, *, keyword: Word) -> bool:
    return _occurrences(keyword, response) == 1


def keyword_once_and_twice(response: str, *, keyword1: Word, keyword2: Word) -> bool:
    return _occurrences(keyword1, response) == 1 and _occurrences(keyword2, response) == 2


def no_forbidden_words(response: str, *, forbidden_words: Words) -> bool:
    return not any(compiled(rf"\b{word}\b").occurs_in(response) for word in forbidden_words)


def keyword_excluded(response: str, *, keyword: Word, instruction: Text = _NOT_GIVEN) -> bool:
    """The keyword counts between two spaces only; `instruction` is the text from which the row's author drew it."""
    return f" {keyword} " not in response


def keyword_at_position(response: str, *, keyword: FirstWord, n: Position, m: Position) -> bool:
    """The keyword is the m-th token of the n-th sentence."""
    sentences = split_sentences(response)
    if len(sentences) < n:
        return False
    return treebank_tokens(sentences[n - 1])[m - 1 : m] == [keyword]


def letter_frequency(response: str, *, letter: Character, let_frequency: Count, let_relation: Relation) -> bool:
    return holds(let_relation, response.lower().count(letter.lower()), let_frequency)


def letter_count(response: str, *, N: Count, relation: Relation) -> bool:
    return holds(relation, len(re.findall(r"[a-zA-Z]", response)), N)


def no_consecutive_letters(response: str) -> bool:
    """No word starts with the letter that follows the first letter of the word before."""
    letters = [word[0].lower() for word in response.split()]
    if len(letters) > 1 and any(len(letter) != 1 for letter in letters):
        return False
    return all(ord(after) - ord(before) != 1 for before, after in itertools.pairwise(letters))


def palindrome(response: str) -> bool:
    """One word that reads the same backwards; "a" is one."""
    return any(word == word[::-1] for word in response.split())


def unique_words(response: str) -> bool:
    tokens = treebank_tokens(response)
    return len(tokens) == len(set(tokens))


def same_start_and_end(response: str) -> bool:
    tokens = treebank_tokens(response)
    return len(tokens) >= 2 and tokens[0].lower() == tokens[-1].lower()


def _occurrences(keyword: str, response: str) -> int:
    return sum(1 for _ in compiled(keyword).matches(response))
