"""The reward curve of a run as a PNG, from its metrics.jsonl."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

Points = list[tuple[int, float]]


def draw_reward_curve(
    metrics_path: str | Path, png_path: str | Path, *, title: str = "Reward during training"
) -> Path | None:
    """Draw mean reward a step (thin), its running mean (bold) and held-out evaluations (dots).

    Returns the PNG's path; None, with a note, when matplotlib is missing or there is no reward to draw.
    """
    rewards, evaluations = read_points(metrics_path, "reward"), read_points(metrics_path, "eval/scores")
    if not rewards:
        logger.warning("no reward curve: %s holds no rewards", metrics_path)
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        logger.warning("no reward curve: %s; pip install matplotlib", err)
        return None
    figure = Figure(figsize=(8, 4), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, rewards, evaluations)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
    png_path = Path(png_path)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path)
    return png_path


def read_points(metrics_path: str | Path, name: str) -> Points:
    """`(step, value)` of one metric in file order; lines without it, and a last line torn by a crash, are left out."""
    points: Points = []
    with Path(metrics_path).open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record.get(name) is not None:
                points.append((record["step"], record[name]))
    return points


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place, of fewer at the start."""
    means, total = [], 0.0
    for place, value in enumerate(values):
        total += value - (values[place - window] if place >= window else 0.0)
        means.append(total / min(place + 1, window))
    return means


def _draw(axes: object, rewards: Points, evaluations: Points) -> None:
    steps, values = zip(*rewards, strict=True)
    window = max(2, min(len(values) // 10, 50))
    axes.plot(steps, values, color="#8fb8de", linewidth=0.9, label="each step")
    axes.plot(
        steps, running_mean(values, window), color="#1f5a99", linewidth=2.4, label=f"mean of the last {window} steps"
    )
    if evaluations:
        axes.plot(
            *zip(*evaluations, strict=True),
            color="#d9622b",
            linestyle=(0, (4, 3)) if len(evaluations) > 2 else "none",  # two points are no course
            linewidth=1.2,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label="held-out prompts",
            zorder=3,
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.015)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors="#444444")
    axes.legend(frameon=False, loc="best", fontsize=9)
