"""Constraints on the number of words, sentences and paragraphs, and on their beginnings and ends (IFEval, Open Instruct)."""

from __future__ import annotations

import itertools
import re

from mgrpo.rewards.constraints.label_arguments import Count, FirstWord, Position, Relation, Text, Word, holds
from mgrpo.rewards.constraints.sentences import punkt_sentences, split_sentences
from mgrpo.rewards.constraints.word_constraints import letter_runs, treebank_tokens

_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_FIRST_WORD_END = frozenset(".,?!'\"")


def number_words(response: str, *, num_words: Count, relation: Relation) -> bool:
    return holds(relation, len(letter_runs(response)), num_words)


def number_sentences(response: str, *, num_sentences: Count, relation: Relation) -> bool:
    return holds(relation, len(punkt_sentences(response)), num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: Count) -> bool:
    return _filled_parts(_DIVIDER.split(response)) == num_paragraphs


def two_divided_paragraphs(response: str) -> bool:
    return _filled_parts(_DIVIDER.split(response)) == 2


def two_spaced_paragraphs(response: str) -> bool:
    return _filled_parts(response.split("\n\n")) == 2


def nth_paragraph_first_word(
    response: str, *, num_paragraphs: Count, nth_paragraph: Position, first_word: Text
) -> bool:
    """Empty paragraphs are left out of the number, but not when the n-th one is looked for."""
    if nth_paragraph > num_paragraphs:
        raise ValueError(f"nth_paragraph={nth_paragraph} is more than num_paragraphs={num_paragraphs}")
    paragraphs = response.split("\n\n")
    if sum(1 for paragraph in paragraphs if paragraph.strip()) != num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split(maxsplit=1)
    if not words:
        return False
    word = words[0].lstrip("'").lstrip('"')
    # Letter by letter: in a whole word, the lower case of a Greek sigma depends on whether it is the last letter.
    letters = itertools.takewhile(lambda letter: letter not in _FIRST_WORD_END, word)
    return "".join(letter.lower() for letter in letters) == first_word.lower()


def three_counted_paragraphs(response: str, *, n_sent: Position, n_words: Position) -> bool:
    paragraphs = _DIVIDER.split(response)
    if len(paragraphs) != 3:
        return False
    for paragraph in paragraphs:
        sentences = split_sentences(paragraph)
        if len(sentences) != n_sent or any(len(treebank_tokens(sentence)) != n_words for sentence in sentences):
            return False
    return True


def first_word_of_sentences(response: str, *, first_word: FirstWord) -> bool:
    words = [sentence.split(maxsplit=1) for sentence in split_sentences(response)]
    return all(word and word[0].lower() == first_word.lower() for word in words)


def first_word_of_response(response: str, *, first_word: Word) -> bool:
    words = response.split(maxsplit=1)
    return bool(words) and words[0].lower() == first_word.lower()


def last_word_of_sentences(response: str, *, last_word: FirstWord) -> bool:
    words = [sentence.rsplit(maxsplit=1) for sentence in split_sentences(response)]
    return all(word and _without_marks(word[-1]).lower() == last_word.lower() for word in words)


def last_word_of_response(response: str, *, last_word: Word) -> bool:
    words = response.rsplit(maxsplit=1)
    return bool(words) and _without_marks(words[-1]).lower() == last_word.lower()


def _filled_parts(parts: list[str]) -> int | None:
    """Number of parts, of which the first and the last may be empty and do not count then; None if another is empty."""
    if not all(part.strip() for part in parts[1:-1]):
        return None
    ends = {0, len(parts) - 1}
    return len(parts) - sum(1 for end in ends if not parts[end].strip())


def _without_marks(word: str) -> str:
    return re.sub(r"[^\w\s]", "", word)
