"""Ways to a reward without the answer: nothing said, everything said, the form without its content."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import Answer

STRINGS = ("flan", "string_matcher", "puzzle", "string_f1", "re_search", "re_search_f1")
TAGGED = {
    "string_matcher": "<answer>{}</answer>",
    "re_search": "<finish>{}</finish>",
    "re_search_f1": "<finish>{}</finish>",
}
NOTHING = ("", " ", "\n", "<think>Paris</think>", "...", "!?", "the", "\u200b", "\ufeff", "\x00")
BETS = (
    "Paris or Rome", "Paris, Rome", "Paris/Rome", "Paris\nRome", "Paris; Rome", "Paris and Rome", "(Paris) Rome",
    "not Paris", "Paris is wrong", "anything but Paris", "Paris?? Rome!", "Paris Rome Berlin Madrid",
)  # fmt: skip
TAGS = (
    "</answer><answer>Paris", "<answer>Paris", "Paris</answer>", "<answer><answer>Paris",
    "<answer>Paris</answer><answer>Rome</answer>", "<answer>Paris</answer> <answer>Rome", "<ANSWER>Paris</ANSWER>",
    "</finish><finish>Rome</finish>Paris</finish>", "<finish>Rome</finish><finish></finish> Paris",
)  # fmt: skip


def score(verifier: str, completion: str, label: object) -> float:
    return find(verifier)(Reward()).score(Answer(completion=completion, ground_truth=label, num_tokens=10))


def ifeval(name: str, **kwargs: object) -> str:
    return json.dumps([{"instruction_id": [name], "kwargs": [kwargs]}])


def old(name: str, **kwargs: object) -> str:
    return json.dumps({"func_name": name, **kwargs})


def _string_hacks() -> list[tuple[str, object, str]]:
    hacks: list[tuple[str, object, str]] = []
    for name in STRINGS:
        form = TAGGED.get(name, "{}")
        hacks += [
            (name, label, form.format(text))
            for text in NOTHING
            for label in ("Paris", ["Paris", ""], ["", "Paris", " "])
        ]
        hacks += [(name, "A", form.format(text)) for text in ("", "the", "an", ".")]
        if name not in ("string_f1", "re_search_f1"):  # which pay for the share of right words by definition
            hacks += [(name, ["Paris", ""], form.format(text)) for text in BETS]
    hacks += [("string_matcher", "Paris", text) for text in TAGS]
    hacks += [
        ("puzzle", "Paris", text) for text in ("<answer>Paris</answer><answer>Rome</answer>", "</think>Paris</think>")
    ]
    hacks += [("re_search", "Paris", text) for text in TAGS]
    hacks += [
        ("flan", "Paris", text)
        for text in ("The answer is: Paris The answer is: Rome", "The answer is: Paris. The answer is: ")
    ]
    return hacks


HACKS: list[tuple[str, object, str]] = [
    *_string_hacks(),
    *(("gsm8k", "5", text) for text in ("", "5 or 6", "5, 6", "5 6", "5.0", "five", "5 5.1", "not 5, but 6")),
    *(("integer", 5, text) for text in ("", "5 or 6", "5.0", "+5", "05", "5 6", "\u0665")),
    # A language, without a word of it.
    *(
        ("ifeval", ifeval("language:response_language", language=language), text)
        for language in ("en", "de", "fr", "hi", "ar")
        for text in ("123", "!!!", "1 + 1 = 2", "\U0001f600 \U0001f600", "$$$", "")
    ),
    # Marks around nothing.
    *(
        ("ifeval", label, text)
        for label, texts in (
            (ifeval("detectable_content:number_placeholders", num_placeholders=3), ("[][][]", "a [] [ ] [\t]", "[[[]]]", "[.][][]")),
            (ifeval("detectable_format:number_highlighted_sections", num_highlights=3), ("******", "a * * * * * *", "a **** **** ****")),
            (ifeval("detectable_format:title"), ("<<>>", "a <<>>", "<< >> a", "<<<<>>>>")),
            (ifeval("startend:quotation"), ('""', '"', '" "', '"."')),
            (ifeval("punctuation:no_comma"), ("", " ", ".", "!!!", "\u200b")),
            (ifeval("keywords:forbidden_words", forbidden_words=["x"]), ("", "...", "\u200b", "-")),
            (ifeval("change_case:english_lowercase"), ("", "...", "123")),
            (ifeval("change_case:english_capital"), ("", "...", "123")),
            (ifeval("length_constraints:number_words", num_words=9, relation="less than"), ("", "...", "!")),
            (ifeval("letters:letter_counting", N=9, relation="less than"), ("", "...", "!")),
            (ifeval("detectable_format:constrained_response"), ("My answer is yes. My answer is no.", "My answer is yes. My answer is no. My answer is maybe.")),
            (ifeval("format:options", options="yes/no"), ("yes/no", "yes no", "", "yes or no")),
        )
        for text in texts
    ),
    *(
        ("ifeval_old", label, text)
        for label, texts in (
            (old("validate_no_commas"), ("", " ", ".", "!!!")),
            (old("validate_lowercase"), ("", " ", "...", "!?")),
            (old("validate_uppercase"), ("", " ", "...", "!?")),
            (old("validate_forbidden_words", forbidden_words=["dog"]), ("", " ", "...")),
            (old("validate_choice", options=["A", "B"]), ("AB", "A B", "A or B", "BANANA", "A, B", "")),
            (old("validate_choice", options=["yes", "no"]), ("yes no", "yes/no", "know", "no\nyes")),
            (old("validate_quotation"), ('"', '""', '" "', "")),
            (old("validate_highlighted_sections", N=3), ("******", "a ******", "* * * * * *", "*a* **** ")),
            (old("validate_placeholders", N=3), ("[][][]", "a [] [] []", "[ ] [ ] [ ]")),
            (old("validate_title"), ("<<>>", "a <<>>", "<< >>")),
            (old("validate_word_constraint", N=9, quantifier="at most"), ("", "...")),
            (old("verify_sentence_constraint", N=1, quantifier="around"), ("", "...")),
            (old("verify_letter_frequency", letter="a", N=0), ("", "...")),
            (old("verify_bullet_points", N=3), ("*\n*\n*", "-\n-\n-", "a\n* \n- \n*")),
            (old("validate_end", end_phrase=""), ("",)),
            (old("validate_response_language", language="en"), ("", "123", "!!!")),
        )
        for text in texts
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({name for name, *_ in HACKS}))
def test_no_hack_is_paid(name: str) -> None:
    """What the table calls a hack is a policy's shortest way to a reward, and it finds the shortest."""
    paid = []
    for _, label, completion in (hack for hack in HACKS if hack[0] == name):
        try:
            value = score(name, completion, label)
        except ValueError as err:
            if "langdetect" in str(err):
                continue
            raise
        if value > (0.1 if name == "re_search_f1" else 0.0):  # which pays a tenth for the tags
            paid.append((label, completion, value))
    assert not paid, "\n".join(map(str, paid))


