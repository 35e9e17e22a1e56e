"""tools/bench_controller.py on a few samples: it compares packs as well as figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "bench_controller.py"


def test_a_report_compares_both_ways(tmp_path: Path) -> None:
    """Times are not looked at; the bytes are those of 9 and of 24 a token, with the lengths beside them."""
    output = tmp_path / "controller.json"
    command = [sys.executable, str(SCRIPT), "--sizes", "64x400", "--dp", "8", "--ranks", "2", "--send_mb", "1"]
    subprocess.run([*command, "--output", str(output)], check=True, timeout=200, stdout=subprocess.DEVNULL)
    report = json.loads(output.read_text())
    before, after = report["results"]
    assert (before["method"], after["method"]) == ("everything to all", "slices")
    assert before["measured_ranks"] == after["measured_ranks"] == 8
    assert 15 < before["bytes_a_token"] <= 25 and 5 < after["bytes_a_token"] < 9.5
    assert before["bytes_to_a_learner"] == pytest.approx(before["bytes"])
    assert before["bytes_from_rank_0"] == pytest.approx(3 * before["bytes"])
    assert after["bytes_from_rank_0"] == pytest.approx(7 / 8 * after["bytes"])
    assert after["bytes_to_a_learner"] < after["bytes"] / 7
    assert report["versions"]["mgrpo"] and report["protocol"] and report["sending"]["mb_per_s_from_rank_0"]
