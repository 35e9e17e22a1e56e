"""What the verifiers of strings call right, on hand-worked answers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer, Verifier
from mgrpo.rewards.verifiers.strings import Flan, Puzzle, ReSearch, ReSearchF1, StringF1, StringMatcher, normal_form

ALL = [Flan, StringMatcher, StringF1, Puzzle, ReSearchF1, ReSearch]


def score(verifier: type[Verifier], completion: str, label: object) -> float:
    return verifier(Reward()).score(Answer(completion=completion, ground_truth=label))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat's\tmat.", "cats mat"),
        ("a an the", ""),
        ("another Anthem", "another anthem"),
        ("the-end", "theend"),
        ("“the end”", "“ end”"),
        ("\u0130", "i\u0307"),
        ("A\u00a0b", "b"),
    ],
)
def test_normal_form_is_that_of_squad(text: str, normal: str) -> None:
    """Punctuation beyond ASCII, articles within words, or their order would change scores against other trainers."""
    assert normal_form(text) == normal


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("The answer is: Paris.", "paris", 1.0),
        ("The answer is: Rome. No. The answer is: the Paris", "Paris", 1.0),
        ("paris", "Paris", 1.0),
        ("the answer is: Paris", "Paris", 0.0),
        ("The answer is:Paris", "Paris", 0.0),
        ("The answer is: Paris, I think", "Paris", 0.0),
        ("The answer is: Rome", ["Paris", "Rome"], 1.0),
        ("The answer is: 5", 5, 1.0),
    ],
)
def test_flan_reads_what_follows_the_last_phrase(completion: str, label: object, expected: float) -> None:
    """A looser phrase would reward completions that do not follow the format of the task."""
    assert score(Flan, completion, label) == expected


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("<answer>Rome</answer> <answer> The Paris! </answer>", "paris", 1.0),
        ("<answer>Rome</answer>", "paris", 0.0),
        ("Paris", "paris", 0.0),
        ("<answer>Paris", "paris", 0.0),
        ("Paris</answer>", "paris", 0.0),
        ("</answer><answer>Paris", "paris", 0.0),
        ("<ANSWER>Paris</ANSWER>", "paris", 0.0),
        ("<answer>Rome</answer>", ["Paris", "Rome"], 1.0),
    ],
)
def test_string_matcher_reads_the_last_answer(completion: str, label: object, expected: float) -> None:
    """Without the demand for tags the policy would drop them."""
    assert score(StringMatcher, completion, label) == expected


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("hello world", "hello world", 1.0),
        ("hello world", "hello", 2 / 3),
        ("<think>hello</think><answer>world</answer>", "hello world", 2 / 3),
        ("hello hello", "hello world", 0.5),
        ("hello hello", "hello hello world", 0.8),
        ("hello world", ["goodbye", "the world"], 2 / 3),
        ("hello", "world", 0.0),
        ("", "world", 0.0),
        ("the", "a", 0.0),
        ("5", [5], 1.0),
    ],
)
def test_string_f1_is_the_best_f1_of_the_words(completion: str, label: object, expected: float) -> None:
    """Repeated words count as often as the label has them; a set of words would score "hello hello" too high."""
    assert score(StringF1, completion, label) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("<think>Rome?</think> <answer>New York City!</answer>", "new york city", 1.0),
        ("<|assistant|>the Paris", "Paris", 1.0),
        ("it is Paris", "Paris", 0.0),
        ("<think>Paris", "Paris", 0.0),
        ("Rome</think>Paris</think>", "Paris", 0.0),
    ],
)
def test_puzzle_compares_the_whole_answer(completion: str, label: object, expected: float) -> None:
    """An answer found anywhere in the text would reward listing all choices."""
    assert score(Puzzle, completion, label) == expected


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("<finish>Rome</finish> <finish>the Paris</finish>", "paris", 1.0),
        ("<finish>Paris", "paris", 1.0),
        ("Paris</finish>", "paris", 1.0),
        ("Paris", "paris", 0.0),
        ("<finish></finish>", "paris", 0.0),
        ("<finish> </finish>", "paris", 0.1),
        ("<finish>Rome</finish>", "paris", 0.1),
        ("<finish>Paris France</finish>", "paris", 2 / 3),
        ("<finish>a b c d e f g h i j k l m n o p q r s t u paris</finish>", "paris", 2 / 22),
        ("<finish>Paris</finish>", '["Rome", "Paris"]', 1.0),
        ("<finish>Paris</finish>", ["Rome", "Paris"], 1.0),
        ("<finish>Paris</finish>", '"Paris"', 1.0),
        ("<finish>1e3</finish>", "1e3", 1.0),
        ("<finish>1000.0</finish>", "1e3", 1.0),
        ("<FINISH>Paris</FINISH>", "paris", 0.0),
    ],
)
def test_re_search_f1_pays_a_tenth_for_the_tags(completion: str, label: object, expected: float) -> None:
    """Without the tenth the policy would not find the format; a tenth for empty tags would be free."""
    assert score(ReSearchF1, completion, label) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("<finish>Paris</finish> <finish>Rome</finish>", "paris", 1.0),
        ("<finish>Rome</finish> <finish>Paris</finish>", "paris", 0.0),
        ("<Finish>\nThe Paris.\n</FINISH>", "paris", 1.0),
        ("<finish>Paris", "paris", 0.0),
        ("</finish>Paris<finish>", "paris", 0.0),
        ("</finish> <finish>Paris</finish>", "paris", 1.0),
        ("<finish> </finish>", "paris", 0.0),
        ("<finish>Paris</finish>", '["Rome", "Paris"]', 1.0),
        ("<finish>5</finish>", 5, 1.0),
        ("<finish>1.50</finish>", "1.50", 1.0),
        ("<finish>null</finish>", "null", 1.0),
    ],
)
def test_re_search_matches_the_first_complete_tags(completion: str, label: object, expected: float) -> None:
    """Taking the last tags would let the policy try several answers."""
    assert score(ReSearch, completion, label) == expected


@pytest.mark.parametrize("form", ["The answer is: {}", "<answer>{}</answer>"])
@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    [("(A)", "A", True), ("a.", "A", True), ("", "A", False), ("the", "A", False), ("+", "+", True), ("-", "+", False)],
)
def test_labels_of_articles_and_punctuation_are_compared_with_them(
    form: str, answer: str, label: str, is_right: bool
) -> None:
    """In SQuAD's normal form the choice A is the empty text: saying nothing would be right."""
    verifier = Flan if form.startswith("The") else StringMatcher
    assert score(verifier, form.format(answer), label) == float(is_right)


