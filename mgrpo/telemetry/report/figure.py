"""A chart as HTML: its title, its legend, its curves as SVG, and its values for the script of the page.

`reward_svg` draws the curve of the reward as a file of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mgrpo.telemetry.recorded import Record
from mgrpo.telemetry.report.course import Course, Curve, Points, Values, evaluation_points, metric_points, window_of
from mgrpo.telemetry.report.frame import HEIGHT, UNDER_TITLE, WIDTH, Frame
from mgrpo.telemetry.report.text import text, visible

NUM_COLOURS = 8
PICTURE = (760, 260)
"""The size of a picture that is a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a chart."""

    name: str
    colour: int
    course: Course
    curve: Curve
    dots: Points = field(default_factory=list)
    """Single values beside the line, such as evaluations."""

    def xs(self) -> list[float]:
        """The x of each place: the middle of its steps."""
        return [(first + last) / 2 for first, last in self.course.places]

    def ranges(self) -> list[tuple[float, float]]:
        """Lowest and highest value of the curve, and of the dots."""
        dots = [value for _, value in self.dots]
        return [found for found in (self.curve.range(), (min(dots), max(dots)) if dots else None) if found]

    def marks(self, frame: Frame) -> list[str]:
        """A curve: its smoothed line, bold above the values, or the values alone."""
        xs, curve, colour = self.xs(), self.curve, self.colour
        found = []
        if self.course.size > 1:
            found += frame.bands(xs, curve.low, curve.high, f"band f{colour}")
        if curve.smooth:
            found += frame.lines(xs, curve.mean, f"faint s{colour}")
            found += frame.lines(xs, curve.smooth, f"line s{colour}")
        else:
            found += frame.lines(xs, curve.mean, f"line s{colour}")
        if len(self.dots) > 1 and not any(value is not None for value in curve.mean):
            found += frame.lines([step for step, _ in self.dots], [v for _, v in self.dots], f"line s{colour}")
        return found + frame.dots(self.dots, f"dot f{colour}")


class Sheet:
    """All charts of a page, which have one x axis, and their values for the script."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.charts: dict[str, Any] = {}
        self._places: dict[tuple[tuple[int, int], ...], int] = {}
        self._numbers = count(1)

    def values(self) -> dict[str, Any]:
        """The values of all charts for the script, as JSON objects."""
        return {
            "first": self.first,
            "last": self.last,
            "places": [[list(place) for place in places] for places in self._places],
            "charts": self.charts,
        }

    def figure(
        self,
        title: str,
        series: Sequence[Series],
        *,
        note: str = "",
        names: str = "",
        unit: str = "",
        may_be_log: bool = False,
        from_zero: bool = False,
        is_stacked: bool = False,
        size: tuple[int, int] = (WIDTH, HEIGHT),
    ) -> str:
        """A `<figure>`.

        Args:
            note: the meaning of the chart, in a sentence.
            names: the names of the metrics in metrics.jsonl.
            unit: "%" shows shares of 1 as percentages.
            is_stacked: draws areas on top of each other instead of lines.
        """
        borders = _stacked(series) if is_stacked else []
        frame = Frame.around(
            [found for one in series for found in one.ranges()] + [(0.0, max(border)) for border in borders],
            self.first,
            self.last,
            unit=unit,
            may_be_log=may_be_log,
            from_zero=from_zero or is_stacked,
            size=size,
        )
        drawn = areas(frame, series, borders) if is_stacked else [mark for one in series for mark in one.marks(frame)]
        number = f"c{next(self._numbers)}"
        self.charts[number] = {
            "unit": unit,
            "frame": [round(frame.left, 1), frame.right, frame.top, frame.bottom],
            "range": [frame.low, frame.high],
            "log": frame.is_log,
            "stacked": is_stacked,
            "series": [
                {
                    "name": visible(one.name),
                    "colour": one.colour,
                    "places": self._places.setdefault(tuple(one.course.places), len(self._places)),
                    "values": _short(one.curve.mean),
                    **({"smooth": _short(one.curve.smooth)} if one.curve.smooth and not is_stacked else {}),
                    **({"dots": one.dots} if one.dots else {}),
                }
                for one in series
            ],
        }
        legend = "".join(
            f"<span class='key k{one.colour}' data-name='{text(one.name)}'>{text(one.name)}</span>" for one in series
        )
        scale = " <span class='scale'>log scale</span>" if frame.is_log else ""
        return (
            f"<figure class='chart' id='{number}' tabindex='0' data-title='{text(title)} {text(names)}'>"
            f"<figcaption><b>{text(title)}</b>{scale}<code title='{text(names)}'>{text(names)}</code></figcaption>"
            f"<div class='legend'>{legend if len(series) > 1 or is_stacked else ''}<output></output></div>"
            f"{frame.svg(drawn, label=title)}"
            f"<p class='hint'>{text(note)}</p></figure>"
        )


def reward_svg(lines: Sequence[Record]) -> str:
    """The rewards of a run and of its evaluations as an SVG file, for a model card or a page.

    Args:
        lines: the lines of its metrics.jsonl; at least one has a reward.
    """
    course = Course([line for line in lines if "reward" in line])
    series = Series(name="reward", colour=0, course=course, curve=course.curve("reward"))
    dots = evaluation_points(lines, "eval/scores")
    steps = [step for place in course.places for step in place] + [step for step, _ in dots]
    ranges = [*series.ranges(), *((value, value) for _, value in dots)]
    frame = Frame.around(ranges, min(steps), max(steps), size=PICTURE, top=UNDER_TITLE)
    title = "mean reward per step"
    if series.curve.smooth:
        title += f" (thin), smoothed over {window_of(len(metric_points(course.lines, 'reward')))} steps (bold)"
    title += ", on held-out prompts (dots)" if dots else ""
    return frame.svg(
        [*series.marks(frame), *frame.dots(dots, "dot f1"), frame.title(title)], label="reward", is_file=True
    )


def areas(frame: Frame, series: Sequence[Series], borders: Sequence[Sequence[float]]) -> list[str]:
    """The areas between curves on top of each other."""
    return [
        mark
        for one, low, high in zip(series, borders, borders[1:], strict=False)
        for mark in frame.bands(one.xs(), low, high, f"area f{one.colour}")
    ]


def _stacked(series: Sequence[Series]) -> list[list[float]]:
    """Borders between curves on top of each other, from zero on; a missing value counts as zero."""
    borders = [[0.0] * len(series[0].curve.mean)]
    for one in series:
        borders.append([low + (value or 0.0) for low, value in zip(borders[-1], one.curve.mean, strict=True)])
    return borders


def _short(values: Values) -> Values:
    return [None if value is None else float(f"{value:.5g}") for value in values]
