"""The real client of OpenAI against the endpoint in a process of its own: ids, branches and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import openai
import pytest

from tests.unit.environments.endpoint.served import ADD, ASKED, Served

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("tokenizer"))
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _at_once(served: Served) -> Iterator[None]:
    yield
    served.delay_s, served.error = 0.0, None


def client_of(session: Mapping[str, Any], **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{session['base_url']}/v1", api_key=session["api_key"], **{"max_retries": 0, **options}
    )


def plain(message: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in message.model_dump(exclude_none=True).items()
        if name in ("role", "content", "tool_calls")
    }


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    text, calls = "", {}
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                calls[call.index] = call.model_dump(exclude={"index"})
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls.values())} if calls else {})}


async def count(
    client: openai.AsyncOpenAI,
    messages: list[dict],
    *,
    stream: bool = False,
    rewritten: Callable[[dict], dict] = lambda message: message,
) -> list[dict]:
    """An agent's loop: the conversation once the model calls no tool any more."""
    while True:
        asked = {"model": "policy", "messages": messages, "tools": [ADD]}
        if stream:
            said = await streamed(client, **asked)
        else:
            said = plain((await client.chat.completions.create(**asked)).choices[0].message)
        messages = [*messages, rewritten(said)]
        if not said.get("tool_calls"):
            return messages
        for call in said["tool_calls"]:
            found = json.loads(call["function"]["arguments"])["x"] + 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(found)})


def in_its_own_way(message: dict) -> dict:
    """JSON with other spacing and order, content in parts."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    message["content"] = [{"type": "text", "text": message["content"]}] if message.get("content") else None
    return message


def check_exact(served: Served, session: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    """What was told of turns is what the engine made, in order."""
    made = served.made_in(session)
    assert [turn["number"] for turn in end["turns"]] == sorted(made)
    for turn in end["turns"]:
        text = served.tokenizer.decode(made[turn["number"]].tokens, skip_special_tokens=False)
        assert text.startswith(turn["message"]["content"])


@pytest.mark.parametrize("how", ["plain", "streamed", "rewritten"])
def test_a_tool_loop_is_one_branch_whatever_the_client_makes_of_its_history(served: Served, how: str) -> None:
    """Each further root would be a context that is paid for again."""
    session = served.open()
    rewritten = in_its_own_way if how == "rewritten" else lambda message: message
    asyncio.run(count(client_of(session), ASKED, stream=how == "streamed", rewritten=rewritten))
    end = served.end(session)
    made = served.made_in(session)
    assert len(made) == 5
    for number in range(1, 5):
        before = made[number - 1]
        whole = before.context + before.tokens
        assert made[number].context[: len(whole)] == whole, "a turn goes on from the ids that were sampled"
    again = served.tokenizer(served.tokenizer.decode(made[4].context))["input_ids"]
    assert again != made[4].context, "ids that are encoded again would have been noticed"
    assert [turn["delivered"] for turn in end["turns"]] == [True] * 5
    assert [turn["calls"] for turn in end["turns"]] == [["add"]] * 4 + [[]]
    assert [root["number"] for root in end["roots"]] == [0]
    assert end["roots"][0]["messages"] == ASKED
    assert [message["role"] for message in end["added"]["1"]] == ["tool"]
    assert end["counts"]["rendered_again"] == 0 and end["first_difference"] is None
    check_exact(served, session, end)
