"""`blocking_agent.py FILE`: an agent of the standard library with two turns. The first one of all never ends: it makes the file, and waits."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from typing import Any


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "max_tokens": 20}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


if __name__ == "__main__":
    with open(os.environ["MGRPO_TASK"]) as task:
        messages = json.load(task)["prompt"]
    messages.append(ask(messages))
    try:
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        ask([*messages, {"role": "user", "content": "1+1"}])
        with open(os.environ["MGRPO_RESULT"], "w") as result:
            # Equal ones would teach nothing.
            json.dump({"reward": time.time_ns() % 1000 / 1000}, result)
    else:
        time.sleep(1e6)
