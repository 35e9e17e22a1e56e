"""tools/gpu_whole_run.py on a CPU: whoever gets a GPU for half an hour must not spend it on mending the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_stage_passes_on_a_cpu(tmp_path: Path) -> None:
    """Without carried packages, and with few steps."""
    command = [sys.executable, ROOT / "tools" / "gpu_whole_run.py", "--device", "cpu"]
    command += ["--folder", tmp_path / "kept", "--out", tmp_path / "out", "--", "--total_episodes", "1536"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "whole-run.json").read_text())
    outcomes = {name: part["status"] for name, part in report["parts"].items()}
    passed = ("imports", "extension", "engine", "quickstart", "group")
    assert outcomes == {"join": "skipped", **dict.fromkeys(passed, "passed"), "sync_tests": "skipped"}
    engine, run = (report["parts"][name]["figures"] for name in ("engine", "quickstart"))
    assert engine["first_weights"] == engine["once_more"] == {"tokens": 0, "logprobs": 0}
    assert engine["other_weights"]["tokens"] > 0.5
    assert run["steps"] == run["policy_version"] == 6 and run["dtype"] == "bfloat16"
    page = (tmp_path / "out" / "whole-run.md").read_text()
    assert "| quickstart | passed |" in page and "6 steps, reward" in page
    assert "it says: 10+16=" in (tmp_path / "out" / "logs.txt").read_text()
