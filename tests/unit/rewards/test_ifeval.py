"""`ifeval` and `ifeval_old`: which labels they read, and what they make of an answer."""

from __future__ import annotations

import copy
import json

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers.ifeval import IFEval, IFEvalOld

LABEL = {
    "instruction_id": ["punctuation:no_comma", "keywords:existence"],
    "kwargs": [None, {"keywords": ["dog"], "N": None}],
}
LABELS = {
    "python": str([LABEL]),
    "json": json.dumps([LABEL]),
    "json in a list in text": str([json.dumps(LABEL)]),
    "list": [LABEL],
    "mapping": LABEL,
    "text in a list": [str([LABEL])],
    "google's key": [{"instruction_id_list": LABEL["instruction_id"], "kwargs": LABEL["kwargs"]}],
}


def score(label: object, completion: str) -> float:
    return IFEval(Reward()).score(Answer(completion=completion, ground_truth=label))


def old_score(label: object, completion: str) -> float:
    return IFEvalOld(Reward()).score(Answer(completion=completion, ground_truth=label))


def test_both_are_found_by_their_names() -> None:
    """A row's `dataset` names its verifier."""
    assert find("ifeval") is IFEval
    assert find("ifeval_old") is IFEvalOld


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS.keys())
def test_the_score_is_the_share_of_kept_constraints(label: object) -> None:
    """Data sets write the label in all of these forms; one that is not read would leave its prompts without a score."""
    assert score(label, "A dog.") == 1.0
    assert score(label, "A cat, a dog.") == 0.5
    assert score(label, "A cat, a bird.") == 0.0


def test_only_what_follows_the_thinking_is_judged() -> None:
    """Commas and dogs of the reasoning are none of the answer's."""
    assert score(LABEL, "<think>Commas, many</think><answer>A dog.</answer>") == 1.0
    assert score(LABEL, "<think>a dog</think>no") == 0.5


@pytest.mark.parametrize("completion", ["", " \n", "<think>A dog.</think>", "<answer></answer>"])
def test_an_empty_answer_keeps_nothing(completion: str) -> None:
    """Silence has no comma, and would be the easiest way to a reward."""
    assert score(LABEL, completion) == 0.0


def test_a_label_may_ask_for_loose_scoring() -> None:
    """Loose scoring tries the answer without its first and last lines."""
    answer = "Sure, here it is:\nA dog."
    assert score({**LABEL, "mode": "strict"}, answer) == 0.5
    assert score(json.dumps([{**LABEL, "mode": "loose"}]), answer) == 1.0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("no label", "neither JSON nor a Python literal"),
        ("[" * 9000, "neither JSON nor a Python literal"),
        ([], "holds no mapping"),
        (7, "holds no mapping"),
        ("[[[[[[[[[[{}]]]]]]]]]]", "holds no mapping"),
        ({"kwargs": []}, "instruction_id=None and kwargs=.* must be lists"),
        ({"instruction_id": ["punctuation:no_comma"]}, "kwargs=None must be lists"),
        ({"instruction_id": "punctuation:no_comma", "kwargs": {}}, "must be lists"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": []}, "1 constraints have 0 kwargs"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": ["x"]}, "kwargs='x' is not a mapping"),
        ({"instruction_id": ["no:such"], "kwargs": [None]}, "unknown constraint 'no:such'"),
        ({**LABEL, "mode": "lax"}, "mode='lax' in the label is neither strict nor loose"),
    ],
)
def test_a_label_that_cannot_be_read_is_an_error(label: object, message: str) -> None:
    """Also for an empty answer: whether a label is good must not depend on the answer."""
    for completion in ("A dog.", ""):
        with pytest.raises(ValueError, match=message):
            score(label, completion)


def test_a_label_without_constraints_scores_nothing() -> None:
    """There is nothing to keep; the peers give 0."""
    assert score({"instruction_id": [], "kwargs": []}, "A dog.") == 0.0


@pytest.mark.parametrize("wrap", [dict, json.dumps, str, lambda label: [json.dumps(label)]])
def test_old_labels_name_one_function(wrap: object) -> None:
    """Arguments that are None belong to other functions."""
    label = wrap({"func_name": "validate_end", "end_phrase": "bye", "N": None})  # type: ignore[operator]
    assert old_score(label, "<think>no</think> Good bye ") == 1.0
    assert old_score(label, "bye!") == 0.0


def test_an_old_label_is_the_same_after_scoring() -> None:
    """The peers take the function's name out of it, so that only the first answer of a group could score."""
    label = {"func_name": "validate_no_commas", "N": None}
    before = copy.deepcopy(label)
    assert [old_score(label, "fine"), old_score(label, "fine")] == [1.0, 1.0]
    assert label == before


def test_text_without_a_language_is_in_none() -> None:
    """langdetect raises there, and a wrong answer must score 0."""
    pytest.importorskip("langdetect")
    assert old_score({"func_name": "validate_response_language", "language": "en"}, "12345") == 0.0


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"N": 1}, "unknown constraint None"),
        ({"func_name": "validate_commas"}, "unknown constraint 'validate_commas'; did you mean validate_no_commas"),
        ({"func_name": "validate_end"}, "lacks the argument end_phrase"),
        ("text", "neither JSON nor a Python literal"),
    ],
)
def test_an_old_label_that_cannot_be_read_is_an_error(label: object, message: str) -> None:
    """0 for every answer would punish the model for a broken label."""
    with pytest.raises(ValueError, match=message):
        old_score(label, "text")


def test_warming_up_needs_no_package_that_a_constraint_may_lack() -> None:
    """A worker must start where langdetect is not installed."""
    IFEval(Reward()).warm_up()
    IFEvalOld(Reward()).warm_up()
