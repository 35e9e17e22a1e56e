"""tools/bench_data.py on a few rows: a baseline that made other prompts would be a figure for other work."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "bench_data.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ours_and_the_baseline_make_the_same_prompts(bench: ModuleType, tmp_path: Path) -> None:
    """Some rows must be over the limit, or filtering is not measured."""
    pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    bench.write_rows(tmp_path / "rows.jsonl", 300)
    bench.write_tokenizer(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    counts = {
        method(tmp_path / "rows.jsonl", tokenizer, tmp_path / f"cache{number}", 1)["prompts"]
        for number, method in enumerate(bench.METHODS.values())
        for _ in range(2)
    }
    assert len(counts) == 1 and 200 < counts.pop() < 300


def test_a_report_is_written(tmp_path: Path) -> None:
    """Times are not looked at."""
    output = tmp_path / "data.json"
    command = [sys.executable, str(SCRIPT), "--rows", "200", "--baseline_rows", "0", "--output", str(output)]
    subprocess.run(command, check=True, timeout=200, stdout=subprocess.DEVNULL)
    report = json.loads(output.read_text())
    assert [(row["method"], row["start"]) for row in report["results"]] == [("mgrpo", "new"), ("mgrpo", "cached")]
    assert all(row["peak_pss_mb"] >= row["peak_anonymous_mb"] > 0 for row in report["results"])
    assert report["versions"]["mgrpo"] and report["protocol"] and report["sampler"][0]["rows"] == 200
