"""tools/bench_stream.py at a small size: the scheduler keeps its promises, and both numbers are worth something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "bench_stream.py"


def test_the_second_number_saves_simulated_time_and_throws_nothing_away(tmp_path: Path) -> None:
    """The clock is simulated, so that the seconds are the same on every machine."""
    output = tmp_path / "stream.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--tables", "order", "--output", str(output)]
    subprocess.run(command, check=True, timeout=200, stdout=subprocess.DEVNULL)
    report = json.loads(output.read_text())
    found = {row["case"]: row for row in report["results"]}
    seconds = {case: row["s_per_step"] for case, row in found.items()}
    assert seconds["4 / 8"] < seconds["2 / 4"] < seconds["1 / 2"] < seconds["1 / 1"] < seconds["0 (synchronous)"]
    assert all(row["groups_thrown_away"] == 0 for row in found.values())
    limits = {"0 (synchronous)": 0, "1 / 1": 1, "2 / 2": 2, "1 / 2": 2, "2 / 4": 4, "4 / 8": 8}
    assert all(found[case]["age_max"] <= limit for case, limit in limits.items())
    assert found["2 / 4"]["age_mean"] < found["4 / 4"]["age_mean"]
