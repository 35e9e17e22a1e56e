"""An agent by the clients' own libraries, in a process of its own: `python agent_clients.py API URL KEY GOAL`; no mgrpo inside.

API is chat, messages, responses or previous (Responses with `previous_response_id`), with "-stream" behind it for streams. It
counts with a tool and prints the number of its turns, the last text and the thoughts that it was shown.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SYSTEM = "Use the tool."
DESCRIPTION = "Adds one."
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["x"],
}
Said = tuple[Any, str, list[str], list[tuple[str, dict[str, Any]]]]
"""What the history is to hold, the text, thoughts, and the calls by their ids."""


def chat(url: str, key: str, goal: int, *, streams: bool) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    tools = [{"type": "function", "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"count to {goal}"}]

    def turn() -> Said:
        if streams:
            with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        calls = [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        thought = getattr(message, "reasoning_content", None)
        said = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
                for call in message.tool_calls
            ]
        return [said], message.content or "", [thought] if thought else [], calls

    def answers(found: list[tuple[str, str]]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": name, "content": answer} for name, answer in found]

    play(turn, messages.extend, answers)


def messages(url: str, key: str, goal: int, *, streams: bool) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key)
    given: Any = {
        "model": "policy",
        "max_tokens": 500,
        "system": SYSTEM,
        "tools": [{"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}],
    }
    history: list[Any] = [{"role": "user", "content": f"count to {goal}"}]

    def turn() -> Said:
        counted = client.messages.count_tokens(
            messages=history, **{name: value for name, value in given.items() if name != "max_tokens"}
        )
        if streams:
            with client.messages.stream(messages=history, **given) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=history, **given)
        assert counted.input_tokens == message.usage.input_tokens
        blocks = message.content
        assert message.stop_reason == ("tool_use" if any(block.type == "tool_use" for block in blocks) else "end_turn")
        return (
            [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in blocks]}],
            "".join(block.text for block in blocks if block.type == "text"),
            [block.thinking for block in blocks if block.type == "thinking"],
            [(block.id, block.input) for block in blocks if block.type == "tool_use"],
        )

    def answers(found: list[tuple[str, str]]) -> list[Any]:
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": answer} for name, answer in found]
        return [{"role": "user", "content": blocks}]

    play(turn, history.extend, answers)


def responses(url: str, key: str, goal: int, *, streams: bool, by_id: bool = False) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    tools = [{"type": "function", "name": "add", "description": DESCRIPTION, "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": f"count to {goal}"}]
    previous: list[str] = []

    def turn() -> Said:
        given: Any = {"model": "policy", "instructions": SYSTEM, "tools": tools, "input": items}
        if by_id and previous:
            given["previous_response_id"] = previous[-1]
        if streams:
            with client.responses.stream(**given) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**given)
        previous.append(response.id)
        if by_id:
            items.clear()
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        for item in output:
            for part in item.get("content", ()):
                part.pop("parsed", None)
        return (
            [] if by_id else output,
            response.output_text,
            [part.text for item in response.output if item.type == "reasoning" for part in item.content or ()],
            [(item.call_id, json.loads(item.arguments)) for item in response.output if item.type == "function_call"],
        )

    def answers(found: list[tuple[str, str]]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": name, "output": answer} for name, answer in found]

    play(turn, items.extend, answers)


def play(turn: Any, go_on: Any, answers: Any) -> None:
    """Ask for turns until one calls nothing."""
    num_turns, thoughts = 0, []
    while True:
        said, text, thought, calls = turn()
        num_turns += 1
        thoughts += thought
        if not calls:
            break
        go_on(said)
        go_on(answers([(name, str(given["x"] + 1)) for name, given in calls]))
    sys.stdout.write(json.dumps({"turns": num_turns, "text": text, "thoughts": thoughts}))


def main(api: str, url: str, key: str, goal: str) -> None:
    name, _, kind = api.partition("-")
    streams = kind == "stream"
    if name == "previous":
        responses(url, key, int(goal), streams=streams, by_id=True)
    else:
        {"chat": chat, "messages": messages, "responses": responses}[name](url, key, int(goal), streams=streams)


if __name__ == "__main__":
    main(*sys.argv[1:])
