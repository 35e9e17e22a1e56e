"""A chart as HTML: its title, its legend, its curves as SVG, and its values for the script that reads them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mgrpo.telemetry.chart import CHARACTER, Points, step_ticks, ticks
from mgrpo.telemetry.report.course import Course, Curve, Values
from mgrpo.telemetry.report.text import text, visible

WIDTH, HEIGHT = 440, 190
TOP, BOTTOM, RIGHT = 8, 22, 12
NUM_COLOURS = 8
LOG_FROM = 50.0
"""Ratio of the highest and the lowest value from which on an axis that may be logarithmic is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a chart."""

    name: str
    colour: int
    course: Course
    curve: Curve
    dots: Points = field(default_factory=list)
    """Single values beside it, such as evaluations."""

    def xs(self) -> list[float]:
        """Steps of the places."""
        return [(first + last) / 2 for first, last in self.course.places]


class Sheet:
    """All charts of a page, which have one x axis, and their values for the script."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.charts: dict[str, Any] = {}
        self._places: dict[tuple[tuple[int, int], ...], int] = {}
        self._numbers = count(1)

    def values(self) -> dict[str, Any]:
        """What the script needs, in JSON."""
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
            note: what the chart means, in a sentence.
            names: of the metrics, as they are in metrics.jsonl.
            unit: "%" shows shares of 1 as percentages; others follow the number.
            is_stacked: areas on top of each other instead of lines.
        """
        bottoms = _stacked(series) if is_stacked else []
        frame = Frame.around(
            series, self, bottoms, unit=unit, may_be_log=may_be_log, from_zero=from_zero or is_stacked, size=size
        )
        drawn = frame.areas(series, bottoms) if is_stacked else [mark for one in series for mark in frame.marks(one)]
        number = f"c{next(self._numbers)}"
        self.charts[number] = {
            "unit": unit,
            "frame": [round(frame.left, 1), frame.width - RIGHT, TOP, frame.height - BOTTOM],
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The coordinate system of a chart."""

    width: int
    height: int
    left: float
    first: int
    last: int
    low: float
    high: float
    is_log: bool
    labels: Sequence[tuple[float, str]]
    """Values with a rule, and what stands beside it."""

    @classmethod
    def around(
        cls,
        series: Sequence[Series],
        sheet: Sheet,
        bottoms: Sequence[Values],
        *,
        unit: str,
        may_be_log: bool,
        from_zero: bool,
        size: tuple[int, int],
    ) -> Frame:
        """Around everything that is drawn."""
        ranges = [found for one in series if (found := one.curve.range())]
        ranges += [(min(v), max(v)) for one in series if (v := [value for _, value in one.dots])]
        ranges += [(0.0, max(v)) for values in bottoms if (v := [value for value in values if value is not None])]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        is_log = may_be_log and low > 0 and high / low >= LOG_FROM
        if from_zero and not is_log:
            low = min(low, 0.0)
        rules = log_ticks(low, high) if is_log else ticks(low, high, most=5)
        labels = [(rule, number(rule, unit)) for rule in rules]
        return cls(
            width=size[0],
            height=size[1],
            left=10 + CHARACTER * max(len(label) for _, label in labels),
            first=sheet.first,
            last=sheet.last,
            low=rules[0],
            high=rules[-1],
            is_log=is_log,
            labels=labels,
        )

    def x(self, step: float) -> float:
        """A step's place; that of a single one is the middle."""
        span = self.last - self.first
        share = (step - self.first) / span if span else 0.5
        return self.left + share * (self.width - RIGHT - self.left)

    def y(self, value: float) -> float:
        """A value's height, from the top."""
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def marks(self, series: Series) -> list[str]:
        """A curve: its running mean bold above the values, or the values where there is none."""
        xs, curve, colour = series.xs(), series.curve, series.colour
        found = []
        if series.course.size > 1:
            found += self._bands(xs, curve.low, curve.high, f"band f{colour}")
        if curve.smooth:
            found += self._lines(xs, curve.mean, f"faint s{colour}")
            found += self._lines(xs, curve.smooth, f"line s{colour}")
        else:
            found += self._lines(xs, curve.mean, f"line s{colour}")
        if len(series.dots) > 1 and not any(value is not None for value in curve.mean):
            found += self._lines([step for step, _ in series.dots], [v for _, v in series.dots], f"line s{colour}")
        return found + [self._dot(step, value, 3.5, colour) for step, value in series.dots]

    def areas(self, series: Sequence[Series], bottoms: Sequence[Values]) -> list[str]:
        """Curves on top of each other."""
        return [
            mark
            for one, low, high in zip(series, bottoms, bottoms[1:], strict=False)
            for mark in self._bands(one.xs(), low, high, f"area f{one.colour}")
        ]

    def svg(self, content: Sequence[str], *, label: str) -> str:
        """The picture."""
        right = self.width - RIGHT
        rules = [
            f"<line class='rule' x1='{self.left:.1f}' x2='{right}' y1='{self.y(value):.1f}' y2='{self.y(value):.1f}'/>"
            f"<text x='{self.left - 6:.1f}' y='{self.y(value) + 4:.1f}' text-anchor='end'>{name}</text>"
            for value, name in self.labels
        ]
        steps = [
            f"<text x='{self.x(step):.1f}' y='{self.height - 5}' text-anchor='middle'>{'' if index else 'step '}{step}</text>"
            for index, step in enumerate(step_ticks(self.first, self.last, most=self.width // 80))
            if step == self.first or self.x(step) < self.width - CHARACTER * len(str(step)) / 2
        ]
        return (
            f"<svg viewBox='0 0 {self.width} {self.height}' role='img' aria-label='{text(label)} by step'>"
            f"{''.join(rules)}{''.join(steps)}{''.join(content)}<g class='cursor'></g></svg>"
        )

    def _lines(self, xs: Sequence[float], values: Values, style: str) -> list[str]:
        found = []
        for piece in _pieces(xs, values):
            if len(piece) == 1:
                (x, value) = piece[0]
                found.append(f"<circle class='{style}' cx='{self.x(x):.1f}' cy='{self.y(value):.1f}' r='1.2'/>")
                continue
            corners = " ".join(f"{self.x(x):.1f},{self.y(value):.1f}" for x, value in piece)
            found.append(f"<polyline class='{style}' points='{corners}'/>")
        return found

    def _bands(self, xs: Sequence[float], low: Values, high: Values, style: str) -> list[str]:
        found = []
        tops = dict(zip(xs, high, strict=True))
        for piece in _pieces(xs, low):
            upper = [(x, top) for x, _ in reversed(piece) if (top := tops[x]) is not None]
            corners = " ".join(f"{self.x(x):.1f},{self.y(value):.1f}" for x, value in [*piece, *upper])
            found.append(f"<polygon class='{style}' points='{corners}'/>")
        return found

    def _dot(self, step: float, value: float, radius: float, colour: int) -> str:
        return f"<circle class='dot f{colour}' cx='{self.x(step):.1f}' cy='{self.y(value):.1f}' r='{radius:g}'/>"


def number(value: float, unit: str = "") -> str:
    """A value of an axis in few characters."""
    if unit == "%":
        return f"{_plain(100 * value)} %"
    if abs(value) >= 1e6:
        return f"{_plain(value / 1e6)}M"
    if abs(value) >= 1e4:
        return f"{_plain(value / 1e3)}k"
    return _plain(value)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around all values, at most six."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    size = -(-(last - first) // 5)
    return [10.0**power for power in range(first, last + size, size)]


def _plain(value: float) -> str:
    # 3 * 0.1 is 0.30000000000000004, and -0.0 has a sign.
    found = f"{value:.4g}" if abs(value) > 1e-15 else "0"
    return found.replace("e-0", "e-").replace("e+0", "e")


def _pieces(xs: Sequence[float], values: Values) -> list[list[tuple[float, float]]]:
    """The values without the gaps between them; gaps of a few places are bridged, because not every step has each metric."""
    known = [(index, x, value) for index, (x, value) in enumerate(zip(xs, values, strict=True)) if value is not None]
    pieces: list[list[tuple[float, float]]] = []
    before = -math.inf
    for index, x, value in known:
        if index - before > max(3, len(xs) // 10):
            pieces.append([])
        pieces[-1].append((x, value))
        before = index
    return pieces


def _stacked(series: Sequence[Series]) -> list[Values]:
    """Borders between curves on top of each other, from zero on; a missing value counts as zero."""
    borders: list[Values] = [[0.0] * len(series[0].curve.mean)]
    for one in series:
        borders.append([(low or 0.0) + (value or 0.0) for low, value in zip(borders[-1], one.curve.mean, strict=True)])
    return borders


def _short(values: Values) -> Values:
    return [None if value is None else float(f"{value:.5g}") for value in values]