@pytest.mark.parametrize("verifier", ALL)
@pytest.mark.parametrize("label", [None, True, [], {"a": 1}, ["x", None], [["x"], {}]])
def test_strings_refuse_a_label_that_is_no_text(verifier: type[Verifier], label: object) -> None:
    """Scoring 0 against a broken label would punish every answer to that prompt, tags or not."""
    for completion in ("x", "<finish>x</finish><answer>x</answer>"):
        with pytest.raises(ValueError, match="ground_truth"):
            score(verifier, completion, label)


@pytest.mark.parametrize("label", ['{"target": ["Paris"]}', "[]", '[{"a": 1}]'])
def test_search_refuses_json_that_holds_no_texts(label: str) -> None:
    """The text of a JSON object would be compared with the answer, and every answer be wrong."""
    for verifier in (ReSearch, ReSearchF1):
        with pytest.raises(ValueError, match="ground_truth"):
            score(verifier, "<finish>Paris</finish>", label)


@given(st.text(), st.text(min_size=1).filter(str.strip))
def test_strings_score_any_text_between_zero_and_one(text: str, label: str) -> None:
    """An exception would leave an odd answer without a score, where it is plainly wrong."""
    for verifier in (Flan, StringMatcher, StringF1, Puzzle):
        assert 0.0 <= score(verifier, text, label) <= 1.0
        assert 0.0 <= score(verifier, f"<answer>{text}</answer>", [label, "x"]) <= 1.0
    for verifier in (ReSearch, ReSearchF1):
        assert 0.0 <= score(verifier, f"<finish>{text}</finish>", ["x", label]) <= 1.0


@given(
    st.text().filter(lambda text: text.strip() and "answer>" not in text),
    st.text(alphabet=" \t\n\r\u00a0", min_size=1, max_size=3),
)
def test_strings_take_no_notice_of_white_space(text: str, space: str) -> None:
    """A tokenizer that adds a space after a tag would change rewards."""
    spaced = space + text.replace(" ", f" {space}") + space
    for verifier in (StringF1, Puzzle):
        assert score(verifier, text, "the Eiffel tower") == score(verifier, spaced, "the Eiffel tower")
    assert score(StringMatcher, f"<answer>{text}</answer>", text) == 1.0
    assert score(StringMatcher, f"<answer>{spaced}</answer>", text) == 1.0


@pytest.mark.parametrize(
    "unit",
    ["A", "<answer>", "</answer>", "<finish>", "<FINISH", "</finish>", "</think>", "the ", "\u0130", "\ud800", "\0"],
)
def test_strings_take_linear_time(unit: str) -> None:
    """A policy that learns to repeat a tag would stall the run at the verifier."""
    text = (unit * 200_000)[:200_000]
    started = time.process_time()
    for verifier in ALL:
        assert 0.0 <= score(verifier, text, "x") <= 0.1
    assert time.process_time() - started < 10
