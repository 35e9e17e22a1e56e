"""Lines of files as they come: every separator, every encoding, every length."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable

import pytest

from mgrpo.data.checking import Row, Summary, rows_of_lines, rows_of_records
from mgrpo.data.rows import Contract

CONTRACT = Contract()
GOOD = {"prompt": "1+1=", "ground_truth": 2, "dataset": "integer"}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}, ensure_ascii=False).encode()


def found(data: bytes) -> tuple[list[tuple[int, object]], list[tuple[int, str]]]:
    """Line and prompt of the good rows, line and error of the bad."""
    rows, summary = check(rows_of_lines(io.BytesIO(data)))
    bad = [(line, mistake.problem) for mistake in summary.mistakes.values() for line in mistake.lines]
    return [(row.line, json.loads(row.text)["prompt"]) for row in rows], bad


def check(rows: Iterable[Row]) -> tuple[list[Row], Summary]:
    summary = Summary()
    return list(summary.good(rows, CONTRACT)), summary


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\r"])
def test_other_line_separators_are_text(separator: str) -> None:
    r"""Python's splitlines breaks at eight characters that JSON text may hold; each would cut a row in two.

    Control characters are escaped in JSON, as they must be; the others are there as they are.
    """
    rows, problems = found(line(prompt=f"a{separator}b") + b"\n" + line() + b"\n")
    assert rows == [(1, f"a{separator}b"), (2, "1+1=")] and not problems


def test_windows_files_blank_lines_and_byte_order_marks_are_read() -> None:
    """Files from other systems, and files that were pasted together, are not malformed."""
    data = (
        b"\xef\xbb\xbf"
        + line(prompt="a")
        + b"\r\n\r\n  \t\n\xef\xbb\xbf"
        + line(prompt="b")
        + b"\n\n"
        + line(prompt="c")
    )
    rows, problems = found(data)
    assert rows == [(1, "a"), (4, "b"), (6, "c")] and not problems


def test_a_file_without_rows_has_none() -> None:
    """The first line of an empty file is not a bad row."""
    for data in (b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"):
        assert found(data) == ([], [])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"oops", "found 'oops' (Expecting value: line 1 column 1 (char 0)), expected one JSON object on the line"),
        (b'{"prompt": "1+1=", ', "expected one JSON object"),
        (line() + b" " + line(), "Extra data"),
        (line() + b"\r" + line(), "Extra data"),
        (b'{"prompt": "a\x00b"}', "Invalid control character"),
        (b"\x00\x00\x00", "expected one JSON object"),
        (b'{"prompt": "\xff\xfe"}', "can't decode byte 0xff"),
        (line().decode().encode("utf-16"), "expected one JSON object"),
        (b"[" * 200_000, "expected one JSON object"),
        (b'{"prompt": ' + b"9" * 10_000 + b"}", "expected one JSON object"),
        (b'{"prompt": "half \\ud800"}', "half of a character"),
        (b"null", "found None, expected an object"),
    ],
)
def test_bad_lines_are_problems_of_their_line(bad: bytes, words: str) -> None:
    """Whatever a line holds, the row before and the row after are read, and the number is right."""
    rows, problems = found(line(prompt="a") + b"\n" + bad + b"\n" + line(prompt="b"))
    assert [prompt for _, prompt in rows] == ["a", "b"]
    assert len(problems) in (1, 2) and problems[0][0] == 2  # UTF-16 text may hold a byte \n
    assert words in problems[0][1] and len(problems[0][1]) < 400


def test_nul_characters_and_long_lines_are_text_like_any_other() -> None:
    """A NUL may end a string in C, 10 MB overflow a buffer."""
    long = "x" * 10_000_000
    rows, problems = found(line(prompt="a\x00b") + b"\n" + line(prompt=long) + b"\n" + line(prompt="c"))
    assert rows == [(1, "a\x00b"), (2, long), (3, "c")] and not problems


def test_a_summary_knows_first_uses_and_counts_all_problems() -> None:
    """What a later start is told without reading the rows again."""
    lines = [line(dataset=["math", "gsm8k"], ground_truth=[1, 2], prompt=[{"role": "user", "content": "a"}])]
    lines += [b"oops"] * 30 + [line(level=1), line(dataset="gsm8k")]
    _, summary = check(rows_of_lines(io.BytesIO(b"\n" * 10 + b"\n".join(lines))))
    assert summary.num_rows == 3
    assert summary.verifiers == {"math": 11, "gsm8k": 11, "integer": 42}
    assert (summary.first_conversation, summary.first_text) == (11, 42)
    assert summary.columns == {"prompt": 11, "ground_truth": 11, "dataset": 11, "level": 42}
    assert summary.num_problems == 30
    (mistake,) = summary.mistakes.values()
    assert str(mistake).endswith("expected one JSON object on the line (29 more such rows: 13, 14, 15, ...)")
    assert (mistake.lines[0], mistake.num_rows) == (12, 30)
    assert Summary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_records_are_checked_as_they_will_be_read_again() -> None:
    """What was checked and what is trained on must be the same value."""
    records = [{**GOOD, "prompt": ({"role": "user", "content": "a"},)}, {**GOOD, "dataset": {"a"}}, {**GOOD, "x": b""}]
    rows, summary = check(rows_of_records(records, CONTRACT, lost_columns=["picture"]))
    assert [row.line for row in rows] == [1, 3] and summary.lost_columns == ["picture", "x"]
    assert json.loads(rows[0].text)["prompt"] == [{"role": "user", "content": "a"}]
    (mistake,) = summary.mistakes.values()
    assert mistake.lines == [2] and "found dataset {'a'}" in mistake.problem
