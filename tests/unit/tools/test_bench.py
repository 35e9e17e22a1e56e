"""The cases of tools/bench.py: what each makes of its measurements, and a tiny run of those that need no engine. Times are not checked."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import bench
from tools.bench_cases import data, loop, precision, readme_figures, turns
from tools.bench_cases.watch import Watch

ROOT = Path(__file__).resolve().parents[3]


def run_case(file: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "tools/bench.py", *words, "--output", str(file)]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", bench.CASES)
def test_a_case_has_what_the_skeleton_records(name: str) -> None:
    """A speed claim without machine, versions and protocol is none; a placeholder without an option fails after hours."""
    case = importlib.import_module(f"tools.bench_cases.{name}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", default=case.REPEATS)
    if hasattr(case, "add_options"):
        case.add_options(parser)
    args = parser.parse_args([])
    if name == "ops":
        args.clock = args.allocator = "measured"
    assert "{" not in case.PROTOCOL.format(**vars(args)) and case.PACKAGES and callable(case.measure)
    file = case.file_name(args) if hasattr(case, "file_name") else name
    assert (ROOT / "benchmarks" / f"{file}.json").is_file()


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("data", "--rows", "200", "--baseline_rows", "0"), 2),
        (("save", "--gib", "0.001", "--repeats", "1"), 4),
        (("rewards", "--items", "4", "--repeats", "1"), 5),
        (("endpoint", "--sessions", "2", "--alone", "1", "--open", "1", "--engine_s", "0.1", "--repeats", "1"), 4),
        (("sync", "--layers", "1", "--repeats", "1", "--cases", "masters"), 1),
    ],
)
def test_a_tiny_run_writes_its_file(tmp_path: Path, words: tuple[str, ...], rows: int) -> None:
    """A program that nobody runs for months fails when a figure is doubted."""
    report = run_case(tmp_path / "found.json", *words)
    assert report["protocol"] and report["machine"]["cpu"] and report["versions"]["mgrpo"]
    assert len(report.get("results") or report.get("rows") or report["cases"]) == rows


def test_readme_holds_the_figures_of_the_json_files() -> None:
    """Figures that nobody measured must not stand in the README. To update: python tools/bench.py --markdown"""
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    figures = readme.split(readme_figures.README_START)[1].split(readme_figures.README_END)[0]
    assert figures.strip() == readme_figures.figures(ROOT / "benchmarks").strip()


def test_rows_of_data_and_of_its_baseline_are_the_same_prompts(tmp_path: Path) -> None:
    """A baseline that made other prompts would be a figure for other work; some rows must be over the limit."""
    pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    data.write_rows(tmp_path / "rows.jsonl", 300)
    data.write_tokenizer(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    counts = {
        method(tmp_path / "rows.jsonl", tokenizer, tmp_path / f"cache-{name}")["prompts"]
        for name, method in data.METHODS.items()
        for _ in range(2)
    }
    assert len(counts) == 1 and 200 < counts.pop() < 300


def test_a_ratio_above_one_is_the_price_of_turns() -> None:
    seconds = {"one turn": [2.0, 1.0, 9.0], "rounds": [3.0, 3.0, 3.0]}
    one, rounds = turns.compared(seconds, {"one turn": [1.0], "rounds": [4.0]}, tokens=60)
    assert (one["times_one_turn"], one["sampled_tokens_per_s"]) == (1.0, 30.0)
    assert (rounds["times_one_turn"], rounds["cpu_times_one_turn"]) == (1.5, 4.0)


def test_differences_of_two_completions() -> None:
    """A mean over the wrong tokens would make one precision look like another."""
    prompt, tokens = np.array([1]), np.array([2, 3])
    rows = [(prompt, tokens, np.array([-1.0, -2.0])), (prompt, tokens[:1], np.array([-0.5]))]
    found = precision.compared(rows, [np.array([-1.1, -2.0]), np.array([-0.5 + math.log(1.5)])])
    assert found["tokens"] == 3
    assert found["diff_mean"] == pytest.approx((0.1 + math.log(1.5)) / 3)
    assert found["diff_max"] == pytest.approx(math.log(1.5))
    kl = (math.exp(-0.1) - 1 + 0.1, 0.5 - math.log(1.5))
    assert found["sequence_kl"] == pytest.approx(sum(kl) / 2)
    assert found["sequence_kl_error"] == pytest.approx(abs(kl[0] - kl[1]) / 2)
    assert found["ratio_outside"] == pytest.approx(1 / 3)


def test_the_page_of_precisions_holds_the_figures_of_the_file() -> None:
    """Figures that nobody measured must not stand there."""
    cases = json.loads((ROOT / "benchmarks" / "precision.json").read_text())["cases"]
    page = (ROOT / "docs" / "precision.md").read_text()
    assert cases.keys() <= precision.CASES.keys()
    for name, found in cases.items():
        row = f"| {name} | {found['diff_mean']:.1e} | {found['diff_max']:.1e} | {found['sequence_kl']:.1e} |"
        assert row in page


def make_run(step_s: list[float], cpu_s: float = 1.0) -> loop.Run:
    return loop.Run(
        trainer="t",
        step_s=step_s,
        phases={"train": step_s},
        cpu_s_per_step=cpu_s,
        others_cores=0.0,
        load_before=0.0,
        rewards=[0.5, 0.8, 0.8, 0.8, 0.8, 0.8],
        ends=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    )


def test_the_median_is_over_the_steps_of_all_rounds() -> None:
    """A round in which others kept the machine busy must not count as much as its mean would."""
    figures = loop.summary([make_run([1.0, 2.0, 3.0]), make_run([2.0, 90.0])])
    assert figures["step_s_median"] == 2.0
    assert figures["step_s_min"] == 1.0


def test_a_ratio_above_one_means_that_the_second_is_faster() -> None:
    summaries = {"sync": loop.summary([make_run([1.0])]), "trl": loop.summary([make_run([3.0], cpu_s=2.0)])}
    figures = {"step_s_median": 3.0, "step_s_min": 3.0, "cpu_s_per_step": 2.0}
    assert loop.ratios(summaries) == {"sync over trl": figures}


def test_the_goal_is_reached_by_the_mean_of_five_steps() -> None:
    assert loop.time_to_goal(make_run([1.0])) == 6.0


def test_what_others_used_is_the_machine_less_the_family() -> None:
    watch = Watch.__new__(Watch)
    watch.samples = [(0.0, 0.0, 10.0), (1.0, 1.0, 12.0), (2.0, 2.5, 15.0)]
    assert watch.between(-1.0, 1.5) == (pytest.approx(2.5), pytest.approx(2.5))
