"""Turns as a session gives them to a dialect, without a session and its tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace

from hypothesis import strategies as st

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
ARGUMENTS = st.dictionaries(TEXT, st.one_of(st.integers(-9, 9), TEXT, st.lists(st.booleans(), max_size=2)), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(("add", "look_up")), ARGUMENTS), max_size=3)


def turned(content="", *, thought="", calls=(), number=3, finish_reason="stop", stop=None) -> SimpleNamespace:
    """A turn that said this, with `calls` as pairs of a name and its arguments."""
    message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for place, (name, given) in enumerate(calls)
        ]
    node = SimpleNamespace(number=number, finish_reason=finish_reason)
    return SimpleNamespace(node=node, message=message, usage=(40, 7), logprobs=[], stop=stop)


def read(stream) -> list[tuple[str, dict]]:
    """The name and the data of each event of a stream."""
    found = []
    for event in b"".join(stream).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
