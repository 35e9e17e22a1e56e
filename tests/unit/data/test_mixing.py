"""Which rows a mix takes, and how it says that a row is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mgrpo.data.mixing import parse_rows, read_rows


def _write(path: Path, num_rows: int, verifier: str = "integer") -> str:
    rows = [{"prompt": f"{index}+0=", "ground_truth": index, "dataset": verifier} for index in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _truths(mixer_list: list[str], splits: tuple[str, ...] = ("train",)) -> list[object]:
    return [row.ground_truths[0] for row in read_rows(mixer_list, splits)]


def _random(num_rows: int, size: int) -> list[int]:
    return np.random.RandomState(42).choice(num_rows, size=size, replace=False).tolist()


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("1.0", list(range(20))),
        ("20", list(range(20))),
        ("0.5", _random(20, 10)),
        ("10", _random(20, 10)),
        ("1", _random(20, 1)),
        ("2.0", list(range(20)) * 2),
        ("1.25", list(range(20)) + _random(20, 5)),
        ("45", list(range(20)) * 2 + _random(20, 5)),
        ("0.35", _random(20, 7)),
    ],
)
def test_amounts_with_a_point_are_shares_and_others_counts(tmp_path: Path, amount: str, expected: list[int]) -> None:
    """A mix written for Open Instruct must train on the same rows here."""
    assert _truths([_write(tmp_path / "a.jsonl", 20), amount]) == expected


def test_sources_follow_each_other(tmp_path: Path) -> None:
    """The row's index is its identity across restarts: it must depend on the mix alone."""
    first, second = _write(tmp_path / "a.jsonl", 3), _write(tmp_path / "b.jsonl", 2, "math")
    rows = read_rows([first, "1.0", second, "1.0"], ["train", "test"])
    assert [(row.verifiers[0], row.ground_truths[0]) for row in rows] == [
        ("integer", 0),
        ("integer", 1),
        ("integer", 2),
        ("math", 0),
        ("math", 1),
    ]
    assert rows[4].origin == f"{second}:2"


@pytest.mark.parametrize(
    ("amount", "num_rows", "warns"),
    [("1", 101, True), ("10", 101, True), ("11", 101, False), ("1", 100, False), ("1.0", 101, False)],
)
def test_a_few_rows_of_many_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, amount: str, num_rows: int, warns: bool
) -> None:
    """ "1" instead of "1.0" trains on a single row."""
    read_rows([_write(tmp_path / "a.jsonl", num_rows), amount], ["train"])
    assert ("a share needs a point" in caplog.text) == warns


@pytest.mark.parametrize(
    ("mixer_list", "splits", "message"),
    [
        (["a.jsonl"], ["train"], "expected pairs"),
        (["a.jsonl", "1.0", "b.jsonl", "1.0", "c.jsonl", "1.0"], ["train", "test"], "2 splits for 3 data sets"),
        (["a.jsonl", "all"], ["train"], "neither a share"),
        (["a.jsonl", "-0.5"], ["train"], "neither a share"),
        (["a.jsonl", "nan."], ["train"], "neither a share"),
        (["nowhere.jsonl", "1.0"], ["train"], "nowhere.jsonl does not exist"),
    ],
)
def test_a_mix_that_cannot_be_read_says_why(mixer_list: list[str], splits: list[str], message: str) -> None:
    """Found before anything heavy starts."""
    with pytest.raises(ValueError, match=message):
        read_rows(mixer_list, splits)


def test_a_mix_of_no_rows_is_an_error(tmp_path: Path) -> None:
    """An empty data set would be found by the sampler, minutes later."""
    with pytest.raises(ValueError, match="selects no rows"):
        read_rows([_write(tmp_path / "a.jsonl", 5), "0.1"], ["train"])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows"):
        read_rows([str(tmp_path / "empty.jsonl"), "1.0"], ["train"])


