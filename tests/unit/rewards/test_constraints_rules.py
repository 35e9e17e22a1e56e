"""Corners of single constraints that the peers decide in a way of their own, or that a rule of thumb would get wrong."""

from __future__ import annotations

import pytest

from mgrpo.rewards.constraints import score_instructions

LESS, LEAST = "less than", "at least"


def keeps(name: str, response: str, **kwargs: object) -> bool:
    return score_instructions([name], [kwargs], response)[0]


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ("* a\n* b", 2),
        ("*\n* a", 1),
        ("*", 0),
        ("* ", 1),
        ("** a", 0),
        ("*a*", 1),
        ("\n\n \t* a\n\x0b- b", 2),
        ("-", 1),
        ("--- \n text - no", 1),
        ("*\n*\n* a", 2),
    ],
)
def test_bullets_are_counted_as_by_the_regular_expression_of_ifeval(response: str, count: int) -> None:
    r"""`^\s*\*[^\*].*$`: the character behind the asterisk may be the end of its line."""
    response = f"Some text.\n{response}"
    assert keeps("detectable_format:number_bullet_lists", response, num_bullets=count)
    assert not keeps("detectable_format:number_bullet_lists", response, num_bullets=count + 1)


@pytest.mark.parametrize(
    ("response", "is_title"),
    [
        ("<<a>>", True),
        ("<<<<a>", False),
        ("<< >>", False),
        ("<<>>>", False),
        ("<<a\n>>", False),
        (">> <<a>>", True),
        ("<<>> x >>", True),
    ],
)
def test_a_title_stands_on_one_line(response: str, is_title: bool) -> None:
    """The regular expression of the peers is greedy: the line's first << and last >> belong together."""
    assert keeps("detectable_format:title", response) is is_title


@pytest.mark.parametrize(
    ("response", "count"), [("[a][b", 1), ("[[a]]", 1), ("[]] [ ] [a]", 1), ("]a[", 0), ("[a\n] [b]", 1)]
)
def test_placeholders_are_closed_by_the_next_bracket_of_their_line(response: str, count: int) -> None:
    """Counting brackets instead would take nested, broken or empty ones for several."""
    assert keeps("detectable_content:number_placeholders", response, num_placeholders=count)
    assert not keeps("detectable_content:number_placeholders", response, num_placeholders=count + 1)


@pytest.mark.parametrize(
    ("response", "count"),
    [("*a*", 1), ("**a**", 1), ("***a***", 2), ("* * *", 0), ("*a\n*b*", 1), ("*a*b*", 1), ("****", 0)],
)
def test_highlights_are_counted_once_in_one_or_two_asterisks(response: str, count: int) -> None:
    """Both forms are looked for separately, and empty ones do not count."""
    response = f"Some text.\n{response}"
    assert keeps("detectable_format:number_highlighted_sections", response, num_highlights=count)
    assert not keeps("detectable_format:number_highlighted_sections", response, num_highlights=count + 1)


def test_keywords_are_regular_expressions() -> None:
    """The peers search for them as such: `a.b` is kept by `axb`."""
    assert keeps("keywords:existence", "axb", keywords=["a.b"])
    assert not keeps("keywords:forbidden_words", "axb", forbidden_words=["a.b"])


def test_words_hold_their_combining_marks() -> None:
    """A count that takes each vowel sign for the end of a word finds four words in two of Hindi."""
    assert keeps("length_constraints:number_words", "हिन्दी भाषा", num_words=3, relation=LESS)


def test_an_unclosed_json_answer_is_not_json_however_deep() -> None:
    """The parser's recursion limit is no verdict of its own."""
    assert not keeps("detectable_format:json_format", "[" * 100_000)


def test_the_first_letter_of_a_word_may_have_two_lower_case_characters() -> None:
    """Its code point is none that a neighbour could follow."""
    assert not keeps("keywords:no_adjacent_consecutive", "İstanbul is")
    assert keeps("keywords:no_adjacent_consecutive", "İstanbul")


def test_a_phrase_is_looked_for_line_by_line() -> None:
    """The last word may be on the line more often than the first."""
    phrase = {"phrase": "Go to the old house", "small_n": 1}
    assert keeps("copy:repeat_phrase", "house Go to the big house. house", **phrase)
    assert not keeps("copy:repeat_phrase", "Go to the\nbig house", **phrase)
    assert not keeps("copy:repeat_phrase", "Go to the old house", **phrase)
    assert not keeps("copy:repeat_phrase", "Go up to the old house", **phrase)


@pytest.mark.parametrize(
    ("response", "is_kept"),
    [
        ("a\n b", True),
        ("a\n\n b", True),
        ("a\n\n\n b", False),
        ("\n\na\n b", False),
        ("a\n \n  \n b", False),
        ("a\n b\n", True),
        ("a\n  b\n c", False),
    ],
)
def test_stairs_pass_over_the_line_behind_an_empty_one(response: str, is_kept: bool) -> None:
    """IFBench takes lines out of the list it walks through; a rule of its own would disagree with the benchmark."""
    assert keeps("format:line_indent", response) is is_kept


def test_one_empty_line_may_stand_before_bullets_and_none_between_sentences() -> None:
    """IFBench ends the text at the first empty line."""
    assert keeps("format:no_bullets_bullets", "One. Two.\n\n* a\n* b")
    assert not keeps("format:no_bullets_bullets", "One.\n\nTwo.\n* a\n* b")


def test_quotes_without_any_text_break_nothing() -> None:
    """IFBench's checker fails on an answer of digits and marks alone; there is no quote in it to explain."""
    assert keeps("format:quote_unquote", "12.5!")


def test_an_empty_field_is_not_in_quotes() -> None:
    """The peers fail there; an answer must not."""
    header = "StudentID\tSubject\tGrade\tSemester\tScore\n"
    assert not keeps("custom:csv_quotes", header + '"1"\t\t"b"\t"2"\t"3"\n' * 3)


def test_a_csv_field_without_end_is_no_table() -> None:
    """Python's reader gives up at 128 KiB."""
    assert not keeps("custom:csv_city", "ID,Country,City,Year,Count\n" + 'a"b,"' + "x" * 200_000)


def test_loose_scoring_forgives_lines_around_the_answer_and_asterisks() -> None:
    """IFEval's eight variants: chatty openings are what models add most often."""
    answer = "Sure, here it is:\n**no such mark**\nHope it helps, bye"
    names = ["punctuation:no_comma", "startend:end_checker", "length_constraints:number_words"]
    kwargs = [{}, {"end_phrase": "such mark"}, {"num_words": 4, "relation": LESS}]
    assert score_instructions(names, kwargs, answer) == [False, False, False]
    assert score_instructions(names, kwargs, answer, loose=True) == [True, True, True]


def test_a_variant_without_text_keeps_nothing() -> None:
    """Without its only line an answer has no comma, and would pass."""
    assert score_instructions(["punctuation:no_comma"], [{}], "one, two", loose=True) == [False]
    assert score_instructions(["punctuation:no_comma"], [{}], " \n") == [False]
