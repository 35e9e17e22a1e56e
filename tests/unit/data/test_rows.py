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
        ({**GOOD, "ground_truth": float("nan")}, "found NaN as ground_truth, expected what the verifier compares with"),
        ({**GOOD, "dataset": ["math", "math"], "ground_truth": ["2", float("nan")]}, "null and NaN are none"),
        ({**GOOD, "dataset": ["math", "math"], "ground_truth": [None, "2"]}, "null and NaN are none"),
        (
            {**GOOD, "prompt": str(MESSAGES)},
            "which looks like messages and is not JSON .* expected .*json.dumps, not str",
        ),
        ({**GOOD, "messages": "[{'role': 'user'\n 'content': '1'}]"}, "which looks like messages and is not JSON"),
        ({**GOOD, "prompt": json.dumps(MESSAGES[0])}, "found an object as JSON text, .* expected a list of messages"),
        ({**GOOD, "prompt": json.dumps([{"from": "human", "value": "1"}])}, "these are ShareGPT's names"),
        ({**GOOD, "prompt": json.dumps([{"role": "human", "content": "1"}])}, "found role 'human'"),
        ({**GOOD, "messages": [*MESSAGES, {"role": "assistant", "content": None}]}, "found message"),
        ({**GOOD, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": []}]}, "found message"),
        ({**GOOD, "messages": [{"role": "user", "tool_calls": [{"id": "c"}]}]}, "found message"),
        ({**GOOD, "messages": [{"role": "assistant", "tool_calls": "add"}]}, "found tool_calls 'add', expected a list"),
        ({**GOOD, "messages": [{"role": "assistant", "tool_calls": ["add"]}]}, "found tool_calls \\['add'\\]"),
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


def test_a_label_inside_a_column_is_found_by_its_path() -> None:
    """DAPO's and verl's rows keep it in reward_model, in tables also as JSON text."""
    contract = Contract(ground_truths_key="reward_model.ground_truth")
    label = {"ground_truth": "34", "style": "rule"}
    for column in ({"reward_model": label}, {"reward_model": json.dumps(label)}, {"reward_model.ground_truth": "34"}):
        record = {"prompt": MESSAGES, "dataset": "math", **column}
        assert contract.check(record) == (True, ("math",))
        assert contract.labels(record) == (("math",), ("34",))
        assert contract.columns(record) == {"dataset": "math", **column}
    for column in ({"reward_model": {"style": "rule"}}, {"reward_model": "34"}, {"reward_model": None}, {}):
        with pytest.raises(ValueError, match=r"found no reward_model\.ground_truth, expected"):
            contract.check({"prompt": MESSAGES, "dataset": "math", **column})


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


def test_messages_may_be_json_text() -> None:
    """Columns of CSV files and databases hold no lists; trained on as text, the braces are the question."""
    text = json.dumps([*MESSAGES, {"role": "assistant", "content": "2"}])
    for key in ("prompt", "messages"):
        record = {"ground_truth": 2, "dataset": "integer", key: f" {text}\n"}
        assert CONTRACT.check(record) == (True, ("integer",)) and CONTRACT.prompt(record) == MESSAGES


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "{}",
        '{"from": "Rome", "to": "Paris"}',
        '[{"role": "admin"}] Which role is it?',
        'Read [{"role": "user", "content": "a"}]',
        "{x | x > 0}",
    ],
)
def test_other_json_in_a_prompt_is_text(text: str) -> None:
    """Questions about JSON are questions."""
    assert CONTRACT.check({**GOOD, "prompt": text}) == (False, ("integer",))
    assert CONTRACT.prompt({**GOOD, "prompt": text}) == text


def test_messages_keep_no_nulls_below_their_keys() -> None:
    """A table gives each call the arguments of all others: the prompt from parquet would be another than from JSONL."""
    function = {"name": "weather", "arguments": {"city": "Paris", "a": None, "days": [{"b": None}, None]}}
    calls = [{"id": "c", "type": "function", "function": {**function, "strict": None}}]
    found = CONTRACT.prompt({"messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *MESSAGES]})
    own = {"name": "weather", "arguments": {"city": "Paris", "days": [{}, None]}}
    assert found[0]["tool_calls"] == [{"id": "c", "type": "function", "function": own}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_may_stand_without_content(content: dict, as_text: bool) -> None:
    """OpenAI's own form of a history with tools; templates join contents, so it is empty text for them."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 4}}}]
    message = {"role": "assistant", "tool_calls": json.dumps(calls) if as_text else calls, **content}
    record = {**GOOD, "messages": [*MESSAGES, message, {"role": "tool", "content": "22"}]}
    assert CONTRACT.check(record) == (True, ("integer",))
    expected = {"role": "assistant", "content": "", "tool_calls": calls}
    assert CONTRACT.prompt(record) == [*MESSAGES, expected, {"role": "tool", "content": "22"}]


def test_a_label_that_is_nan_is_none_for_reward_functions() -> None:
    """It is how pandas writes a missing value."""
    assert FREE.labels({"prompt": "a", "ground_truth": float("nan")}) == ((), ())


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
