"""IFBench: properties of each word or sentence, and relations of neighbours."""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Callable

from mgrpo.rewards.constraints.label_arguments import Count, Filled, Text
from mgrpo.rewards.constraints.sentences import split_sentences
from mgrpo.rewards.constraints.word_constraints import PUNCTUATION_AND_SPACE, bare, treebank_tokens

_ALPHABET = string.ascii_lowercase
_CONSONANTS = frozenset("bcdfghjklmnpqrstvwxyz")
_PRIMES_BELOW_100 = frozenset(n for n in range(2, 100) if all(n % divisor for divisor in range(2, n)))


def alphabet_loop(response: str) -> bool:
    words = bare(response).split()
    if not words or words[0][0].lower() not in _ALPHABET:
        return False
    first = _ALPHABET.index(words[0][0].lower())
    return all(
        word.lower()[0] == _ALPHABET[(first + distance) % len(_ALPHABET)]
        for distance, word in enumerate(words[1:], start=1)
    )


def three_vowels(response: str) -> bool:
    """One line, with no more than three different vowels."""
    text = response.strip()
    return "\n" not in text and len(set(text.lower()) & set("aeiou")) <= 3


def consonant_clusters(response: str) -> bool:
    return all(
        any(one in _CONSONANTS and two in _CONSONANTS for one, two in itertools.pairwise(word))
        for word in response.lower().split()
    )


def growing_alliteration(response: str) -> bool:
    """Each sentence has more words than the one before that share their first letter with a neighbour."""
    previous = -1
    for sentence in split_sentences(response):
        words = [word.lstrip(PUNCTUATION_AND_SPACE) for word in sentence.lower().split()]
        initials = [word[0] for word in words if word]
        pairs = [one == two for one, two in itertools.pairwise(initials)]
        # A run of n pairs has n + 1 words.
        runs = sum(1 for pair, before in zip(pairs, [False, *pairs], strict=False) if pair and not before)
        alliteration = sum(pairs) + runs
        if alliteration <= previous:
            return False
        previous = alliteration
    return True


def ten_palindromes(response: str) -> bool:
    words = bare(response).lower().split()
    return sum(1 for word in words if len(word) >= 5 and word == word[::-1]) >= 10


def prime_lengths(response: str) -> bool:
    return all(len(word) in _PRIMES_BELOW_100 for word in bare(response).split())


def starts_with_verb(response: str) -> bool:
    tokens = treebank_tokens(response)[:3]
    return bool(tokens) and "VB" in _tagger()(tokens)[0][1]


def alternating_syllables(response: str) -> bool:
    """Numbers of syllables, by syllapy, are odd and even in turn."""
    count = _syllable_counter()
    odd = [count(word) % 2 for word in bare(response).lower().split()]
    return all(one != two for one, two in itertools.pairwise(odd))


def linked_sentences(response: str) -> bool:
    """Each sentence begins with the last word of the one before."""
    sentences = split_sentences(response)
    for sentence, following in itertools.pairwise(sentences):
        last = sentence.rstrip(PUNCTUATION_AND_SPACE).rsplit(maxsplit=1)
        first = following.lstrip(PUNCTUATION_AND_SPACE).split(maxsplit=1)
        if not last or not first or last[-1].lower() != first[0].lower():
            return False
    return True


def linked_paragraphs(response: str) -> bool:
    """Each line ends with the word that it begins with."""
    lines = [line.strip().lower().strip(PUNCTUATION_AND_SPACE).split() for line in response.split("\n")]
    return all(words[0] == words[-1] for words in lines if words)


def growing_sentences(response: str, *, small_n: Count) -> bool:
    lengths = [len(bare(sentence).split()) for sentence in split_sentences(response)]
    return bool(lengths) and all(after == before + small_n for before, after in itertools.pairwise(lengths))


def no_shared_initials(response: str) -> bool:
    words = bare(response.lower()).split()
    return all(one[0] != two[0] for one, two in itertools.pairwise(words))


def keyword_in_sentence(response: str, *, word: Filled, N: Count) -> bool:
    """N=0 is the last sentence."""
    sentences = split_sentences(response)
    return len(sentences) >= N and bool(sentences) and word.lower() in sentences[N - 1].lower()


def second_words(response: str, *, keyword: Text) -> bool:
    """The second token and the last but one are the keyword."""
    tokens = treebank_tokens(response)
    return len(tokens) >= 2 and tokens[1] == tokens[-2] == keyword.strip()


def title_case(response: str) -> bool:
    """No token begins with a small letter and goes on in one case; "a" alone passes."""
    return not any(
        token[0].islower() and (token[1:].isupper() or token[1:].islower()) for token in treebank_tokens(response)
    )


@functools.cache
def _syllable_counter() -> Callable[[str], int]:
    try:
        import syllapy
    except ImportError as err:
        raise ValueError("words:odd_even_syllables needs syllapy: pip install syllapy==0.8.0") from err
    return syllapy.count


@functools.cache
def _tagger() -> Callable[[list[str]], list[tuple[str, str]]]:
    needed = "pip install nltk==3.10.4, and python -m nltk.downloader averaged_perceptron_tagger_eng"
    try:
        from nltk import pos_tag

        pos_tag(["Go"])
    except (ImportError, LookupError) as err:
        raise ValueError(f"words:start_verb needs nltk and the data of its tagger: {needed}") from err
    return pos_tag
