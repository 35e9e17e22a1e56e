"""IFBench: numbers and ratios of words, sentences and characters."""

from __future__ import annotations

import collections
import re

from mgrpo.rewards.constraints.label_arguments import Count, Percentage, Position, Text
from mgrpo.rewards.constraints.sentences import split_sentences
from mgrpo.rewards.constraints.vocabulary import CONJUNCTIONS, PERSON_NAMES, PRONOUNS, STOP_WORDS
from mgrpo.rewards.constraints.word_constraints import PUNCTUATION_AND_SPACE, bare, letter_runs

_END_MARKS = frozenset(".,!?;:")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")


def word_count_range(response: str, *, min_words: Count, max_words: Count) -> bool:
    return min_words <= len(letter_runs(response)) <= max_words


def unique_word_count(response: str, *, N: Count) -> bool:
    return len({word.strip(PUNCTUATION_AND_SPACE) for word in response.lower().split()}) >= N


def stop_words(response: str, *, percentage: Percentage) -> bool:
    words = letter_runs(response)
    stops = sum(1 for word in words if word.lower() in STOP_WORDS)
    return bool(words) and stops / len(words) * 100 <= percentage


def two_statements_a_question(response: str) -> bool:
    statements, questions, _ = _sentence_kinds(response)
    return statements == 2 * questions


def balanced_sentence_kinds(response: str) -> bool:
    return len(set(_sentence_kinds(response))) == 1


def conjunctions(response: str, *, small_n: Count) -> bool:
    """Different spellings count as different: "and" and "And,"."""
    words = {word for word in response.split() if word.strip(PUNCTUATION_AND_SPACE).lower() in CONJUNCTIONS}
    return len(words) >= small_n


def person_names(response: str, *, N: Count) -> bool:
    return sum(1 for name in PERSON_NAMES if name in response) >= N


def trigram_overlap(response: str, *, reference_text: Text, percentage: Percentage) -> bool:
    """Share of the response's different runs of three characters that the reference also has, within 2 points."""
    trigrams = _trigrams(response)
    if not trigrams:
        return False
    overlap = len(trigrams & _trigrams(reference_text)) / len(trigrams)
    return percentage - 2 <= overlap * 100 <= percentage + 2


def numbers(response: str, *, N: Count) -> bool:
    """1,000.5 is one number."""
    return len(re.findall(r"\d+", bare(response))) == N


def every_mark(response: str) -> bool:
    """All of `.,!?;:`, and an interrobang, whose two marks do not count."""
    if not any(interrobang in response for interrobang in ("?!", "!?", "‽")):
        return False
    rest = response.replace("?!", "", 1) if "?!" in response else response.replace("!?", "", 1)
    return set(rest) >= _END_MARKS


def words_japanese(response: str, *, N: Position) -> bool:
    words = (word.strip(PUNCTUATION_AND_SPACE) for word in response.split()[N - 1 :: N])
    return all(not word or word.isdigit() or _JAPANESE.search(word) for word in words)


def pronouns(response: str, *, N: Count) -> bool:
    return sum(1 for word in bare(response.replace("/", " ").lower()).split() if word in PRONOUNS) >= N


def keywords_multiple(
    response: str, *, keyword1: Text, keyword2: Text, keyword3: Text, keyword4: Text, keyword5: Text
) -> bool:
    """The five keywords occur once, twice, three, five and seven times, in any case."""
    text = response.lower()
    wanted = ((keyword1, 1), (keyword2, 2), (keyword3, 3), (keyword4, 5), (keyword5, 7))
    return all(text.count(keyword.strip().lower()) == count for keyword, count in wanted)


def word_repeats(response: str, *, small_n: Count) -> bool:
    counts = collections.Counter(bare(response.lower()).split())
    return max(counts.values(), default=0) <= small_n


def three_equal_sentences(response: str) -> bool:
    """Three sentences of equal length; their words are not compared."""
    lengths = [len(sentence) for sentence in split_sentences(response)]
    return len(lengths) == 3 and len(set(lengths)) == 1


def _sentence_kinds(response: str) -> tuple[int, int, int]:
    ends = collections.Counter(sentence[-1:] for sentence in split_sentences(response))
    return ends["."], ends["?"], ends["!"]


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}
