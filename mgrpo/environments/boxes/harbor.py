"""Task folders in Harbor's layout as rows, and their tests as the check: `python -m mgrpo.environments.boxes.harbor TASKS --out DIR`.

Writes DIR/rows.jsonl and DIR/check.py, for a run with `agent_box=docker`, `agent_image=` any of the images, which is tried at the start
(each row has its own), and `agent_check="python3 -I DIR/check.py"`. A row's tests are its ground truth, which only the check is given,
after the agent's end. Images are built outside of a run: the command prints how. Task folders are untrusted input.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib

from mgrpo.environments.boxes import harbor_check

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
"""Settings without which a task would be another one."""


def row_of(task: Path) -> dict[str, Any]:
    """A task's row.

    Raises:
        ValueError: a file is missing or is not what it should be, or the task needs what a box does not have.
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
    """What a task wants of its place that a box does not do."""
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
    shutil.copy(harbor_check.__file__, options.out / "check.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
