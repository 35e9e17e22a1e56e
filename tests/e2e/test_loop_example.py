"""examples/loop.py as a user runs it, with the real Megatron, Ray and vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LOOP = Path(__file__).parents[2] / "examples" / "loop.py"


def test_the_loop_trains_the_quickstarts_model(tmp_path):
    """It is what a person copies first: it has to end, and its model has to be right on sums that it has not seen."""
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    run = subprocess.run(
        [sys.executable, str(LOOP)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    (before, after) = map(float, re.findall(r"^held-out sums: ([\d.]+) % right", run.stdout, re.MULTILINE))
    assert before < 60 and after >= 90, run.stdout[-3000:]


def test_the_loop_can_be_read_in_one_go():
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 150
