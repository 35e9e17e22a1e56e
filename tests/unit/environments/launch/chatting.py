"""A program as its author has it: it knows the `openai` client and the two variables that this reads, and nothing of training.

Here it prints its last answer, and reports what its row says it is worth.
"""

import json
import os

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds one.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "why": {"type": "string"}},
            "required": ["x"],
        },
    },
}


def main() -> None:
    with open(os.environ["MGRPO_TASK"]) as file:
        row = json.load(file)
    client = openai.OpenAI()
    messages = list(row["prompt"])
    while True:
        completion = client.chat.completions.create(model=row.get("model", "policy"), messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            answer = str(json.loads(call.function.arguments)["x"] + 1)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    print(message.content)
    with open(os.environ["MGRPO_RESULT"], "w") as file:
        json.dump({"reward": row["worth"]}, file)


if __name__ == "__main__":
    main()
