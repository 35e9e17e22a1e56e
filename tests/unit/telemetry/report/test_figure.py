"""Charts of the page: what is drawn is what was measured, inside the picture, and small for runs of any length."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.charts import num_large
from mgrpo.telemetry.report.course import MAX_PLACES, Course, centred_mean, metric_points
from mgrpo.telemetry.report.figure import PICTURE, Series, Sheet, reward_svg
from mgrpo.telemetry.report.frame import UNDER_TITLE, Frame, log_ticks, number, ticks
from tests.unit.telemetry.report.runs import step_line


def course(values, name: str = "m") -> Course:
    return Course([step_line(step, **{name: value}) for step, value in enumerate(values, 1)])


def figure(values, **settings) -> tuple[ElementTree.Element, dict]:
    of = course(values)
    sheet = Sheet(1, len(values))
    html = sheet.figure("title", [Series(name="m", colour=0, course=of, curve=of.curve("m"))], **settings)
    return ElementTree.fromstring(re.search("<svg.*</svg>", html)[0]), sheet.charts["c1"]


def test_a_short_run_is_drawn_step_by_step():
    """A value that is missing is missing, and not the one before it."""
    curve = course([1.0, None, 3.0]).curve("m")
    assert curve.mean == curve.low == curve.high == [1.0, None, 3.0] and curve.smooth == []


def test_a_long_run_keeps_means_and_extremes():
    """A spike of one step is the news; thinned by its mean alone, it would be gone."""
    values = [1.0] * 3000
    values[1234] = 500.0
    of = course(values)
    curve = of.curve("m")
    assert len(of.places) == len(curve.mean) == MAX_PLACES and of.places[0] == (1, 10) and of.places[-1] == (2991, 3000)
    assert max(curve.high) == 500.0 and curve.mean[123] == pytest.approx((9 + 500) / 10)
    assert curve.low == [1.0] * MAX_PLACES


def test_the_bold_line_is_the_mean_of_the_steps_around():
    """A mean of the steps before lags behind what it shows; a schedule is not noise."""
    of = course([0.0] * 20 + [1.0] * 20)
    smooth = of.curve("m").smooth
    # Five steps each.
    assert smooth[16:24] == [0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert of.curve("m", is_smoothed=False).smooth == []


@pytest.mark.parametrize(
    "values",
    [[-0.14472, -0.09648], [0.0, 0.0], [1e-7], [-2e12, 3.0], [1e-9, 1e3], [123456.0, 99.0] * 50, [0.5] * 1000],
)
@pytest.mark.parametrize("settings", [{}, {"unit": "%"}, {"may_be_log": True}, {"from_zero": True}])
def test_labels_and_lines_are_inside_the_picture(values, settings):
    """Of a negative label the sign was cut off."""
    root, _ = figure(values, **settings)
    width, height = (float(side) for side in root.attrib["viewBox"].split()[2:])
    labels = [node for node in root.iter() if node.attrib.get("text-anchor") == "end"]
    assert len(labels) >= 2 and all(float(n.attrib["x"]) - 6.5 * len(n.text or "") >= 0 for n in labels)
    assert len({n.text for n in labels}) == len(labels)
    places = [corner.split(",") for n in root.iter() for corner in n.attrib.get("points", "").split()]
    places += [[n.attrib["cx"], n.attrib["cy"]] for n in root.iter() if "cx" in n.attrib]
    assert places and all(0 < float(x) < width and 0 < float(y) < height for x, y in places)


def test_areas_lie_on_top_of_each_other():
    """The upper edge of the last phase is the time of the step."""
    of = Course([step_line(step, a=1.0, b=None if step == 2 else 3.0) for step in (1, 2, 3)])
    series = [Series(name=name, colour=n, course=of, curve=of.curve(name)) for n, name in enumerate("ab")]
    sheet = Sheet(1, 3)
    root = ElementTree.fromstring(re.search("<svg.*</svg>", sheet.figure("t", series, is_stacked=True))[0])
    left, right, top, bottom = sheet.charts["c1"]["frame"]
    assert sheet.charts["c1"]["range"] == [0, 4]
    lower, upper = (
        [tuple(map(float, corner.split(","))) for corner in n.attrib["points"].split()]
        for n in root.iter()
        if "points" in n.attrib
    )
    heights = [bottom - value / 4 * (bottom - top) for value in (0, 0, 0, 1, 1, 1)]
    assert [y for _, y in lower] == pytest.approx(heights, abs=0.1)
    assert [y for _, y in upper][:3] == pytest.approx(heights[3:], abs=0.1)
    assert [y for _, y in upper][3:] == pytest.approx([top, bottom - (bottom - top) / 4, top], abs=0.1)
    assert [x for x, _ in lower][:3] == pytest.approx([left, (left + right) / 2, right], abs=0.1)


def test_an_axis_over_decades_is_logarithmic_where_it_may_be():
    """A spike of a gradient norm would press everything else into a line at the bottom."""
    for settings, is_log in (({"may_be_log": True}, True), ({}, False)):
        root, chart = figure([0.1, 1.0, 10.0], **settings)
        assert chart["log"] is is_log
    assert not figure([0.0, 100.0], may_be_log=True)[1]["log"]
    assert not figure([1.0, 10.0], may_be_log=True)[1]["log"]
    root, _ = figure([0.1, 1.0, 10.0], may_be_log=True)
    (line,) = [n.attrib["points"] for n in root.iter() if "points" in n.attrib]
    (_, low), (_, middle), (_, high) = (map(float, corner.split(",")) for corner in line.split())
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert log_ticks(0.02, 3000.0) == pytest.approx([0.01, 0.1, 1, 10, 100, 1000, 10000][::2])
    assert log_ticks(1.0, 100.0) == [1, 10, 100]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.25, "%", "25 %"),
        (0.30000000000000004, "", "0.3"),
        (15000.0, "", "15k"),
        (2.5e6, "", "2.5M"),
        (1e-5, "", "1e-5"),
        (-0.0, "", "0"),
    ],
)
def test_numbers_of_an_axis_are_short(value, unit, expected):
    assert number(value, unit) == expected


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


def test_no_row_of_charts_has_an_empty_place():
    """Two and three charts fill a row; a page with holes in it looks as if charts were missing."""
    assert [num_large(total, least=2) for total in range(2, 10)] == [2, 3, 4, 2, 6, 4, 2, 6]
    assert [num_large(total, least=0) for total in range(1, 10)] == [1, 2, 0, 4, 2, 0, 4, 2, 0]


def test_the_centred_mean_is_of_the_values_that_exist():
    """Both ends of a run have fewer values around them."""
    assert centred_mean([0.0, 3.0, 6.0, 3.0], 3) == [1.5, 3.0, 4.0, 4.5]
    assert centred_mean([3.0], 5) == [3.0]


def reward_lines(rewards, evaluations=()) -> list[dict]:
    """Lines of a metrics.jsonl."""
    return [{"step": step, "reward": value} for step, value in rewards] + [
        {"step": step, "eval/scores": value} for step, value in evaluations
    ]


def test_the_curve_of_the_reward_is_a_picture_of_its_own():
    """Viewers of SVG files are stricter than browsers: one namespaced XML element, with both lines and every evaluation."""
    lines = reward_lines([(step, step / 60) for step in range(1, 61)], [(0, 0.5), (60, 1.0)])
    root = ElementTree.fromstring(reward_svg(lines))
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    # Its colours are in it: nothing around a file has a style sheet for it.
    style = root.find(f"{namespace}style").text
    drawn = [name for node in root.iter() if node.tag != f"{namespace}text" for name in node.get("class", "").split()]
    assert {"faint", "line", "s0", "f1", "rule"} <= {*drawn} and all(
        f".{name}{{" in style for name in {*drawn} - {"dot"}
    )
    thin, bold = root.findall(f"{namespace}polyline")
    assert (thin.get("class"), bold.get("class")) == ("faint s0", "line s0")
    # From the left edge of the frame to its right edge; the mean of 7 steps, of which 4 exist at the end, is 58.5 / 60.
    frame = Frame.around([(0.0, 1.0)], 0, 60, size=PICTURE, top=UNDER_TITLE)
    for line in (thin, bold):
        xs = [float(point.split(",")[0]) for point in line.attrib["points"].split()]
        assert xs[0] == pytest.approx(frame.x(1), abs=0.1) and xs[-1] == frame.right
    assert [float(dot.attrib["cx"]) for dot in root.findall(f"{namespace}circle")] == [
        round(frame.left, 1),
        frame.right,
    ]
    top, bottom = float(thin.attrib["points"].split(",")[-1]), float(bold.attrib["points"].split(",")[-1])
    assert top == frame.top
    assert bottom == pytest.approx(frame.top + (frame.bottom - frame.top) * (1 - 58.5 / 60), abs=0.1)
    assert "smoothed over 7 steps (bold), on held-out prompts (dots)" in "".join(root.itertext())


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
def test_labels_and_lines_are_inside_the_file(points):
    """Of a negative label the sign was cut off; a single step had no mark at all."""
    for svg in (reward_svg(reward_lines(points)), reward_svg(reward_lines(points, points))):
        root = ElementTree.fromstring(svg)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        labels = [node for node in root.iter() if node.attrib.get("text-anchor") == "end"]
        assert labels and all(float(n.attrib["x"]) - 6.5 * len(n.text or "") >= 0 for n in labels)
        places = [corner.split(",") for n in root.iter() for corner in n.attrib.get("points", "").split()]
        places += [[n.attrib["cx"], n.attrib["cy"]] for n in root.iter() if "cx" in n.attrib]
        assert places and all(0 < float(x) < width and 10 < float(y) < height - 10 for x, y in places)
        steps = [n.text.removeprefix("step ") for n in root.iter() if n.attrib.get("text-anchor") == "middle"]
        assert steps[0] == str(points[0][0]) and all(step.isdigit() for step in steps)


def test_the_title_promises_what_is_there():
    """Runs without held-out prompts, and those of a few steps, also have a curve."""
    svg = reward_svg(reward_lines([(1, 0.5), (2, 1.0)]))
    assert "mean reward per step<" in svg and "NaN" not in reward_svg(reward_lines([(5, 1.0)], [(5, 1.0)])).replace(
        "nan", "NaN"
    )


def test_a_curve_of_many_steps_stays_small():
    """A page of a month's run must open."""
    assert len(reward_svg(reward_lines((step, step % 10 / 10) for step in range(1, 100_001)))) < 30_000
