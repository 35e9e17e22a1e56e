"""Which messages say the same, however clients write them."""

from __future__ import annotations

from typing import Any

import pytest

from mgrpo.environments.normal_form import essence, tool_of


def said(content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def asked(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(arguments: Any, name: Any = "add", **fields: Any) -> dict[str, Any]:
    return said(
        None, tool_calls=[{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}, **fields}]
    )


EQUAL = {
    "developer is what system was": ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    "parts": (asked([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]), asked("hi")),
    "parts of Responses": (said([{"type": "output_text", "text": "hi", "annotations": []}]), said("hi")),
    "null": (said(None), said("")),
    "a missing content": ({"role": "assistant"}, said("")),
    "no parts": (said([]), said("")),
    "space around a turn": (said(" hi\n"), said("hi")),
    "thinking beside the text": (said("hi", reasoning_content="hm", reasoning="hm"), said("hi")),
    "thinking in the text": (said("<think>\nhm\n</think>\n\nhi"), said("hi")),
    "thinking that the prompt has begun": (said("hm\n</think>\n\nhi"), said("hi")),
    "fields without a meaning": (
        said("hi", name=None, refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None),
        said("hi"),
    ),
    "a cache's marks": (asked([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]), asked("hi")),
    "no calls": (said("hi", tool_calls=[]), said("hi")),
    "arguments as an object": (calling({"a": 1}), calling('{"a": 1}')),
    "spaces in arguments": (calling('{ "a":1 }\n'), calling('{"a": 1}')),
    "the order of keys": (calling('{"b": {"d": 1, "c": 2}, "a": 1}'), calling('{"a": 1, "b": {"c": 2, "d": 1}}')),
    "letters as escapes": (calling('{"a": "\\u00e9"}'), calling('{"a": "é"}')),
    "whole numbers of JavaScript": (calling('{"a": 1.0, "b": 1e3}'), calling('{"a": 1, "b": 1000}')),
    "an object written as JSON twice": (calling('"{\\"a\\": 1}"'), calling('{"a": 1}')),
    "no arguments": (calling(""), calling("{}")),
    "missing arguments": (calling(None), calling({})),
    "ids and places of calls": (calling("{}", id="7", index=0), calling("{}")),
    "a bare call": (said("", tool_calls=[{"name": "add", "arguments": {}}]), calling("{}")),
    "half a character": (asked("a\ud83d"), asked("a?")),
    "half a character in arguments": (calling('{"a\\ud83d": "\\ude00"}'), calling('{"a?": "?"}')),
}


@pytest.mark.parametrize("case", EQUAL)
def test_messages_that_say_the_same_are_equal(case: str) -> None:
    """Otherwise a client that only writes JSON in its own manner would begin a new conversation at each turn."""
    one, other = EQUAL[case]
    assert essence(one) == essence(other)


OTHER = {
    "another role": (asked("x"), {"role": "system", "content": "x"}),
    "space in a question": (asked("hi "), asked("hi")),
    "space in a turn": (said("a  b"), said("a b")),
    "another letter": (said("a"), said("A")),
    "a call less": (calling("{}"), said("")),
    "a call more": (said("", tool_calls=calling("{}")["tool_calls"] * 2), calling("{}")),
    "another tool": (calling("{}", name="sub"), calling("{}")),
    "another argument": (calling('{"a": 2}'), calling('{"a": 1}')),
    "a number in quotes": (calling('{"a": "1"}'), calling('{"a": 1}')),
    "true is not one": (calling('{"a": true}'), calling('{"a": 1}')),
    "null is not missing": (calling('{"a": null}'), calling("{}")),
    "the order of a list": (calling('{"a": [1, 2]}'), calling('{"a": [2, 1]}')),
    "no JSON": (calling('{"a": 1'), calling('{"a": 1}')),
}


@pytest.mark.parametrize("case", OTHER)
def test_messages_that_say_something_else_are_not_equal(case: str) -> None:
    """They would be answered with the tokens of another conversation."""
    from mgrpo.environments.endpoint.messages import key_after

    one, other = OTHER[case]
    assert essence(one) != essence(other) or case == "true is not one"
    assert key_after(b"", one) != key_after(b"", other)


REFUSED = {
    "no message": ("x", "is not a message"),
    "no role": ({"content": "x"}, "is not a message"),
    "an image": (asked([{"type": "image_url", "image_url": {"url": "x"}}]), "'image_url' of a message is not text"),
    "an image with a text": (asked([{"type": "image", "text": "x"}]), "'image' of a message is not text"),
    "a number": (asked(1), "'int' of a message is not text"),
    "a number among parts": (asked([1]), "'int' of a message is not text"),
    "a sound": (said("", audio={"id": "x"}), "has audio"),
    "a call of old": (said("", function_call={"name": "x", "arguments": ""}), "has function_call"),
    "calls without a list": (said("", tool_calls={"name": "x"}), "must be a list"),
    "a call without a name": (said("", tool_calls=[{"function": {"arguments": "{}"}}]), "has no name"),
    "a call that is none": (said("", tool_calls=["x"]), "has no name"),
    "a name that is none": (calling("{}", name=["x"]), "has no name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_cannot_read_is_refused(case: str) -> None:
    """A picture that was left out would be answered as if there had been none."""
    message, why = REFUSED[case]
    with pytest.raises(ValueError, match=why):
        essence(message)


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    """Python raises RecursionError on such JSON, which would end more than the request."""
    text = "[" * 100_000
    assert essence(calling(text))["calls"] == [("add", text)]
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    assert essence(calling(deep))["calls"][0][0] == "add"


def test_a_tool_is_read_from_its_schema_or_its_function() -> None:
    function = {"name": "a\ud83d", "description": None, "strict": True}
    assert tool_of({"type": "function", "function": function}) == tool_of(function)
    assert tool_of(function).schema["function"] == {
        "name": "a?",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert tool_of({**function, "parameters": {"x\ud83d": [1, None]}}).parameters == {"x?": [1, None]}
    for bad in ({}, 1, {"function": 1}, {"name": 1}, {"name": "x", "parameters": "y"}):
        with pytest.raises(ValueError, match=r"has no name|expected a JSON schema"):
            tool_of(bad)
