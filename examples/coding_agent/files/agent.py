"""A coding agent: the model reads files, replaces pieces of them and runs commands until it calls no tool any more.

It knows OPENAI_BASE_URL, as any agent does, and nothing of a trainer but where the task is. Standard library only.
"""

import argparse
import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

COMMAND_S = 10


def read(path):
    """Shows a file."""
    return Path(path).read_text()


def replace(path, old, new):
    """Replaces a text that a file has once."""
    text = Path(path).read_text()
    if text.count(old) != 1:
        return f"{path} has it {text.count(old)} times"
    Path(path).write_text(text.replace(old, new))
    return "replaced"


def run(command):
    """Runs a shell command and shows what it printed."""
    done = subprocess.run(
        command,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        # What it prints the model is shown, so it has no keys. Python takes a compiled copy for new if the file has changed within
        # the same second.
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.stdout.strip()


TOOLS = {"read": (read, ["path"]), "replace": (replace, ["path", "old", "new"]), "run": (run, ["command"])}


def schema(name):
    function, names = TOOLS[name]
    parameters = {"type": "object", "properties": {one: {"type": "string"} for one in names}, "required": names}
    return {
        "type": "function",
        "function": {"name": name, "description": function.__doc__, "parameters": parameters},
    }


def asked(messages):
    """The model's next message."""
    body = {"model": "policy", "messages": messages, "tools": [schema(name) for name in TOOLS]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def answered(call):
    """What a call gives, or how it failed: the model may try again."""
    try:
        function, _ = TOOLS[call["function"]["name"]]
        return function(**json.loads(call["function"]["arguments"]))
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--instructions", help="what the model is told first")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--shown", type=int, default=300, help="characters of what a tool answers, the last ones")
    options = parser.parse_args()
    task = json.loads(Path(os.environ["MGRPO_TASK"]).read_text())
    for name, text in task.get("files", {}).items():
        Path(name).write_text(text)
    told = [{"role": "system", "content": options.instructions}] if options.instructions else []
    messages = [*told, *task["prompt"]]
    for _ in range(options.turns):
        try:
            message = asked(messages)
        except urllib.error.HTTPError as refused:
            # The conversation has no room left: what the files are by now is judged.
            if refused.code != 400:
                raise
            break
        messages.append(message)
        if not message.get("tool_calls"):
            break
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": answered(call)[-options.shown :]}
            for call in message["tool_calls"]
        ]


if __name__ == "__main__":
    main()
