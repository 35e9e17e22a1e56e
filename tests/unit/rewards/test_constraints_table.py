"""Every constraint against hand-worked answers, and against labels that cannot be read."""

from __future__ import annotations

import sys
import types

import pytest

from mgrpo.rewards.constraints import score_instructions
from mgrpo.rewards.constraints.constraint_table import CONSTRAINTS, IFBENCH, IFEVAL, OPEN_INSTRUCT
from tests.unit.rewards.constraint_cases import IFBENCH_CASES, IFEVAL_CASES, OPEN_INSTRUCT_CASES, Case

CASES = IFEVAL_CASES + OPEN_INSTRUCT_CASES + IFBENCH_CASES
NEEDS = {
    "language:response_language": "langdetect",
    "change_case:english_capital": "langdetect",
    "change_case:english_lowercase": "langdetect",
    "words:odd_even_syllables": "syllapy",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_constraint_tells_a_kept_answer_from_a_broken_one(case: Case) -> None:
    """A checker that is off teaches the model to break the very rule that the prompt asks for."""
    if case.name in NEEDS:
        pytest.importorskip(NEEDS[case.name])
    assert score_instructions([case.name], [case.kwargs], case.kept) == [True]
    assert score_instructions([case.name], [case.kwargs], case.broken) == [False]


def test_every_constraint_of_the_three_sets_is_there_and_has_a_case() -> None:
    """A missing name would leave all prompts with that constraint without a score."""
    assert (len(IFEVAL), len(OPEN_INSTRUCT), len(IFBENCH)) == (25, 29, 58)
    assert {case.name for case in CASES} | {"words:start_verb"} == set(CONSTRAINTS)


@pytest.mark.parametrize("name", sorted({case.name for case in CASES if case.kwargs}))
def test_a_missing_argument_is_an_error_that_names_it(name: str) -> None:
    """Drawing an argument at random instead would score the same answer differently each time."""
    kwargs = next(case.kwargs for case in CASES if case.name == name)
    for missing in kwargs:
        given = {key: value for key, value in kwargs.items() if key != missing}
        with pytest.raises(ValueError, match=f"{name}: the label lacks the argument {missing}"):
            score_instructions([name], [given], "An answer.")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": "2", "relation": "at least"},
            "frequency='2' is not a whole",
        ),
        ("keywords:frequency", {"keyword": "a", "frequency": 2.5, "relation": "at least"}, "2.5 is not a whole number"),
        ("count:numbers", {"N": float("inf")}, "N=inf is not a whole number"),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": True, "relation": "at least"},
            "True is not a whole number",
        ),
        ("keywords:frequency", {"keyword": "a", "frequency": -1, "relation": "at least"}, "-1 is less than 0"),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1, "relation": "at most"},
            "none of 'less than', 'at least'",
        ),
        ("keywords:frequency", {"keyword": " ", "frequency": 1, "relation": "at least"}, "keyword=' ' is empty"),
        ("keywords:frequency", {"keyword": "(", "frequency": 1, "relation": "at least"}, "not a regular expression"),
        ("keywords:existence", {"keywords": []}, "is an empty list"),
        ("keywords:existence", {"keywords": "dog"}, "is not a list of text"),
        ("keywords:existence", {"keywords": ["dog"], "frequency": 1}, "unknown argument frequency; expected: keywords"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "one character",
        ),
        ("copy:copying_multiple", {"prompt_to_repeat": "go", "N": 0}, "N=0 is less than 1"),
        ("copy:copy", {"prompt_to_repeat": ""}, "prompt_to_repeat='' is empty"),
        ("ratio:stop_words", {"percentage": float("nan")}, "percentage=nan is not a number"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            "nth_paragraph=3 is more than num_paragraphs=2",
        ),
        ("punctuation:no_comma", {"N": 1}, "unknown argument N; expected: none"),
        ("punctuation:no_coma", {}, "unknown constraint 'punctuation:no_coma'; did you mean punctuation:no_comma"),
        (7, {}, "unknown constraint 7"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_an_error(name: str, kwargs: dict[str, object], message: str) -> None:
    """Scoring 0 against a broken label would punish every answer to that prompt."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        score_instructions([name], [kwargs], "An answer.")


def test_whole_floats_count_as_whole_numbers_and_none_as_not_given() -> None:
    """Arrow tables hold all rows' arguments in one schema: 2 becomes 2.0 and what a constraint has not is None."""
    kwargs = {"num_bullets": 2.0, "keywords": None, "relation": None}
    assert score_instructions(["detectable_format:number_bullet_lists"], [kwargs], "* a\n* b") == [True]


def test_custom_constraints_of_ifbench_take_any_argument() -> None:
    """IFBench's own checkers do, and its data set gives them some."""
    assert score_instructions(["custom:multiples"], [{"anything": 1}], "14 21 28 35 42 49") == [True]


def test_an_unknown_language_is_an_error() -> None:
    """langdetect never says zh, so that a label with it could not be kept by any answer."""
    pytest.importorskip("langdetect")
    with pytest.raises(ValueError, match="language='zh' is not known to langdetect"):
        score_instructions(["language:response_language"], [{"language": "zh"}], "你好")


def test_the_language_of_a_text_is_the_same_each_time() -> None:
    """langdetect draws samples, and takes this text for English or Dutch by turns: equal answers, unequal rewards."""
    pytest.importorskip("langdetect")
    names, kwargs = ["language:response_language"], [{"language": "nl"}]
    verdicts = {tuple(score_instructions(names, kwargs, "Hello world")) for _ in range(30)}
    assert len(verdicts) == 1


def test_text_without_letters_is_in_no_language() -> None:
    """IFEval's rule, by which it is in every language, pays for a number in place of an answer."""
    pytest.importorskip("langdetect")
    assert score_instructions(["language:response_language"], [{"language": "hi"}], "12345") == [False]


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there is no verdict, and 0 would be a wrong one."""
    from mgrpo.rewards.constraints import bench_words, languages

    caches = (bench_words._syllable_counter, bench_words._tagger, languages._langdetect)
    for package in ("langdetect", "syllapy", "nltk"):
        monkeypatch.setitem(sys.modules, package, None)
    for cache in caches:
        cache.cache_clear()
    for name, message in (
        ("change_case:english_capital", "pip install langdetect"),
        ("words:odd_even_syllables", "pip install syllapy"),
        ("words:start_verb", "pip install nltk"),
    ):
        with pytest.raises(ValueError, match=message):
            score_instructions([name], [{}], "GO NOW")
    for cache in caches:
        cache.cache_clear()


def test_the_first_three_tokens_decide_whether_an_answer_starts_with_a_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """nltk's tagger looks two words ahead; tagging a whole long answer for its first word would be slow."""
    from mgrpo.rewards.constraints import bench_words

    seen: list[list[str]] = []

    def pos_tag(tokens: list[str]) -> list[tuple[str, str]]:
        seen.append(tokens)
        return [(token, "VBZ" if token == "Go" else "NN") for token in tokens]

    fake = types.ModuleType("nltk")
    fake.pos_tag = pos_tag  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nltk", fake)
    bench_words._tagger.cache_clear()
    assert score_instructions(["words:start_verb"] * 2, [None, {}], "Go on, do it.") == [True, True]
    assert score_instructions(["words:start_verb"], [{}], "Dogs go.") == [False]
    assert seen[-1] == ["Dogs", "go", "."] and ["Go", "on", ","] in seen
    bench_words._tagger.cache_clear()
