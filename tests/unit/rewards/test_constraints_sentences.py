"""Sentences and tokens, against what nltk and IFEval make of the same text (worked out once with their own code)."""

from __future__ import annotations

import pytest

from mgrpo.rewards.constraints.sentences import punkt_sentences, split_sentences
from mgrpo.rewards.constraints.word_constraints import letter_runs, treebank_tokens


@pytest.mark.parametrize(
    "sentences",
    [
        ["Mr. Smith met Dr. Jones in Washington, D.C. yesterday.", "He left at 5 p.m. on Jan. 3."],
        ["The U.S. economy grew 2.5% in 1999.", "It shrank later."],
        ["The U.S.", "The U.K. Then nothing."],
        ["Use tools, e.g.", "a hammer, etc.", "and more."],
        ["1.", "First item 2.", "Second item"],
        ["It was 1999. in the end.", "Chapter 3.", "The end."],
        ["Wait!!!", "What?!", "Well... maybe not... John said.", "So...", "Here we go."],
        ['"Stop!"', "she cried.", "(He left.)", "Then nothing."],
        ["He said “Go.”", "Then ‘no.’", "«Si.»", "End"],
        ["The answer is A. Paris is nice.", "Option B.", "The second one."],
        ["World War I.", "The war ended."],
        ["J. K. Rowling and George W. Bush met.", "Bye."],
        ["Visit www.example.com.", "It costs $5.99."],
        ["One.", "two."],
        ["你好。世界。"],
        ["No end"],
        ["It ends in a bracket.)"],
    ],
)
def test_punkt_finds_the_sentences_that_nltk_finds(sentences: list[str]) -> None:
    """number_sentences stands on this, and so do all rules on tokens."""
    assert punkt_sentences(" ".join(sentences)) == sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Mr. Smith went to x.com. He paid 3.50!", ["Mr. Smith went to x.com.", "He paid 3.50!"]),
        ("Wait... no.", ["Wait...", "no."]),
        ("She has a Ph.D. in art. Why?", ["She has a Ph.D. in art.", "Why?"]),
        ("The U.S. He left. The U.S. is big.", ["The U.S.", "He left.", "The U.S. is big."]),
        ("Foo Inc. He left. Foo Inc. left.", ["Foo Inc", "He left.", "Foo Inc. left."]),
        ('He said "go." Then left.', ['He said "go".', "Then left."]),
        ("He said “go.” Then left.", ["He said “go”.", "Then left."]),
        ("Plan b. is it", ["Plan b. is it"]),
        ("one\ntwo.", ["one two."]),
        ("no end", ["no end"]),
        ("", []),
    ],
)
def test_split_sentences_follows_the_rules_of_ifeval(text: str, sentences: list[str]) -> None:
    """Constraints on the first and last words of sentences stand on this."""
    assert split_sentences(text) == sentences


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('I can\'t "do" it. No way...', "I ca n't `` do '' it . No way ..."),
        ("He said 'no' and (left) at 3:30, for $5.00!", "He said ' no ' and ( left ) at 3:30 , for $ 5.00 !"),
        ("dogs' 'tis cannot gonna wanna", "dogs ' ' tis can not gon na wan na"),
        ("one--two—three “x” it's we'll [a] A.B. end.", "one -- two — three “ x ” it 's we 'll [ a ] A.B . end ."),
        ("``a'' 50% x@y #1; yes: ok", "`` a '' 50 % x @ y # 1 ; yes : ok"),
        ('Mr. X. said: "Go."', "Mr. X. said : `` Go . ''"),
        ("", ""),
    ],
)
def test_tokens_are_those_of_the_penn_treebank(text: str, tokens: str) -> None:
    """Counting by white space would take "word." and "word" for two different words."""
    assert treebank_tokens(text) == tokens.split()


def test_letter_runs_take_combining_marks_for_letters() -> None:
    """nltk 3.10 does; the words of Hindi would fall apart otherwise."""
    assert letter_runs("cafe\u0301 don't x² हिन्दी") == ["cafe\u0301", "don", "t", "x", "हिन्दी"]
