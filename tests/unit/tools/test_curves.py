"""tools/curves.py draws an earlier file without running anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "curves.py"


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
    command = [sys.executable, str(SCRIPT), "--draw", str(source), "--picture", str(picture)]
    done = subprocess.run(command, check=True, timeout=200, stdout=subprocess.PIPE, text=True)

    turns, meets, worse = (row.split(" | ") for row in done.stdout.splitlines()[2:5])
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
