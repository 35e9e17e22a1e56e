"""Which chats go on from a trajectory, however libraries write their messages."""

from __future__ import annotations

from typing import Any

import pytest

from mgrpo.environments.loop.conversation import Path, Strays
from mgrpo.environments.normal_form import text_of

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
PATH = Path(messages=ASKED, tools=[])
MORE = {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    "chat",
    [
        ASKED,
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, ASKED[1]],
        [{**ASKED[0], "name": None}, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "other"}]}],
        [ASKED[0], {**ASKED[1], "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}]}],
        [ASKED[0], {**ASKED[1], "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}],
    ],
)
def test_equal_messages_go_on(chat: list[Any]) -> None:
    assert PATH.added([*chat, MORE], []) == [MORE]


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (ASKED, "it adds no message"),
        (ASKED[:1], "it leaves out the last 1 of 2 messages"),
        ([{"role": "user", "content": "hi "}, ASKED[1], MORE], 'its message 0 is .*"hi ".*, and was .*"hi"'),
        ([{"role": "system", "content": "hi"}, ASKED[1], MORE], "its message 0"),
        ([ASKED[0], {"role": "assistant", "content": ""}, MORE], "its message 1"),
        ([ASKED[0], {**ASKED[1], "tool_calls": [CALL, CALL]}, MORE], "its message 1"),
        ([ASKED[0], {**ASKED[1], "tool_calls": [{"name": "add", "arguments": "{"}]}, MORE], "its message 1"),
        ([{"role": "user", "content": [{"type": "image"}]}, ASKED[1], MORE], "is not text"),
    ],
)
def test_other_messages_stray(chat: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PATH.added(chat, [])


def test_other_tools_stray() -> None:
    """They are in the prompt, which was read before all turns."""
    with pytest.raises(Strays, match="its tools are others"):
        PATH.added([*ASKED, MORE], [{"name": "add"}])


def test_a_text_may_come_in_parts() -> None:
    assert text_of({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}) == "ab"
