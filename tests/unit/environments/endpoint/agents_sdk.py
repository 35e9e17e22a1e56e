"""An agent of the OpenAI Agents SDK, unchanged, in a process of its own: `python agents_sdk.py responses|chat URL KEY GOAL`."""

from __future__ import annotations

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(x: int, why: str = "") -> str:
    """Adds one."""
    return str(x + 1)


async def main(api: str, url: str, key: str, goal: str) -> None:
    set_tracing_disabled(True)
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    agent = Agent(name="counter", instructions="Use the tool.", tools=[add], model=model("policy", client))
    by_id = {} if api == "chat" else {"auto_previous_response_id": True}
    found = [(await Runner.run(agent, f"count to {goal}", run_config=RunConfig())).final_output]
    for options in ({}, by_id):
        streamed = Runner.run_streamed(agent, f"count to {goal}", **options)
        async for _ in streamed.stream_events():
            pass
        found.append(streamed.final_output)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
