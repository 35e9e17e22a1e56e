"""A calculator's agent of the OpenAI Agents SDK, as its documentation writes them; `run` is what mgrpo calls."""

import contextlib
import operator
import re

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(api_key="that of the trajectory")


@function_tool
def calculate(expression: str) -> str:
    """Calculate one operation on two numbers, for example 12 * 7."""
    left, sign, right = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression).groups()
    return str({"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(left), int(right)))


async def run(row, endpoint):
    client = CLIENT.with_options(base_url=endpoint.openai_url, api_key=endpoint.api_key)
    agent = Agent(name="calculator", tools=[calculate], model=OpenAIChatCompletionsModel(endpoint.model, client))
    # Out of turns or of tokens: what it said last is judged.
    with contextlib.suppress(AgentsException, BadRequestError):
        await Runner.run(agent, row["prompt"][0]["content"], max_turns=4)
