"""Tests as data sets write them. What cannot be read is an error, never a program that passes or fails nothing."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

from mgrpo.sandbox.cases import StdioTest, assert_tests, stdio_tests

ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]


def compressed(value: object, protocol: int = pickle.DEFAULT_PROTOCOL) -> str:
    """Open Instruct's form: a pickle, deflated, in base64."""
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


@pytest.mark.parametrize(
    "label",
    [ASSERTS, json.dumps(ASSERTS), [ASSERTS], [json.dumps(ASSERTS)], compressed(ASSERTS)],
    ids=["list", "JSON", "wrapped list", "wrapped JSON", "compressed"],
)
def test_assert_tests_are_read_in_every_form(label):
    """The same rows come as lists from one data set and as text from the next."""
    assert assert_tests(label) == ASSERTS


def test_a_lone_assert_in_a_list_is_one_test():
    """A list of one test looks like a wrapped label, but is not one."""
    assert assert_tests(["assert f() == [1]"]) == ["assert f() == [1]"]


def test_stdio_tests_take_lines_or_text():
    """LiveCodeBench rows hold their input as a list of lines."""
    label = [{"input": ["1", "2"], "output": "3", "comment": 4}, {"input": "", "output": ""}]
    assert stdio_tests(label) == [StdioTest("1\n2", "3"), StdioTest("", "")]


@pytest.mark.parametrize("empty", [[], "", "[]", None, compressed([])])
def test_no_tests_are_no_tests(empty):
    """The service answers them with empty lists, as Open Instruct's."""
    assert assert_tests(empty) == stdio_tests(empty) == []


@pytest.mark.parametrize(
    ("read", "label"),
    [
        (assert_tests, "assert f(1) == 2"),
        (assert_tests, [1]),
        (assert_tests, {"input": "1"}),
        (assert_tests, 7),
        (assert_tests, "{}"),
        (assert_tests, [{"input": "1", "output": "2"}]),
        (stdio_tests, ["assert f(1) == 2"]),
        (stdio_tests, [{"input": "1"}]),
        (stdio_tests, [{"input": 1, "output": "2"}]),
        (stdio_tests, [{"input": "1", "output": 2}]),
    ],
)
def test_anything_else_is_an_error(read, label):
    """Scored 0, an unreadable label would teach the policy that right programs are wrong."""
    with pytest.raises(ValueError, match=r"expected|neither"):
        read(label)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_the_compressed_form_is_read(protocol):
    """Data sets were written by several versions of Python; texts of all sizes and repeated ones take other opcodes."""
    tests = [{"input": "x" * size, "output": "same"} for size in (0, 1, 255, 256, 70_000)] * 2
    assert stdio_tests(compressed(tests, protocol)) == [StdioTest(**test) for test in tests]


class _Malicious:
    def __reduce__(self) -> tuple:
        return (exec, ("import pathlib; pathlib.Path('read').touch()",))


@pytest.mark.parametrize(
    "text",
    [
        compressed([_Malicious()]),
        compressed({1, 2}),
        base64.b64encode(zlib.compress(b"cos\nsystem\n(S'touch read'\ntR.")).decode(),
        base64.b64encode(zlib.compress(b"e.")).decode(),
        base64.b64encode(zlib.compress(b"]q\x00h\x05.")).decode(),
        base64.b64encode(zlib.compress(b"]")).decode(),
        base64.b64encode(b"not deflated").decode(),
        base64.b64encode(zlib.compress(pickle.dumps(["x" * 1000]))[:-20]).decode(),
    ],
)
def test_a_compressed_form_that_is_more_than_plain_data_runs_nothing(text, tmp_path, monkeypatch):
    """A label from a hub that is unpickled runs whatever its author likes, in the trainer."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="neither JSON nor"):
        assert_tests(text)
    assert list(tmp_path.iterdir()) == []


def test_a_bomb_of_zeros_is_refused(monkeypatch):
    """A kilobyte that unpacks to gigabytes would take the machine down."""
    monkeypatch.setattr("mgrpo.sandbox.cases.MAX_BYTES", 2**20)
    with pytest.raises(ValueError, match="too large"):
        assert_tests(compressed(["x" * 2**24]))
