"""What verifiers say of a row's label before anything is started."""

from __future__ import annotations

import json

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import Answer, Verifier

CONSTRAINT = json.dumps([{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}])
OLD_CONSTRAINT = json.dumps({"func_name": "validate_no_commas"})
SPAM = {"rubrics": [{"description": "It is short.", "weight": 1}]}
IN_NORMAL_FORM = ("flan", "string_matcher", "string_f1", "puzzle", "re_search", "re_search_f1")

READABLE: dict[str, list[object]] = {
    "integer": [5, "-5", ["5"]],
    "gsm8k": ["5", "#### 1,234", -0.5, ["1,000", "a thousand"]],
    "math": ["5", r"\boxed{x}", ["7", "seven"]],
    "strict_math": ["5"],
    "math_open_instruct": ["5"],
    **{key: ["Paris", "New York", "the co-founder", "Dr. No", "1,000", "5", "don't"] for key in IN_NORMAL_FORM},
    "max_length": [100, "100", "1e3"],
    "up_to_max_length": [100],
    "passthrough": [None, {}],
    "ifeval": [CONSTRAINT],
    "ifeval_old": [OLD_CONSTRAINT],
    "code": [["assert f(1) == 2"], json.dumps(["assert f(1) == 2"])],
    "code_stdio": [[{"input": "1", "output": "2"}]],
    "rubric": [SPAM, json.dumps(SPAM)],
    "general-safety": [None],
    "general-factuality": ["a fact"],
}  # fmt: skip
UNREADABLE: dict[str, list[object]] = {
    "integer": ["thirty", 5.5, None, ""],
    "gsm8k": ["", None, {}],
    "math": ["", None, r"\boxed{}", []],
    "strict_math": [""],
    "math_open_instruct": [""],
    **{key: ["", None, [], {"a": 1}] for key in IN_NORMAL_FORM},
    "max_length": ["many", -1, "1_0"],
    "up_to_max_length": [None],
    "ifeval": ["no commas", json.dumps([{"instruction_id": ["no:such"], "kwargs": [None]}])],
    "ifeval_old": [json.dumps({"func_name": "no_such"}), 5],
    "code": [[], [5], "[]"],
    "code_stdio": [["assert f(1) == 2"], "{"],
    "rubric": [{"rubrics": []}, "{"],
    "general-factuality": ["", None],
}
NOTED: dict[str, list[object]] = {
    "gsm8k": ["1/2", "five", "7/42", "1e42"],
    **{key: ["-5", "0.5", "3.14", ".5", "C++", "C#", "a < b", "$100", "100%", "1/2", "10:30", "5!", "x=3", ["pi", "3.14"]] for key in IN_NORMAL_FORM},
    "re_search": ['["-5", "-6"]'],
}  # fmt: skip


def cases(table: dict[str, list[object]]) -> list[tuple[str, object]]:
    return [(name, label) for name, labels in table.items() for label in labels]


@pytest.mark.parametrize(("name", "label"), cases(READABLE))
def test_nothing_is_said_of_a_label_that_is_compared_as_it_is(name: str, label: object) -> None:
    """A note about every data set would be read by none."""
    assert find(name).check_label(label) == ""


@pytest.mark.parametrize(("name", "label"), cases(UNREADABLE))
def test_a_label_that_cannot_be_read_is_refused_before_the_start_as_when_it_is_scored(name: str, label: object) -> None:
    """A whole run of such rows would end with the model it began with."""
    verifier = find(name)
    with pytest.raises(ValueError, match=r"ground_truth|label|test|unknown|argument"):
        verifier.check_label(label)
    if issubclass(verifier, Verifier):
        with pytest.raises(ValueError, match=r"."):
            verifier(Reward()).score(Answer(completion="5", ground_truth=label, num_tokens=5))


@pytest.mark.parametrize(("name", "label"), cases(NOTED))
def test_a_label_that_loses_what_matters_has_a_note(name: str, label: object) -> None:
    """A data set of numbers under `flan` teaches answers of which a sign or a point has gone."""
    notes = {find(name).check_label(label), find(name).check_label(NOTED[name][0])}
    assert len(notes) == 1, "notes are counted together"
    assert notes != {""}
