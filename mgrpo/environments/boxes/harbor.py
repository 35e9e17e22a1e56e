"""Task folders in Harbor's layout as rows, and their tests as the check: `python -m mgrpo.environments.boxes.harbor TASKS --out DIR`.

Writes DIR/rows.jsonl and DIR/check.py, for a run with `agent_box=docker`, `agent_image=` any of the images, which is tried at the start
(each row has its own), and `agent_check="python3 -I DIR/check.py"`. A row's tests are its ground truth, which only the check is given,
after the agent's end. Images are built outside of a run: the command prints how. Task folders are untrusted input.

check.py is `judge` and `reward_in` from here, for whatever Python an image has: 3.6 and later, the standard library alone.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib

TESTS, LOGS = "/tests", "/logs/verifier"
UNJUDGED = 126
"""Exit status of a check that did not come to a verdict."""
PR_SET_DUMPABLE = 4
_MOST_BYTES = 16 * 2**20
_KINDS = {dict: "a table", str: "a text", float: "a number"}
_CHECK_S = 300.0
"""Longest time of a check."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_BEYOND = {
    "environment": ("mcp_servers", "gpus", "tpu", "healthcheck", "env", "workdir"),
    "agent": ("user",),
    "verifier": ("user", "environment", "collect"),
}
"""Settings that boxes do not support and that a task depends on."""


def row_of(task: Path) -> dict[str, Any]:
    """A task's row.

    Raises:
        ValueError: a file is missing or invalid, or the task needs a feature that boxes lack.
    """
    root = task.resolve()
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (task / name).is_file():
            raise ValueError(f"{task} has no file {name}")
    for path in [task / "task.toml", task / "instruction.md", task / "tests", *sorted((task / "tests").rglob("*"))]:
        if not path.resolve().is_relative_to(root):
            raise ValueError(
                f"{path} is a link out of the task; put a copy of {path.resolve()} there if it belongs to it"
            )
    if (task / "environment" / "docker-compose.yaml").exists():
        raise ValueError(f"{task} needs several containers (environment/docker-compose.yaml), and a box is one")
    try:
        settings = tomllib.loads((task / "task.toml").read_text())
    except tomllib.TOMLDecodeError as err:
        raise ValueError(f"{task}/task.toml: {err}") from None
    verifier, environment = (_typed(settings, name, dict, {}, task) for name in ("verifier", "environment"))
    _typed(settings, "agent", dict, {}, task)
    image = _typed(environment, "docker_image", str, "", task) or f"harbor-{task.name.lower()}"
    if not _IMAGE.fullmatch(image):
        raise ValueError(f"{task}: {image!r:.80} is no name of an image")
    variables = _typed(verifier, "env", dict, {}, task)
    if wrong := [name for name, value in variables.items() if not isinstance(value, str | int | float)]:
        raise ValueError(f"{task}/task.toml: verifier.env.{wrong[0]} must be a text or a number")
    limit_s = _typed(verifier, "timeout_sec", float, _CHECK_S, task)
    if not (math.isfinite(limit_s) and limit_s > 0):
        raise ValueError(f"{task}/task.toml: timeout_sec={limit_s} must be a positive number of seconds")
    if beyond := _beyond(settings):
        raise ValueError(f"{task}/task.toml asks for {', '.join(beyond)}, which a box does not have")
    files = {
        str(path.relative_to(task / "tests")): path for path in sorted((task / "tests").rglob("*")) if path.is_file()
    }
    if (num_bytes := sum(path.stat().st_size for path in files.values())) > _MOST_BYTES:
        raise ValueError(f"{task}/tests holds {num_bytes} bytes, more than the {_MOST_BYTES} of a row")
    return {
        "prompt": (task / "instruction.md").read_text(),
        "task": task.name,
        "image": image,
        "ground_truth": {
            "tests": {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()},
            "env": {name: str(value) for name, value in variables.items()},
            "timeout_s": min(limit_s, _CHECK_S),
        },
    }


def _typed(table: dict[str, Any], name: str, kind: type, default: Any, task: Path) -> Any:
    """A setting of a kind, which may be missing; whole numbers are numbers."""
    value = table.get(name, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind):
        raise ValueError(f"{task}/task.toml: {name}={value!r:.80} must be {_KINDS[kind]}")
    return value


