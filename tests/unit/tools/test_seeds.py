"""tools/seeds.py reads the folders of runs; what docs/quickstart.md and the picture show is in the committed file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def seeds(*words: str | Path) -> str:
    command = [sys.executable, str(ROOT / "tools" / "seeds.py"), *map(str, words)]
    return subprocess.run(command, check=True, timeout=200, stdout=subprocess.PIPE, text=True).stdout


def written(folder: Path, *, seed: int, rewards: list[float], ends: tuple[float, float]) -> Path:
    """A run's folder as a run leaves it: evaluations have lines of their own before the first step and after the last."""
    steps = [{"step": step, "reward": reward, "time/total": 2.0 + step} for step, reward in enumerate(rewards, start=1)]
    lines = [{"step": 0, "eval/scores": ends[0]}, *steps, {"step": len(rewards), "eval/scores": ends[1]}]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"exp_name: task  # file task.yaml\nseed: {seed}  # flag\n")
    return folder


def test_runs_of_an_experiment_are_told_apart_by_seed(tmp_path: Path) -> None:
    """An evaluation at the end that is taken for the one before would turn a failure into a success."""
    second = written(tmp_path / "b", seed=2, rewards=[0.0, 0.5, 1.0], ends=(0.25, 0.75))
    first = written(tmp_path / "a", seed=1, rewards=[0.5, 0.5, 0.5], ends=(0.5, 0.125))
    out, picture = tmp_path / "out.json", tmp_path / "picture.svg"
    rows = seeds(second, first, "--out", out, "--picture", picture).splitlines()[2:]
    assert rows == ["| task | 1 | 50.0 % | 12.5 % | 4.0 s |", "| task | 2 | 25.0 % | 75.0 % | 4.0 s |"]
    assert json.loads(out.read_text())["settings"][0]["runs"][1]["rewards"] == [0.0, 0.5, 1.0]
    assert "mean of 2 seeds" in picture.read_text()


def test_the_committed_picture_and_table_are_those_of_the_committed_file(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    rows = seeds("--draw", ROOT / "benchmarks" / "smollm2-tasks.json", "--picture", picture)
    assert rows in (ROOT / "docs" / "quickstart.md").read_text()
    assert picture.read_text() == (ROOT / "docs" / "recipes" / "smollm2.svg").read_text()
