"""A task folder in Harbor's layout: a file is to be created."""

from __future__ import annotations

from pathlib import Path

COMPARE = 'if [ "$KEY" = 7 ] && grep -qx "$(cat /tests/data/expected)" hello.txt; then reward=1; else reward=0; fi\n'
"""Of tests: whether the agent has left what is expected."""


def task_folder(
    folder: Path, test: str, toml: str = 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\nenv = { KEY = "7" }\n'
) -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Create a file hello.txt.",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        "tests/data/expected": "Hello",
        "solution/solve.sh": "echo Hello > hello.txt",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
