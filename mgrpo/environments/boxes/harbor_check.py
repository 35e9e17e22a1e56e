"""Judges a task in Harbor's layout, inside its container and after the agent's end: puts the tests at /tests, runs them, reads the reward.

Standard library only, one file, Python 3.6 and later: it is run by whatever Python an image has.
"""

import base64
import ctypes
import json
import os
import shutil
import subprocess
import sys

TESTS, LOGS = "/tests", "/logs/verifier"
UNJUDGED = 126
"""Exit status of a check that did not come to a verdict."""
PR_SET_DUMPABLE = 4


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


def main():
    # The tests run what the agent wrote, as the same user: it must not read this process, nor the task.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    with open(os.environ["MGRPO_TASK"]) as file:
        truth = json.load(file)["ground_truth"]
    os.unlink(os.environ["MGRPO_TASK"])
    if isinstance(truth, list):
        truth = truth[0]
    for folder in (TESTS, LOGS):
        # What the agent has put there is not the tests'.
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
