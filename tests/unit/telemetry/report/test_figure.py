"""Charts of the page: what is drawn is what was measured, inside the picture, and small for runs of any length."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from mgrpo.telemetry.report.course import MAX_PLACES, Course
from mgrpo.telemetry.report.figure import Series, Sheet, log_ticks, number
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


def test_the_bold_line_is_the_mean_of_the_steps_before():
    """A mean that looks ahead would show learning before it happened; a schedule is not noise."""
    of = course([0.0] * 20 + [1.0] * 20)
    smooth = of.curve("m").smooth
    assert smooth[19] == 0.0 and smooth[20] == 0.25 and smooth[23] == 1.0
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
