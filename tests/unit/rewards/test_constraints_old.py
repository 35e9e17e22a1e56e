"""The 25 functions of `ifeval_old`, on answers worked by hand from their descriptions."""

from __future__ import annotations

import pytest

from mgrpo.rewards.constraints.label_arguments import bound
from mgrpo.rewards.constraints.old import OLD_FUNCTIONS

CASES: tuple[tuple[str, dict[str, object], str, str], ...] = (
    ("verify_keywords", {"keyword_list": ["Dog", "cat"]}, "a DOGHOUSE, Cat", "a dog"),
    ("verify_keyword_frequency", {"word": "Dog", "N": 2}, "dog. Dogs, DOG!", "dog dog dog"),
    ("validate_forbidden_words", {"forbidden_words": ["dog"]}, "a cat", "a DOGHOUSE"),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "banAna", "An apple"),
    ("validate_response_language", {"language": "de"}, "Das ist ein deutscher Satz über nichts.", "1234"),
    ("verify_paragraph_count", {"N": 2}, "a\n * * *\nb", "a\n* * *\n"),
    ("validate_word_constraint", {"N": 10, "quantifier": "around"}, "a " * 11, "a " * 12),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a b", "a-b"),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a b", "a b c"),
    ("verify_sentence_constraint", {"N": 1, "quantifier": "at most"}, "Mr. X is e.g. here", "It is. He was."),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "A. B? C! D.", "No end"),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "Then"}, "a\n\n Thence", "a\n\nb\n\nThen"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a P.S. "),
    ("validate_placeholders", {"N": 2}, "[a] [b]", "[a] [] ]["),
    ("verify_bullet_points", {"N": 2}, "* a\n  -b\n+c", "* a\n- b\n** c"),
    ("validate_title", {}, "x <<y>>", "<<a\n>> <<>>"),
    ("validate_choice", {"options": ["yes", "no"]}, "no, it is not", "it is not"),
    ("validate_highlighted_sections", {"N": 2}, "*a* **b**", "*a* ** *\n*b"),
    (
        "validate_sections",
        {"N": 2, "section_splitter": "Section"},
        "Section 1 a Section 2 b",
        "Intro Section 1 Section 2",
    ),
    ("validate_json_format", {}, '{"a": [1]}', '```{"a": 1}```'),
    ("validate_repeat_prompt", {"original_prompt": "Go on"}, "Go on. Yes", "go on"),
    ("validate_two_responses", {}, "a ****** b", "a****** a"),
    ("validate_uppercase", {}, "A 1!", "Aa"),
    ("validate_lowercase", {}, "a 1!", "aA"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "I am US", "USa I"),
    ("validate_end", {"end_phrase": "end"}, "the end", "the end."),
    ("validate_quotation", {}, '"a"', '"'),
    ("validate_no_commas", {}, "a;b", "a,b"),
)


@pytest.mark.parametrize(("name", "kwargs", "kept", "broken"), CASES)
def test_function_tells_a_kept_answer_from_a_broken_one(
    name: str, kwargs: dict[str, object], kept: str, broken: str
) -> None:
    """These differ from the newer constraints of like names, and old data sets were written for them."""
    if name == "validate_response_language":
        pytest.importorskip("langdetect")
    assert bound(name, OLD_FUNCTIONS[name], kwargs)(kept) is True
    assert bound(name, OLD_FUNCTIONS[name], kwargs)(broken) is False


def test_all_25_functions_have_a_case() -> None:
    """A missing name would leave all prompts with that function without a score."""
    assert len(OLD_FUNCTIONS) == 25
    assert {name for name, *_ in CASES} == set(OLD_FUNCTIONS)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("validate_word_constraint", {"N": 2, "quantifier": "exactly"}, "none of 'at least', 'around', 'at most'"),
        ("validate_word_constraint", {"N": 2}, "lacks the argument quantifier"),
        ("validate_word_constraint", {"N": None, "quantifier": "around"}, "N=None is not a whole number"),
        ("verify_letter_frequency", {"letter": "ab", "N": 2}, "is not one character"),
        ("validate_choice", {"options": "yes"}, "is not a list of text"),
        ("validate_sections", {"N": 2, "section_splitter": ""}, "is empty"),
        ("validate_paragraphs", {"N": 1, "i": 2, "first_word": "a"}, "i=2 is not a paragraph of N=1"),
        ("validate_no_commas", {"N": 2}, "unknown argument N"),
        ("validate_repeat_prompt", {"original_prompt": ""}, "is empty"),
    ],
)
def test_a_label_that_cannot_be_read_is_an_error(name: str, kwargs: dict[str, object], message: str) -> None:
    """The peers answer some of these with 0 for every answer, which punishes the model for a broken label."""
    with pytest.raises(ValueError, match=message):
        bound(name, OLD_FUNCTIONS[name], kwargs)("text")
