"""Programs that tests have drive a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from mgrpo.environments.offered.program import Model, NoRoom, Refused

Row = Mapping[str, Any]


def say(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


async def echo(row: Row, model: Model, *, turns: int = 2, reward: float | None = 0.5) -> float | None:
    """Tells the model what it has said."""
    messages = [say(row["question"])]
    for _ in range(turns):
        answer = await model.chat(messages)
        messages += [answer, say(answer.content * 2)]
    model.metrics["turns"] = turns
    return reward


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: first
        b: second
    """
    return a + b


async def calling(row: Row, model: Model) -> float:
    """Answers calls until there are none."""
    messages: list[Mapping[str, Any]] = [say(row["question"])]
    while (answer := await model.chat(messages, [add])).tool_calls:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": str(add(**call["function"]["arguments"]))}
            for call in answer.tool_calls
        ]
        messages = [*messages, answer, *results]
    return float(answer.content)


async def as_asked(row: Row, model: Model) -> None:
    await model.sample(model.ids)


async def by_ids(row: Row, model: Model) -> float:
    first = await model.sample([*model.ids, 50], max_tokens=3)
    whole = list(model.ids)
    second = await model.sample([*whole, 60, 61])
    assert model.ids == [*whole, 60, 61, *second] and whole[-len(first) :] == first
    assert len(model.ids) == len(model.is_sampled) == len(model.logprobs)
    assert sum(model.is_sampled) == len(first) + len(second) and min(model.logprobs) < 0
    return float(len(model.ids))


async def other_ids(row: Row, model: Model) -> float:
    await model.sample([5, 6])
    try:
        await model.sample([5, 7, *model.ids[2:], 8])
    except Refused as err:
        assert "ids do not begin with" in str(err), err
    return 1.0


async def out_of_order(row: Row, model: Model) -> None:
    """Answers the second of two calls first."""
    messages: list[Mapping[str, Any]] = [say("a")]
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    answer = await model.chat(messages, tools)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]} for call in answer.tool_calls
    ]
    await model.chat([*messages, answer, *results[::-1]], tools)


async def impatient(row: Row, model: Model) -> float:
    """Does not wait for its first turn, which is part of the trajectory nevertheless."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(model.chat([say("a")]), 0.02)
    with contextlib.suppress(Refused):
        await model.chat([say("a"), say("b")])
    assert model.last is not None
    await model.chat([say("a"), model.last, say("c")])
    return 1.0


async def tells(row: Row, model: Model) -> None:
    await model.chat([say("a")])
    model.shown.update(score=3, board=object())


async def asks_oddly(row: Row, model: Model) -> float:
    """Is told what is wrong with each chat, before its only turn."""
    odd: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "at least one"),
        (["hi"], {}, "must be a list of objects with a role"),
        ([say("a") | {"extra": object()}], {}, "must be what JSON holds"),
        ([say("a")], {"max_tokens": 0}, "max_tokens=0 must be a whole number"),
        ([say("a")], {"max_tokens": 2.5}, "max_tokens=2.5 must be a whole number"),
        ([say("a")], {"tools": [{"type": "function"}]}, "has no name"),
        ([say("a", "nobody")], {}, "the template has no role nobody"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "is not text"),
    ]
    for messages, limits, why in odd:
        try:
            await model.chat(messages, **limits)
        except Refused as err:
            assert why in str(err), err
        else:
            raise AssertionError(messages)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await model.chat([{"role": "user", "content": parts}], max_tokens=2)
    return 1.0


async def forgets(row: Row, model: Model) -> float:
    """Leaves its first message out, is refused, and goes on as it should."""
    messages = [say("a"), await model.chat([say("a")]), say("b")]
    try:
        await model.chat([say("z"), *messages[1:]])
    except Refused as err:
        assert "message 0" in str(err) and '"z"' in str(err), err
    await model.chat(messages)
    return 1.0


async def insists(row: Row, model: Model) -> float:
    await model.chat([say("a")])
    while True:
        with contextlib.suppress(Refused):
            await model.chat([say("b")])


async def endless(row: Row, model: Model, *, catches: bool = False) -> float | None:
    messages = [say("a")]
    try:
        while True:
            messages += [await model.chat(messages), say("more")]
    except NoRoom:
        if not catches:
            raise
    return 0.25


async def two_at_once(row: Row, model: Model) -> float:
    answers = await asyncio.gather(*(model.chat([say("a")]) for _ in range(2)), return_exceptions=True)
    return float(sum(isinstance(answer, Refused) for answer in answers))


async def differs(row: Row, model: Model) -> None:
    await model.chat([say(model.trajectory)])


async def raises(row: Row, model: Model, *, turns: int = 0) -> None:
    for _ in range(turns):
        await model.chat([say("a")])
    json.loads("no such thing")


async def hangs(row: Row, model: Model, *, how: str) -> None:
    await model.chat([say("a")])
    if how == "async":
        await asyncio.sleep(60)
    if how == "thread":
        await asyncio.to_thread(time.sleep, 60)
    while how == "stubborn":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
    if how == "blocks":
        time.sleep(60)
    os._exit(3)


async def returns(row: Row, model: Model, *, what: Any, asks: bool = True) -> Any:
    if asks:
        await model.chat([say("a")])
    return what


async def waits(row: Row, model: Model, *, seconds: float, turns: int) -> None:
    messages = [say("a")]
    for _ in range(turns):
        messages += [await model.chat(messages), say("b")]
        await asyncio.sleep(seconds)


async def some_fail(row: Row, model: Model) -> float:
    """The second sample of a prompt fails before its first turn."""
    if model.trajectory.endswith("/1"):
        raise RuntimeError("not this one")
    await model.chat([say("a")])
    return 1.0


def plain(row: Row, model: Model) -> float:
    return 1.0


async def needs_more(row: Row, model: Model, *, what: str) -> float:
    return 1.0
