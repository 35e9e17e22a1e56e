"""The contract of a row: what it may be, and what its columns mean."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import numpy as np
import pytest

from mgrpo.data.rows import Contract
from tests.unit.data.conftest import user

CONTRACT = Contract()
FREE = Contract(need_verifiers=False)
GOOD = {"prompt": "1+1=", "ground_truth": 2, "dataset": "integer"}
MESSAGES = [user("1+1?")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1, 2], "expected an object with messages or prompt"),
        ({"question": "1+1="}, "found prompt None among 'question', expected messages"),
        ({}, "found prompt None among nothing"),
        ({**GOOD, "prompt": ""}, "found prompt '' among"),
        ({**GOOD, "prompt": 5}, "found prompt 5 among"),
        ({**GOOD, "prompt": []}, "found prompt \\[\\], expected a list with at least one message"),
        ({**GOOD, "messages": []}, "found messages \\[\\], expected a list with at least one message"),
        ({**GOOD, "messages": [{"role": "user"}]}, "found message .*expected .*content"),
        ({**GOOD, "messages": ["hello"]}, "found message 'hello'"),
        ({**GOOD, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "found message"),
        ({**GOOD, "messages": "1+1"}, "found messages '1\\+1'"),
        ({**GOOD, "dataset": 7}, "found dataset 7, expected the name of a verifier"),
        ({**GOOD, "dataset": ""}, "found dataset ''"),
        ({**GOOD, "dataset": []}, "found dataset \\[\\]"),
        ({**GOOD, "dataset": ["math", None]}, "found dataset \\['math', None\\]"),
        ({**GOOD, "dataset": ["math", "integer"]}, "found ground_truth 2 for 2 verifiers"),
        ({**GOOD, "dataset": ["math", "integer"], "ground_truth": [2]}, "for 2 verifiers"),
        ({"prompt": "1+1=", "dataset": "integer"}, "found no ground_truth"),
        ({**GOOD, "prompt": "a\ud800"}, "found half of a character in the prompt, '\\\\ud800'"),
        ({**GOOD, "messages": [user("\udfff")]}, "half of a character"),
    ],
)
def test_a_malformed_row_says_what_was_found_and_expected(record: object, message: str) -> None:
    """Nobody can mend a row of which is only said that it is bad."""
    with pytest.raises(ValueError, match=message):
        CONTRACT.check(record)


@pytest.mark.parametrize(
    ("record", "prompt", "verifiers", "truths"),
    [
        (GOOD, "1+1=", ("integer",), (2,)),
        ({"messages": MESSAGES, "ground_truth": "2", "dataset": ["math"]}, MESSAGES, ("math",), ("2",)),
        (
            {"prompt": MESSAGES, "ground_truth": ["2", 2], "dataset": ["math", "integer"]},
            MESSAGES,
            ("math", "integer"),
            ("2", 2),
        ),
        ({**GOOD, "ground_truth": ["a", "b"]}, "1+1=", ("integer",), (["a", "b"],)),
        ({**GOOD, "messages": MESSAGES, "ground_truth": {"x": [1]}}, MESSAGES, ("integer",), ({"x": [1]},)),
        ({**GOOD, "messages": None, "ground_truth": 0}, "1+1=", ("integer",), (0,)),
    ],
)
def test_all_forms_of_the_contract_are_read(record: dict, prompt: object, verifiers: tuple, truths: tuple) -> None:
    """Rows of Open Instruct and of TRL."""
    assert CONTRACT.check(record) == (isinstance(prompt, list), verifiers)
    assert CONTRACT.prompt(record) == prompt
    assert CONTRACT.labels(record) == (verifiers, truths)


def test_rows_without_a_verifier_are_for_reward_functions_only() -> None:
    """With reward functions labels are theirs, and `dataset` may be any column; without, such a row could never score."""
    for record, truths in (
        ({"prompt": "a"}, ()),
        ({"prompt": "a", "ground_truth": 3}, (3,)),
        ({"prompt": "a", "ground_truth": ["x", "y"], "dataset": {"split": 1}}, (["x", "y"],)),
    ):
        assert FREE.check(record) == (False, ())
        assert FREE.labels(record) == ((), truths)
    with pytest.raises(ValueError, match="expected the name of a verifier"):
        CONTRACT.check({"prompt": "a"})


def test_column_names_may_be_others() -> None:
    """Datasets name their columns differently, and rewriting a million rows for that is unreasonable."""
    contract = Contract(messages_key="chat", ground_truths_key="answer")
    record = {"chat": MESSAGES, "answer": "2", "dataset": "math", "ground_truth": "not this", "messages": "nor this"}
    assert contract.check(record) == (True, ("math",))
    assert contract.prompt(record) == MESSAGES
    assert contract.labels(record) == (("math",), ("2",))
    assert contract.columns(record) == {k: v for k, v in record.items() if k != "chat"}
    with pytest.raises(ValueError, match="found no answer, expected"):
        contract.check({**GOOD})
    with pytest.raises(ValueError, match=r"expected chat \(a list"):
        contract.check({"messages": MESSAGES})


def test_an_answer_that_ends_the_messages_is_no_part_of_the_prompt() -> None:
    """A prompt that holds the answer is solved before it is asked; a lone answer is all there is."""
    answer = {"role": "assistant", "content": "2"}
    for key in ("messages", "prompt"):
        assert CONTRACT.prompt({key: [*MESSAGES, answer]}) == MESSAGES
        assert CONTRACT.prompt({key: [*MESSAGES, answer, user("why?")]}) == [*MESSAGES, answer, user("why?")]
        assert CONTRACT.prompt({key: [answer]}) == [answer]


def test_messages_keep_their_own_keys_but_not_those_of_others() -> None:
    """Templates read more than role and content; tables fill in null for what a message does not have."""
    message = {"role": "user", "content": "hi", "name": "Ann", "tool_calls": None}
    assert CONTRACT.prompt({"messages": [message]}) == [{"role": "user", "content": "hi", "name": "Ann"}]


def test_columns_are_all_but_the_prompt() -> None:
    """TRL gives reward functions every other column."""
    record = {**GOOD, "messages": MESSAGES, "level": 3, "tags": ["a"]}
    assert CONTRACT.columns(record) == {"ground_truth": 2, "dataset": "integer", "level": 3, "tags": ["a"]}


def test_values_of_tables_become_json() -> None:
    """Arrow and pandas give arrays, dates and decimals; verifiers run in other processes and get JSON."""
    record = {
        **GOOD,
        "array": np.array([[1, 2]], np.int32),
        "number": np.float32(0.5),
        "day": datetime.date(2024, 2, 29),
        "decimal": Decimal("3.50"),
        "pair": (1, 2),
    }
    text, lost = CONTRACT.to_json(record)
    assert lost == []
    assert json.loads(text) == {
        **GOOD,
        "array": [[1, 2]],
        "number": 0.5,
        "day": "2024-02-29",
        "decimal": "3.50",
        "pair": [1, 2],
    }


def test_columns_that_json_cannot_hold_are_named_and_null() -> None:
    """A picture beside the text must not keep anyone from training on the text."""
    text, lost = CONTRACT.to_json({**GOOD, "picture": b"\x89PNG", "nested": {"deep": [object()]}, "ok": 1})
    assert lost == ["picture", "nested"]
    assert json.loads(text) == {**GOOD, "picture": None, "nested": None, "ok": 1}
    for key in ("prompt", "messages", "ground_truth", "dataset"):
        with pytest.raises(ValueError, match=rf"found {key} b'x' \(bytes is not a JSON value\), expected a JSON value"):
            CONTRACT.to_json({**GOOD, key: b"x"})
