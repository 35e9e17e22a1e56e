"""Metrics of a run by training step as an SVG file.

python -m tools.docs.metric_curve output/distillation_sums distillation/kl distillation/top1_agreement > examples/distillation/curve.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.course import metric_points
from mgrpo.telemetry.report.figure import PICTURE
from mgrpo.telemetry.report.frame import COLOURS, UNDER_TITLE, Frame


def metric_svg(folder: Path, names: list[str]) -> str:
    """A line for each metric in the run's metrics.jsonl, and their names above in the lines' colours."""
    lines = list(read_records([folder / "metrics.jsonl"]))
    curves = [[*zip(*metric_points(lines, name), strict=True)] for name in names]
    ranges = [(0.0, max(values)) for _, values in curves]
    steps = [step for xs, _ in curves for step in (xs[0], xs[-1])]
    frame = Frame.around(ranges, min(steps), max(steps), size=PICTURE, top=UNDER_TITLE)
    drawn = [mark for number, curve in enumerate(curves) for mark in frame.lines(*curve, f"line s{number}")]
    words = [
        f"<text x='{frame.left + 200 * number}' y='14' style='fill:{COLOURS[number]}'>{name}</text>"
        for number, name in enumerate(names)
    ]
    return frame.svg([*drawn, *words], label=", ".join(names), is_file=True)


if __name__ == "__main__":
    print(metric_svg(Path(sys.argv[1]), sys.argv[2:]))
