"""What a model may write is anything: reading it never raises, evaluates nothing, and takes time in proportion to it."""

from __future__ import annotations

import ast
import json
import random
import time

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.formats import families, named
from mgrpo.environments.formats.format import Format
from tests.unit.environments.format_cases import GOOD, TOOLS, WRITERS, add

MARKS = (
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<function="),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *(
        "<|python_tag|>",
        "<|python_start|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<function_calls>",
        "</function_calls>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json",
        "<|tool_call_start|>",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "commentary to=functions.add", "final"),
    *(
        '<call_tool name="add">',
        "<call_tool ",
        "</call_tool>",
        "<code>",
        "</code>",
        "add(",
        "a=",
        "[add(",
        '{"name": "add"',
    ),
    *(
        '"arguments": ',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "'''",
        "\\",
        ",",
        ":",
        ";",
        "=",
        " ",
        "\n",
        "\x00",
        "\ud800",
    ),
    *("a", "é", "1", "-", "1e999", "NaN", "null", "True", "<|im_end|>", "</s>"),
)
REPEATED = (
    *("<tool_call><function=add><parameter=a>", "<tool_call>add<arg_key>a</arg_key><arg_value>", "</tool_call><think>"),
    *(
        "<think></think>",
        '{"a":[',
        '{ "',
        '{"name": "add", "arguments": {"a": 1}, ',
        "</think>[add(a=[",
        "</think>[f(a=1",
    ),
    *(
        "[TOOL_CALLS]a[ARGS]{",
        "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{",
        "<|tool_call_start|>[add(a='''",
        "<|start|><|message|>[THINK]",
    ),
    *("<|channel|>commentary to=functions.add<|message|>{", '<call_tool name="', "<call_tool x"),
)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_text_raises(family):
    """A rollout of thousands of turns must not end because of one."""
    rng = random.Random(family)
    reader = named(family, TOOLS)
    for _ in range(3000):
        parsed = reader.parse("".join(rng.choices(MARKS, k=rng.randrange(12))), is_thinking=rng.random() < 0.2)
        assert all(isinstance(call, Call) and isinstance(call.name, str) for call in parsed.calls)
        assert all(
            isinstance(call.arguments, dict) and all(map(isinstance, call.arguments, [str] * 9))
            for call in parsed.calls
        )


@pytest.mark.parametrize("family", WRITERS)
def test_no_slip_in_a_call_raises(family):
    """One character missing, doubled or changed anywhere."""
    rng = random.Random(family)
    text = WRITERS[family](*GOOD[2], *GOOD[3])
    for at in range(len(text)):
        for slip in ("", text[at] * 2, rng.choice(MARKS)):
            named(family, TOOLS).parse(text[:at] + slip + text[at + 1 :])


@pytest.mark.parametrize("family", families.FAMILIES)
def test_time_grows_with_the_length(family):
    """A model that repeats itself to the limit of its response must not hold up all other trajectories."""
    reader = named(family, TOOLS)
    slow = {}
    for mark in (*MARKS, *REPEATED):
        for text in (mark * (20_000 // len(mark)), mark + "a" * 20_000 + "></call_tool>", mark + " " * 20_000 + "."):
            began = time.process_time()
            reader.parse(text)
            slow[f"{text[:60]!r}..."] = time.process_time() - began
    assert {text: seconds for text, seconds in slow.items() if seconds > 0.25} == {}


def test_nothing_is_evaluated(tmp_path):
    """An argument that is code stays unread."""
    path = tmp_path / "made"
    for value in (
        f"open({str(path)!r}, 'w')",
        f"[open({str(path)!r}, 'w') for _ in [1]]",
        f"f'{{open({str(path)!r}, 1)}}'",
    ):
        parsed = named("pythonic", TOOLS).parse(f"[add(a={value})]")
        assert (parsed.calls, len(parsed.unreadable)) == ((), 1)
    assert not path.exists()


@pytest.mark.parametrize("family", WRITERS)
def test_no_call_has_a_number_that_cannot_be_written(family):
    """It is sent on as JSON, in which Python writes integers of 4300 digits and no more."""
    for most, more in (("9" * 4300, "9" * 4301), (hex(10**4300 - 1), hex(10**4300)), (oct(-(2**14284)), bin(2**14285))):
        for number in (most, more):
            text = WRITERS[family](add(a=7)).replace("7", number)
            for written in (text, text.replace(number, f"{{{number}: 1}}"), text.replace(number, f"[[{number}]]")):
                parsed = named(family, TOOLS).parse(written)
                assert json.loads(json.dumps([call.arguments for call in parsed.calls])) is not None
                assert len(parsed.calls) + len(parsed.unreadable) == 1
        if family in ("pythonic", "olmo3", "lfm2"):
            calls = [named(family, TOOLS).parse(WRITERS[family](add(a=7)).replace("7", n)).calls for n in (most, more)]
            assert calls == [(add(a=ast.literal_eval(most)),), ()]


@pytest.mark.parametrize("error", [ValueError("no"), RecursionError()])
def test_a_reader_that_raises_costs_its_turn_only(error):
    """The promise is that of the format, whatever its reader meets."""

    def read(text, at):
        raise error

    for calls_in_thoughts in (True, False):
        reader = Format(name="own", read=read, example="add(a=1)", calls_in_thoughts=calls_in_thoughts)
        parsed = reader.parse("the answer is 5")
        assert (parsed.content, parsed.calls, len(parsed.unreadable)) == ("", (), 1)
        assert parsed.unreadable[0].endswith("Write it as add(a=1)")


def test_what_the_model_is_told_stays_short():
    """The turn itself is in the context already."""
    for text in ("<tool_call>" + "x" * 10_000, '<tool_call>{"' + "x" * 10_000 + '": 1}</tool_call>'):
        assert len(named("hermes", TOOLS).parse(text).unreadable[0]) < 300
    for family, text in (
        ("pythonic", f"[add(a=1), {'x' * 10_000}(1)]"),
        ("qwen3_xml", f"<function=add><parameter={'x' * 10_000}>"),
    ):
        assert len(named(family, TOOLS).parse(text).unreadable[0]) < 400


def test_calls_of_a_long_turn_are_all_read():
    """How many of them run is for others to decide."""
    assert named("hermes", TOOLS).parse(WRITERS["hermes"](add(a=1)) * 500).calls == (add(a=1),) * 500