GOOD = {"prompt": "1+1=", "ground_truth": 2, "dataset": "integer"}
MESSAGES = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1=", ', 'found \'{"prompt": "1\\+1=",\', expected one JSON object'),
        ("[1, 2]", "expected an object"),
        (json.dumps({"question": "1+1="}), "found prompt None among 'question', expected messages"),
        (json.dumps({**GOOD, "prompt": ""}), "found prompt '' among"),
        (json.dumps({**GOOD, "messages": []}), "at least one message"),
        (json.dumps({**GOOD, "messages": [{"role": "user"}]}), "found message .*expected .*content"),
        (json.dumps({**GOOD, "messages": "1+1"}), "found messages '1\\+1'"),
        (json.dumps({**GOOD, "dataset": 7}), "found dataset 7, expected the name of a verifier"),
        (json.dumps({**GOOD, "dataset": []}), "found dataset \\[\\]"),
        (json.dumps({**GOOD, "dataset": ["math", "integer"]}), "found ground_truth 2 for 2 verifiers"),
        (json.dumps({**GOOD, "dataset": ["math", "integer"], "ground_truth": [2]}), "for 2 verifiers"),
        (json.dumps({"prompt": "1+1=", "dataset": "integer"}), "found no ground_truth"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    """Nobody finds one bad line among a million otherwise."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n" + json.dumps(GOOD) + "\n")
    with pytest.raises(ValueError, match=message) as raised:
        read_rows([str(path), "1.0"], ["train"])
    assert f"{path}:3: " in str(raised.value)


def test_bad_rows_are_reported_together(tmp_path: Path) -> None:
    """One error a start is one start too many."""
    path = tmp_path / "rows.jsonl"
    path.write_text("oops\n" * 13)
    with pytest.raises(ValueError) as raised:
        read_rows([str(path), "1.0"], ["train"])
    text = str(raised.value)
    assert (
        "13 malformed rows" in text and f"{path}:10: " in text and f"{path}:11: " not in text and "and 3 more" in text
    )


def test_rows_keep_all_forms_of_the_contract() -> None:
    """Prompt and label travel in one record, so that they cannot part."""
    rows = parse_rows(
        [
            GOOD,
            {"messages": MESSAGES, "ground_truth": "2", "dataset": ["math"]},
            {"prompt": MESSAGES, "ground_truth": ["2", 2], "dataset": ["math", "integer"]},
            {**GOOD, "ground_truth": ["a", "b"]},
            {**GOOD, "messages": MESSAGES, "ground_truth": {"x": [1]}},
        ],
        source="memory",
    )
    assert [row.prompt for row in rows] == ["1+1=", None, None, "1+1=", None]
    assert [row.messages for row in rows] == [None, tuple(MESSAGES), tuple(MESSAGES), None, tuple(MESSAGES)]
    assert [row.verifiers for row in rows] == [("integer",), ("math",), ("math", "integer"), ("integer",), ("integer",)]
    assert [row.ground_truths for row in rows] == [(2,), ("2",), ("2", 2), (["a", "b"],), ({"x": [1]},)]


def test_rows_without_a_verifier_are_for_reward_functions_only() -> None:
    """With reward functions labels are theirs, and `dataset` may be any column; without, such a row could never score."""
    bare, labelled = {"prompt": "a"}, {"prompt": "a", "ground_truth": 3}
    foreign = {"prompt": "a", "ground_truth": ["x", "y"], "dataset": {"split": 1}}
    rows = parse_rows([bare, labelled, foreign], source="memory", need_verifiers=False)
    assert [(row.verifiers, row.ground_truths) for row in rows] == [((), ()), ((), (3,)), ((), (["x", "y"],))]
    with pytest.raises(ValueError, match="2 malformed rows in memory"):
        parse_rows([bare, labelled], source="memory")


def test_parquet_and_saved_folders_give_the_rows_of_jsonl(tmp_path: Path) -> None:
    """The same data must train the same, whatever it is stored in."""
    datasets = pytest.importorskip("datasets")
    records = [
        {"messages": [{"role": "user", "content": f"{index}?"}], "ground_truth": str(index), "dataset": "math", "x": 1}
        for index in range(4)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = datasets.Dataset.from_list(records)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")

    def contents(name: str, split: str = "train") -> list[tuple]:
        rows = read_rows([str(tmp_path / name), "1.0"], [split])
        return [(row.messages, row.verifiers, row.ground_truths) for row in rows]

    expected = contents("a.jsonl", "anything")
    assert expected[1] == (({"role": "user", "content": "1?"},), ("math",), ("1",))
    assert contents("a.parquet", "anything") == contents("saved") == contents("splits") == expected
    with pytest.raises(ValueError, match="has no split 'test'; it has train"):
        contents("splits", "test")
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"broken\.parquet cannot be read as parquet"):
        contents("broken.parquet")
