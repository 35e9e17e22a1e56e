"""Task folders in Harbor's layout: what an agent is told, what it is not, and the reward that the tests write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.environments.boxes import harbor, harbor_check

# Another root, in which everything can be written and which is gone afterwards.
_ROOT = """
mount -t tmpfs none /mnt || exit 77
for entry in /*; do
    case $entry in /mnt|/tests|/logs) continue;; esac
    if [ -L "$entry" ]; then cp -a "$entry" /mnt; elif [ -d "$entry" ]; then
        mkdir "/mnt$entry" && mount --rbind "$entry" "/mnt$entry" || exit 77
    fi
done
exec chroot /mnt sh -c 'cd "$0" && exec "$@"' "$0" "$@"
"""


def _task(
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


def _judged(tmp_path: Path, test: str, said: str) -> tuple[int, dict | None, str]:
    """Status of the check, its result and what it printed, where an agent has left `said` in hello.txt."""
    assert harbor.main([str(_task(tmp_path / "task", test)), "--out", str(tmp_path / "out")]) == 0
    row = json.loads((tmp_path / "out/rows.jsonl").read_text())
    box = tmp_path / "box"
    box.mkdir()
    (box / "task.json").write_text(json.dumps(row))
    (box / "hello.txt").write_text(said)
    (box / "check.py").write_bytes((tmp_path / "out/check.py").read_bytes())
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ROOT, str(box)]
    variables = [f"MGRPO_TASK={box}/task.json", f"MGRPO_RESULT={box}/result.json"]
    done = subprocess.run([*command, "env", *variables, sys.executable, "check.py"], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"no other root can be made here: {done.stderr}")
    result = box / "result.json"
    return done.returncode, json.loads(result.read_text()) if result.exists() else None, done.stdout + done.stderr


_COMPARE = 'if [ "$KEY" = 7 ] && grep -qx "$(cat /tests/data/expected)" hello.txt; then reward=1; else reward=0; fi\n'


@pytest.mark.parametrize(("said", "reward"), [("Hello\n", 1.0), ("Goodbye\n", 0.0)])
def test_the_tests_decide(tmp_path, said, reward):
    """They come to /tests, and their word is in reward.txt."""
    status, result, printed = _judged(
        tmp_path, f"{_COMPARE}echo $reward > /logs/verifier/reward.txt; ls /solution", said
    )
    assert (status, result) == (0, {"reward": reward, "metrics": {}}), printed
    assert not Path("/tests").exists() or not Path("/tests/data/expected").exists()


def test_several_numbers_are_metrics_of_which_one_is_the_reward(tmp_path):
    """reward.json may name more than one."""
    test = """echo '{"reward": 0.5, "speed": 2}' > /logs/verifier/reward.json"""
    assert _judged(tmp_path, test, "")[:2] == (0, {"reward": 0.5, "metrics": {"reward": 0.5, "speed": 2.0}})


@pytest.mark.parametrize(
    "test",
    ["true", "echo none > /logs/verifier/reward.txt", """echo '{"a": 1, "b": 2}' > /logs/verifier/reward.json"""],
)
def test_no_verdict_is_no_score(tmp_path, test):
    """Tests that break are not the agent's failure."""
    status, result, printed = _judged(tmp_path, test, "Hello\n")
    assert (status, result) == (harbor_check.UNJUDGED, None) and "no verdict" in printed


def test_the_agent_is_not_told_the_tests(tmp_path, capsys):
    """They are the ground truth, which only the check is given; images are named, and how to build them is said."""
    _task(tmp_path / "one", "true")
    _task(tmp_path / "two", "true", '[environment]\ndocker_image = "own:2"\n')
    for name in ("three", "four"):
        _task(tmp_path / name, "true", "= no toml" if name == "four" else "")
    (tmp_path / "three/environment/docker-compose.yaml").write_text("")
    assert harbor.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    rows = {row["task"]: row for row in map(json.loads, (tmp_path / "out/rows.jsonl").read_text().splitlines())}
    assert {name: row["image"] for name, row in rows.items()} == {"one": "harbor-one", "two": "own:2"}
    assert sorted(rows["one"]) == ["ground_truth", "image", "prompt", "task"]
    assert (
        sorted(rows["one"]["ground_truth"]["tests"]) == ["data/expected", "test.sh"]
        and rows["two"]["ground_truth"]["timeout_s"] == 300.0
    )
    printed = capsys.readouterr()
    assert printed.out == f"docker build --tag harbor-one {tmp_path}/one/environment\n"
    assert "three needs several containers" in printed.err and "four/task.toml" in printed.err
    assert harbor.main([str(tmp_path / "out"), "--out", str(tmp_path / "none")]) == 2
