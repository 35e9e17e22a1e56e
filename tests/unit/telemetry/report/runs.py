"""Folders of runs as a run writes them, for the tests of pages about them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></div></script><img src=x onerror=alert(2)>",
    "\"' onmouseover='alert(3)",
    "<!-- ]]> <style>@import 'http://evil'</style> &lt;",
    "\x00\x07\x1b[31m\u202egnp.exe \ud83d \ufeff",
    "<svg/onload=alert(4)>",
]


def record(number: int, reward: float | None = 0.0, text: str = "answer", prompt: int | None = None) -> dict[str, Any]:
    """A record of an evaluation."""
    return {
        "step": 10,
        "prompt_idx": number if prompt is None else prompt,
        "sample_idx": 0,
        "prompt": f"prompt {text}",
        "completion": text,
        "verifiers": ["integer"],
        "ground_truth": [text],
        "scores": {"integer": reward},
        "reward": reward,
        "correct": None if reward is None else reward > 0,
        "finish_reason": "stop",
        "num_tokens": 3,
        "policy_version": 10,
    }


def played(said: str = "hello", **agent: object) -> dict[str, Any]:
    """The entry `trajectory` of a record: an agent's, with a fork and a branch of another context."""
    called = {"type": "function", "function": {"name": "look", "arguments": {"at": said}}}
    first = [
        {"role": "system", "content": f"system {said}"},
        {"role": "assistant", "content": f"an example {said}"},
        {"role": "user", "content": [{"type": "text", "text": said}]},
        {"role": "assistant", "content": said, "reasoning_content": said, "tool_calls": [called]},
        {"role": "tool", "content": said, "name": said},
        {"role": "assistant", "content": f"last {said}"},
    ]
    begun = {"parent": None, "after": None, "rewritten": False, "context_tokens": 4}
    forked = {"parent": 0, "after": 0, "rewritten": True, "context_tokens": 9}
    answer = [{"role": "assistant", "content": ""}]
    return {
        "ended_by": "stop",
        "turns": [{"calls": [{"name": "look", "failed": False}]}, {"calls": []}, {"calls": []}, {"calls": []}],
        "branches": [
            begun | {"num_turns": 2, "messages": first},
            forked | {"num_turns": 1, "messages": [{"role": "user", "content": f"fork {said}"}, *answer]},
            begun | {"num_turns": 1, "messages": [{"role": "user", "content": said}, *answer]},
        ],
        "agent": {"ended": "crashed", "status": 3, "output": said, "seconds": 2.5, "counts": {"retries": 2.0, "x": 0.0}}
        | agent,
    }


def step_line(step: int, **values: float | None) -> dict[str, Any]:
    """A line of metrics.jsonl for a training step."""
    line = {
        "policy_version": step,
        "reward": step / 20,
        "optim/steps": 1,
        "time/total": 2.0,
        "time/unix": 1e9 + 2 * step,
    }
    return {"step": step, **line, **values}


def write_lines(path: Path, records: Iterable[object], *, after: str = "") -> None:
    """Write a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + after)


def append_lines(path: Path, records: Iterable[object]) -> None:
    """Add to a JSONL file."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_run(folder: Path, lines: Sequence[object], *, config: str = "seed: 1\n", state: str = "finished") -> Path:
    """A run's settings, metrics and state."""
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.yaml").write_text(config)
    (folder / "status.json").write_text(json.dumps({"state": state, "cause": ""}))
    if state == "running":
        (folder / "run.lock").write_text("")
    return folder
