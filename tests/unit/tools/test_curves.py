"""tools/curves.py reads the folders of runs, and draws an earlier file without running anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def curves(*words: str | Path) -> str:
    command = [sys.executable, str(ROOT / "tools" / "curves.py"), *map(str, words)]
    return subprocess.run(command, check=True, timeout=200, stdout=subprocess.PIPE, text=True).stdout


def setting(name: str, after: list[float], rewards: list[list[float]]) -> dict[str, object]:
    ends = {"heldout_before": 0.3, "age_mean": 0.75, "age_max": 2.0}
    runs = [
        ends | {"seed": seed, "heldout_after": accuracy, "reward_at_the_end": curve[-1], "rewards": curve}
        for seed, (accuracy, curve) in enumerate(zip(after, rewards, strict=True))
    ]
    return {"name": name, "flags": {}, "runs": runs}


def test_an_earlier_file_is_drawn_and_its_ranges_are_compared(tmp_path: Path) -> None:
    """A picture whose bands do not reach the extreme seeds, or a table that says a worse setting is as good, would hide a defect."""
    settings = [
        setting("turns", [0.90, 0.94], [[0.0, 0.0], [1.0, 1.0]]),
        setting("meets", [0.85, 0.91], [[0.5, 0.5], [0.5, 0.5]]),
        setting("worse", [0.70, 0.89], [[0.2, 0.4], [0.4, 0.8]]),
    ]
    source, picture = tmp_path / "runs.json", tmp_path / "picture.svg"
    source.write_text(json.dumps({"settings": settings}))
    printed = curves("asynchronous", "--draw", source, "--picture", picture)

    turns, meets, worse = (row.split(" | ") for row in printed.splitlines()[2:5])
    assert turns[2:4] == ["0.920 (0.900 to 0.940)", ""]
    assert meets[2:4] == ["0.880 (0.850 to 0.910)", "yes"]
    assert worse[2:4] == ["0.795 (0.700 to 0.890)", "no"]

    svg = picture.read_text()
    bands = [corners(points) for points in re.findall(r"<polygon[^>]*points='([^']*)'", svg)]
    lines = [corners(points) for points in re.findall(r"<polyline[^>]*points='([^']*)'", svg)]
    assert len(bands) == len(lines) == 3
    (_, floor), (_, _), (_, ceiling), (_, _) = bands[0]
    height = floor - ceiling
    # Steps 1 and 2 of "worse": running means 0.2, 0.3 of one seed and 0.4, 0.6 of the other, so 0.3, 0.45 in the middle.
    below = [(floor - y) / height for _, y in bands[2]]
    assert below == pytest.approx([0.2, 0.3, 0.6, 0.4], abs=1e-3)
    assert [(floor - y) / height for _, y in lines[2]] == pytest.approx([0.3, 0.45], abs=1e-3)
    assert all(name in svg for name in ("turns", "meets", "worse"))


def corners(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]


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
    rows = curves("tasks", second, first, "--out", out, "--picture", picture).splitlines()[2:]
    assert rows == ["| task | 1 | 50.0 % | 12.5 % | 4.0 s |", "| task | 2 | 25.0 % | 75.0 % | 4.0 s |"]
    assert json.loads(out.read_text())["settings"][0]["runs"][1]["rewards"] == [0.0, 0.5, 1.0]
    assert "mean of 2 seeds" in picture.read_text()


def test_the_committed_picture_and_table_are_those_of_the_committed_file(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    rows = curves("tasks", "--draw", ROOT / "benchmarks" / "smollm2-tasks.json", "--picture", picture)
    assert rows in (ROOT / "docs" / "quickstart.md").read_text()
    assert picture.read_text() == (ROOT / "docs" / "recipes" / "smollm2.svg").read_text()
