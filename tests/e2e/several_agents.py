"""An agent for runs of the tests: one program with the clients of OpenAI and Anthropic, which asks in another way each time.

By the number of its trajectory it uses a tool, plain or streamed, through either client; asks two questions about one answer at the same
time; begins anew with a summary; repeats a call that it gives up; or does nothing, crashes or hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from anthropic import AsyncAnthropic
from openai import APITimeoutError, AsyncOpenAI

TOOL = "calculate"
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"type": "function", "function": {"name": TOOL, "description": "One operation.", "parameters": SCHEMA}}
_OPENAI, _ANTHROPIC = AsyncOpenAI(base_url="http://x", api_key="x"), AsyncAnthropic(base_url="http://x", api_key="x")


async def run(row: Mapping[str, Any], endpoint: Any) -> float | None:
    number = int(endpoint.trajectory.rpartition("/")[2])
    # Of the endpoint that has its session.
    endpoint.metrics["endpoint"] = float(endpoint.base_url.rpartition("/")[2].partition("-")[0])
    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    openai = _OPENAI.with_options(base_url=endpoint.openai_url, api_key=endpoint.api_key)
    match number:
        case 0 | 1:
            await _with_openai(openai, question, streams=number == 1)
        case 2:
            claude = _ANTHROPIC.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
            await _with_anthropic(claude, question)
        case 3:
            await _forks(openai, question)
        case 4:
            await _compacts(openai, question)
        case 5:
            await _gives_up(openai, question)
        case 6:
            return 1.0  # Without a turn of the model.
        case _:
            await _ask(openai, [{"role": "user", "content": question}])
            raise RuntimeError("this agent crashes")
    return None


def calculate(arguments: Mapping[str, Any]) -> str:
    """The tool."""
    found = re.fullmatch(r"(\d{1,6})([*+-])(\d{1,6})", str(arguments.get("expression", "")).replace(" ", ""))
    if found is None:
        return "error"
    left, right = int(found[1]), int(found[3])
    return str({"*": left * right, "+": left + right, "-": left - right}[found[2]])


async def _ask(client: AsyncOpenAI, messages: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="policy", messages=messages, tools=[FUNCTION], **settings)
    return answer.choices[0].message.model_dump(exclude_none=True)


async def _streamed(client: AsyncOpenAI, messages: list[dict[str, Any]]) -> dict[str, Any]:
    text, calls = "", {}
    async for chunk in await client.chat.completions.create(
        model="policy", messages=messages, tools=[FUNCTION], stream=True
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                known["arguments"] += call.function.arguments or ""
    found: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                # As another library would write them.
                "function": {"name": call["name"], "arguments": json.dumps(json.loads(call["arguments"]), indent=1)},
            }
            for call in calls.values()
        ]
    return found


async def _with_openai(client: AsyncOpenAI, question: str, *, streams: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(3):
        message = await (_streamed(client, messages) if streams else _ask(client, messages))
        messages.append(message)
        for call in message.get("tool_calls", ()):
            result = calculate(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            return


async def _with_anthropic(client: AsyncAnthropic, question: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    tool = {"name": TOOL, "description": "One operation.", "input_schema": SCHEMA}
    for _ in range(3):
        answer = await client.messages.create(model="policy", messages=messages, tools=[tool], max_tokens=60)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            return
        messages.append({"role": "user", "content": results})


async def _forks(client: AsyncOpenAI, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    messages.append(await _ask(client, messages, max_tokens=20))
    asked = [[*messages, {"role": "user", "content": text}] for text in ("1+1", "2*3")]
    await asyncio.gather(*(_ask(client, each, max_tokens=20) for each in asked))
    await _ask(client, [{"role": "system", "content": "Judge."}, *asked[0]], max_tokens=10)


async def _compacts(client: AsyncOpenAI, question: str) -> None:
    first = await _ask(client, [{"role": "user", "content": question}], max_tokens=20)
    await _ask(client, [{"role": "user", "content": f"{question}: {first.get('content', '')[:10]}"}], max_tokens=20)


async def _gives_up(client: AsyncOpenAI, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    with contextlib.suppress(APITimeoutError):
        await _ask(client.with_options(timeout=0.001, max_retries=0), messages)
    await _ask(client, messages, stop=["</tool_call>"], temperature=0.3)