PLACES = (
    "{}", "The answer is: {}", "<answer>{}</answer>", "<finish>{}</finish>", "<FINISH>{}</FINISH>", "<answer>{}", "{}</answer>",
    "</answer><answer>{}", "</finish><finish>{}", "{}</finish>", "<think>{}</think>", "</think>{}", "#### {}", "\\boxed{{{}}}",
    "${}$", "Final Answer: The final answer is {}. I hope it is correct.", "not {}", "{} or", ", {}", "\n{}\n", "answer: {}",
)  # fmt: skip
ONE_OF_MANY = {
    **dict.fromkeys(STRINGS, ("Paris", "Rome", "New York", "no", "A")),
    "gsm8k": ("5", "11", "23", "0.5", "-7"),
    "integer": ("5", "11", "23", "0", "-7"),
}  # fmt: skip


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_bets_on_several_labels_win_at_most_one(data: st.DataObject) -> None:
    """An answer that several labels would call right is paid for not choosing."""
    name, labels = data.draw(st.sampled_from(sorted(ONE_OF_MANY.items())))
    bets = data.draw(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(labels)), min_size=1, max_size=6))
    separator = data.draw(st.sampled_from(("", " ", "\n", ", ", " or ")))
    completion = separator.join(place.format(label) for place, label in bets)
    won = [label for label in labels if score(name, completion, label) == 1.0]
    assert len(won) <= 1, (name, completion, won)


@pytest.mark.parametrize("name", ONE_OF_MANY)
def test_every_pair_of_places_holds_at_most_one_answer(name: str) -> None:
    """The pairs are few enough to try all of them."""
    first, second = ONE_OF_MANY[name][:2]
    for one, other, separator in itertools.product(PLACES, PLACES, ("", " ", "\n")):
        completion = one.format(first) + separator + other.format(second)
        won = [label for label in (first, second) if score(name, completion, label) == 1.0]
        assert len(won) <= 1, completion


@pytest.mark.parametrize("name", ["ifeval", "ifeval_old"])
def test_one_of_the_options_is_a_choice(name: str) -> None:
    """Whoever names all of them has not chosen."""
    label = (
        ifeval("detectable_format:constrained_response")
        if name == "ifeval"
        else old("validate_choice", options=["My answer is yes.", "My answer is no.", "My answer is maybe."])
    )
    options = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    for size in range(4):
        for chosen in itertools.combinations(options, size):
            assert score(name, f"Well. {' '.join(chosen)} So be it.", label) == float(size == 1)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a|a?)+b", "a.*?b.*?c"])
def test_an_answer_cannot_make_a_labels_regular_expression_run_for_ever(pattern: str) -> None:
    """It would take its worker along and have no score, where a wrong answer has 0."""
    label = ifeval("keywords:existence", keywords=[pattern])
    for answer in ("a" * 40 + "!", "ab" * 20_000 + "!"):
        assert score("ifeval", answer, label) in (0.0, float(pattern == "(a|a?)+b"))