def _beyond(settings: dict[str, Any]) -> list[str]:
    """Requirements of a task that boxes do not support."""
    found = [
        f"{section}.{name}"
        for section, names in _BEYOND.items()
        for name in names
        if settings.get(section, {}).get(name)
    ]
    if settings.get("verifier", {}).get("environment_mode") == "separate":
        found.append("a verifier's environment of its own")
    if settings.get("environment", {}).get("os", "linux") != "linux":
        found.append("another system than Linux")
    if any("${" in str(value) for value in settings.get("verifier", {}).get("env", {}).values()):
        found.append("variables of the machine for its verifier")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Convert all tasks of a folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mgrpo.environments.boxes.harbor", description="Harbor's task folders as rows."
    )
    parser.add_argument("tasks", type=Path, help="folder of task folders, or one of these")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows.jsonl and check.py")
    options = parser.parse_args(argv)
    folders = (
        [options.tasks]
        if (options.tasks / "task.toml").is_file()
        else sorted(path.parent for path in options.tasks.glob("*/task.toml"))
    )
    rows = []
    for folder in folders:
        try:
            rows.append(row_of(folder))
        except (ValueError, OSError) as err:
            sys.stderr.write(f"left out: {err}\n")
            continue
        if (folder / "environment" / "Dockerfile").is_file() and rows[-1]["image"].startswith("harbor-"):
            sys.stdout.write(f"docker build --tag {rows[-1]['image']} {folder / 'environment'}\n")
    if not rows:
        sys.stderr.write(
            f"no task in {options.tasks}: expected folders with task.toml, instruction.md and tests/test.sh\n"
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rows.jsonl").write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    (options.out / "check.py").write_text(check_program())
    return 0


def check_program() -> str:
    """The text of check.py."""
    parts = [
        '"""Judges a task in Harbor\'s layout, inside its container and after the agent\'s end."""',
        "import base64, ctypes, json, os, shutil, subprocess, sys",
        f"TESTS, LOGS, UNJUDGED, PR_SET_DUMPABLE = {TESTS!r}, {LOGS!r}, {UNJUDGED}, {PR_SET_DUMPABLE}",
        inspect.getsource(reward_in),
        inspect.getsource(judge),
        "sys.exit(judge())",
    ]
    return "\n".join(parts) + "\n"


def reward_in(folder):
    """The reward and all numbers that the tests wrote; ValueError where there is no single reward."""
    path = os.path.join(folder, "reward.json")
    if os.path.exists(path):
        with open(path) as file:
            found = json.load(file)
        if not isinstance(found, dict):
            found = {"reward": found}
        numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
        if "reward" not in numbers and len(numbers) != 1:
            raise ValueError(f"reward.json has {sorted(found)}, and no reward")
        return numbers.get("reward", next(iter(numbers.values()))), numbers
    with open(os.path.join(folder, "reward.txt")) as file:
        return float(file.read()), {}


def judge():
    """Put the tests at /tests, run them, and write the reward that they left; returns the exit status."""
    # The tests run the agent's code, as the same user: it must not read this process, nor the task.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    with open(os.environ["MGRPO_TASK"]) as file:
        truth = json.load(file)["ground_truth"]
    os.unlink(os.environ["MGRPO_TASK"])
    if isinstance(truth, list):
        truth = truth[0]
    for folder in (TESTS, LOGS):
        # Files that the agent has put there are not the tests'.
        if os.path.islink(folder):
            os.unlink(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    for name, data in truth["tests"].items():
        path = os.path.join(TESTS, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
        os.chmod(path, 0o755)
    environment = dict(os.environ, **truth["env"])
    for name in ("MGRPO_TASK", "MGRPO_RESULT"):
        environment.pop(name)
    folder = environment.pop("MGRPO_WORK", None)
    try:
        command = ["bash", os.path.join(TESTS, "test.sh")]
        subprocess.call(command, cwd=folder, env=environment, timeout=truth["timeout_s"])
        reward, metrics = reward_in(LOGS)
    except (OSError, ValueError, subprocess.TimeoutExpired) as err:
        sys.stderr.write(f"no verdict: {err}\n")
        return UNJUDGED
    with open(os.environ["MGRPO_RESULT"], "w") as file:
        json.dump({"reward": reward, "metrics": metrics}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
