"""Commands that tests have play a trajectory: `python agents.py NAME`. Standard library only, as any program of a user's."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from typing import Any


def row() -> dict[str, Any]:
    with open(os.environ["MGRPO_TASK"]) as file:
        return json.load(file)


def write(text: str) -> None:
    with open(os.environ["MGRPO_RESULT"], "w") as file:
        file.write(text)


def rewards() -> None:
    write(json.dumps({"reward": row()["worth"], "metrics": {"steps": 3}}))


def says_raw() -> None:
    write(row()["raw"])


def quiet() -> None:
    pass


def crashes() -> None:
    print("before the crash", flush=True)
    raise SystemExit(3)


def rewards_and_crashes() -> None:
    rewards()
    raise SystemExit(3)


def shouts() -> None:
    for _ in range(3000):
        print("x" * 1000)
    print("the end")


def tells_all() -> None:
    print(json.dumps(dict(os.environ)))
    print(json.dumps(row()))


def links() -> None:
    os.symlink("/etc/passwd", os.environ["MGRPO_RESULT"])


def says_no_text() -> None:
    with open(os.environ["MGRPO_RESULT"], "wb") as file:
        file.write(b'{"reward": 1, "x": "\xff"}')


def makes_a_pipe() -> None:
    os.mkfifo(os.environ["MGRPO_RESULT"])


def fills() -> None:
    with open("large", "wb") as file:
        while True:
            file.write(bytes(1 << 20))


def posts() -> None:
    """Its reward at the endpoint."""
    url = os.environ["ANTHROPIC_BASE_URL"] + "/reward"
    key = os.environ["MGRPO_REWARD_KEY"]
    data = json.dumps({"reward": row()["worth"]}).encode()
    request = urllib.request.Request(url, data, {"authorization": f"Bearer {key}"})
    urllib.request.urlopen(request).read()


def works() -> None:
    """Leaves a file, and tries to decide what its judge sees."""
    with open("answer.txt", "w") as file:
        file.write(row()["write"])
    with open("judge.py", "w") as file:
        file.write("raise SystemExit(0)")
    write('{"reward": 1}')


def plants() -> None:
    """Leaves modules that a judge imports, wherever Python may look for them."""
    works()
    os.makedirs(".mgrpo/__pycache__", exist_ok=True)
    packages = f"{os.environ['HOME']}/.local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    os.makedirs(packages)
    for folder in (".", "..", ".mgrpo", packages, os.environ.get("TMPDIR", "/tmp"), os.environ["HOME"]):
        for name in ("json", "signal", "os", "sitecustomize", "usercustomize", "conftest"):
            with contextlib.suppress(OSError), open(f"{folder}/{name}.py", "w") as file:
                file.write("import os\nos._exit(0)\n")


def fills_its_room() -> None:
    """No file can be written any more."""
    with contextlib.suppress(OSError):
        fills()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
