"""Curves over steps: pictures that say what the numbers say, and stay inside their frames."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from mgrpo.telemetry.chart import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    metric_points,
    reward_svg,
    running_mean,
    ticks,
)
from mgrpo.telemetry.samples import read_records


def test_points_skip_null_and_a_torn_last_line(tmp_path):
    """The curve is also drawn from runs that crashed."""
    path = tmp_path / "metrics.jsonl"
    records = [{"step": 0, "eval/scores": 0.5}]
    for step in range(1, 61):
        records.append({"step": step, "reward": None if step == 30 else step / 10 + step % 3})
        records += [{"step": step, "eval/scores": step / 10}] if step % 20 == 0 else []
    path.write_text("\n".join(json.dumps(record) for record in records) + '\n{"step": 61, "sco')
    lines = list(read_records([path]))
    assert len(metric_points(lines, "reward")) == 59
    assert metric_points(lines, "eval/scores") == [(0, 0.5), (20, 2.0), (40, 4.0), (60, 6.0)]


def test_the_running_mean_looks_back_only():
    """A mean that looks ahead would show learning before it happened."""
    assert running_mean([0.0, 2.0, 4.0, 6.0], 2) == [0.0, 1.0, 3.0, 5.0]
    assert running_mean([3.0], 5) == [3.0]


def test_the_curve_is_a_picture_of_its_own():
    """Viewers of SVG files are stricter than browsers: one namespaced XML element, with both lines and every evaluation."""
    root = ElementTree.fromstring(reward_svg([(step, step / 60) for step in range(1, 61)], [(0, 0.5), (60, 1.0)]))
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    thin, bold = root.findall(f"{namespace}polyline")
    # From the left edge of the frame to its right edge; the mean of the last 6 steps ends at 57.5 / 60.
    frame = Frame([(0, 0.0), (60, 1.0)], WIDTH, HEIGHT)
    for line in (thin, bold):
        xs = [float(point.split(",")[0]) for point in line.attrib["points"].split()]
        assert xs[0] == pytest.approx(frame.x(1), abs=0.1) and xs[-1] == WIDTH - RIGHT
    assert [float(dot.attrib["cx"]) for dot in root.findall(f"{namespace}circle")] == [
        round(frame.left, 1),
        WIDTH - RIGHT,
    ]
    top, bottom = float(thin.attrib["points"].split(",")[-1]), float(bold.attrib["points"].split(",")[-1])
    assert top == TOP and bottom == pytest.approx(TOP + (HEIGHT - TOP - BOTTOM) * (1 - 57.5 / 60), abs=0.1)
    assert "held-out" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]),
        (-0.19, -0.05, [-0.2, -0.15, -0.1, -0.05]),
        (3.0, 41.0, [0, 10, 20, 30, 40, 50]),
        (0.0, 0.0, [-1, -0.5, 0, 0.5, 1]),
        (3.125, 3.125, [1, 2, 3, 4, 5]),
        (1e-6, 3e-6, [1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6]),
    ],
)
def test_ticks_are_round_numbers_around_all_values(low, high, expected):
    """-0.04824 tells a reader nothing, and a flat curve on the edge of its frame looks like an empty one."""
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    "points", [[(1, -0.14472), (9, -0.09648)], [(4, 0.0), (5, 0.0)], [(7, 1e-7)], [(1, -2e12), (2, 3.0)]]
)
def test_labels_and_lines_are_inside_the_picture(points):
    """Of a negative label the sign was cut off; a single step had no mark at all."""
    for svg in (reward_svg(points, []), reward_svg(points, points)):
        root = ElementTree.fromstring(svg)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        labels = [node for node in root.iter() if node.attrib.get("text-anchor") == "end"]
        assert labels and all(float(n.attrib["x"]) - 6.5 * len(n.text or "") >= 0 for n in labels)
        places = [corner.split(",") for n in root.iter() for corner in n.attrib.get("points", "").split()]
        places += [[n.attrib["cx"], n.attrib["cy"]] for n in root.iter() if "cx" in n.attrib]
        assert places and all(0 < float(x) < width and 10 < float(y) < height - 10 for x, y in places)
        steps = [n.text.removeprefix("step ") for n in root.iter() if n.attrib.get("text-anchor") == "middle"]
        assert steps[0] == str(points[0][0]) and all(step.isdigit() for step in steps)


def test_without_evaluations_the_legend_does_not_promise_them():
    """Runs without held-out prompts also have a curve."""
    assert "held-out" not in reward_svg([(1, 0.5), (2, 1.0)], [])


def test_a_curve_of_many_steps_stays_small():
    """A page of a month's run must open."""
    svg = reward_svg([(step, step % 10 / 10) for step in range(1, 100_001)], [])
    assert len(svg) < 30_000
    assert "NaN" not in reward_svg([(5, 1.0)], [(5, 1.0)]).replace("nan", "NaN")
