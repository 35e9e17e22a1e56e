"""The charts of a run, and of several runs in one. charts.csv lists them in their order.

The columns of charts.csv:

    group     the heading under which it stands
    title     the column `chart` of metrics.csv names it for each metric that it draws, those of evaluations as dots
    unit      "%" for shares of 1 that are shown as percentages; otherwise empty
    options   words: "log" (the axis may be logarithmic), "zero" (it begins at 0), "stacked" (areas on top of each other),
              "large" (others are as well, where that fills their row), "unsmoothed" (no smoothed line)
    compared  the metric in a comparison of runs; empty for the first metric of the chart
    note      a sentence on how to read the chart
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mgrpo.telemetry.metrics.meanings import Metric, find, metrics
from mgrpo.telemetry.report.course import Course, Curve, Points, Values, evaluation_points
from mgrpo.telemetry.report.figure import NUM_COLOURS, Series, Sheet
from mgrpo.telemetry.report.overview import START
from mgrpo.telemetry.report.run import RecordedRun
from mgrpo.telemetry.report.text import shown, text

LARGE = (660, 250)
MAX_OTHER = 80
"""The largest number of charts for metrics that no row of charts.csv draws."""
NOT_DRAWN = {"step", "policy_version", "episode", "time/unix"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A row of charts.csv; the fields are the columns above."""

    group: str
    title: str
    unit: str
    options: str
    compared: str
    note: str

    @property
    def words(self) -> list[str]:
        """The options as a list."""
        return self.options.split()

    def drawn(self, *, held_out: bool) -> list[Metric]:
        """The metrics of training steps that the chart draws, or those of evaluations."""
        return [metric for metric in metrics() if metric.chart == self.title and metric.is_held_out == held_out]


@cache
def groups() -> Mapping[str, Sequence[Chart]]:
    """The charts by heading, in their order."""
    found: dict[str, list[Chart]] = {}
    with Path(__file__).with_name("charts.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            chart = Chart(**row)
            found.setdefault(chart.group, []).append(chart)
    return found


def chart_groups(run: RecordedRun, sheet: Sheet) -> str:
    """All charts of a run; a metric that never changes is named below them instead."""
    course = Course(run.steps)
    used, constant, parts = set[str](), dict[str, float](), []
    for heading, charts in groups().items():
        figures = []
        for chart in charts:
            curves = {
                name: (metric, course.curve(metric, is_smoothed="unsmoothed" not in chart.words))
                for name, metric in _lines(chart, course)
            }
            used |= {metric for metric, _ in curves.values()}
            dots = {name: evaluation_points(run.evaluations, m) for name, m in _held_out(chart, run)}
            still = {m: only for m, curve in curves.values() if (only := _constant(curve, course)) is not None}
            has_dots = any(dots.values())
            # Lines that never change are drawn beside one that does; alone, they are listed as text.
            if not has_dots and len(still) == sum(curve.range() is not None for _, curve in curves.values()):
                constant |= still
                continue
            series = _series(course, {name: curve for name, (_, curve) in curves.items()}, dots)
            if series:
                names = " ".join(metric for metric, curve in curves.values() if curve.range() is not None)
                figures.append((chart, series, names or " ".join(m for _, m in _held_out(chart, run))))
        parts.append(_section(sheet, heading, figures))
    return "".join([*parts, _constants(constant), _others(course, sheet, used)])


def compared_charts(runs: Sequence[RecordedRun], labels: Sequence[str], sheet: Sheet) -> str:
    """The same charts with one metric each, and a line for each run."""
    courses = [Course(run.steps) for run in runs]
    parts, known = list[str](), list[list[Values]]()
    for heading, charts in groups().items():
        figures = []
        for chart in charts:
            first = next(iter(chart.drawn(held_out=False)), None)
            metric = find(chart.compared) if chart.compared else first
            dotted = next(iter(chart.drawn(held_out=True)), None)
            names = _names(courses, metric)
            for line, wanted in names.items():
                series = [
                    Series(name=label, colour=index % NUM_COLOURS, course=course, curve=curve, dots=dots)
                    for index, (run, label, course) in enumerate(zip(runs, labels, courses, strict=True))
                    for curve in [course.curve(wanted, is_smoothed="unsmoothed" not in chart.words)]
                    for dots in [evaluation_points(run.evaluations, dotted.name) if dotted else []]
                    if curve.range() or dots
                ]
                drawn = [one.curve.mean for one in series]
                # Several names of one quantity: a single verifier, and the sum of all verifiers.
                if len(names) > 1 and drawn in known:
                    continue
                known.append(drawn)
                if any(one.dots or _constant(one.curve, one.course) is None for one in series):
                    shown_as = replace(
                        chart,
                        title=f"{chart.title}: {line}" if line else chart.title,
                        note=chart.note + (f" Dots: {dotted.line}." if dotted and wanted else ""),
                        options=chart.options.replace("stacked", "zero"),
                    )
                    figures.append((shown_as, series, wanted or (dotted.name if dotted else "")))
        parts.append(_section(sheet, heading, figures))
    return "".join(parts)


def _names(courses: Iterable[Course], metric: Metric | None) -> dict[str, str]:
    """The logged names to compare runs by, by the text that stands for the braces of a pattern; "" for a plain name."""
    if metric is None or not metric.is_pattern:
        return {"": metric.name if metric else ""}
    found = {name: line for course in courses for line, name in course.matching(metric).items()}
    return {found[name]: name for name in sorted(found)}


def _lines(chart: Chart, course: Course) -> Iterable[tuple[str, str]]:
    """Name and metric of each line of training steps."""
    for metric in chart.drawn(held_out=False):
        if metric.is_pattern:
            yield from list(course.matching(metric).items())[:NUM_COLOURS]
        else:
            yield metric.line, metric.name


def _held_out(chart: Chart, run: RecordedRun) -> Iterable[tuple[str, str]]:
    """Name and metric of each line of evaluations."""
    names = {name for line in run.evaluations for name in line}
    for metric in chart.drawn(held_out=True):
        if not metric.is_pattern:
            yield metric.line, metric.name
            continue
        found = {int(match[1]): name for name in names if (match := metric.match(name))}
        # pass@1 is drawn by itself.
        yield from ((f"pass@{k}", found[k]) for k in sorted(found) if k != 1)


def _series(course: Course, curves: Mapping[str, Curve], dots: Mapping[str, Points]) -> list[Series]:
    empty: Values = [None] * len(course.places)
    nothing = Curve(mean=empty, low=empty, high=empty, smooth=[])
    wanted: dict[str, tuple[Curve, Points]] = {}
    for name, curve in curves.items():
        if curve.range() is not None and not any(curve.mean == other.mean for other, _ in wanted.values()):
            wanted[name] = (curve, [])
    wanted |= {name: (nothing, points) for name, points in dots.items() if points}
    return [
        Series(name=name, colour=number % NUM_COLOURS, course=course, curve=curve, dots=list(points))
        for number, (name, (curve, points)) in enumerate(wanted.items())
    ]


def num_large(total: int, *, least: int) -> int:
    """The number of charts, at the beginning, in rows of two, so that no row of two or three is left half empty."""
    full = [large for large in range(least, total + 1) if large % 2 == 0 and (total - large) % 3 == 0]
    return full[0] if full else total


def _section(sheet: Sheet, heading: str, figures: Sequence[tuple[Chart, Sequence[Series], str]]) -> str:
    """The charts under a heading."""
    if not figures:
        return ""
    large = num_large(len(figures), least=sum("large" in chart.words for chart, _, _ in figures))
    drawn = [_figure(sheet, *found, is_large=number < large) for number, found in enumerate(figures)]
    return f"<h3>{text(heading)}</h3><div class='charts'>{''.join(drawn)}</div>"


def _figure(sheet: Sheet, chart: Chart, series: Sequence[Series], names: str, *, is_large: bool) -> str:
    return sheet.figure(
        chart.title,
        series,
        note=chart.note,
        names=names,
        unit=chart.unit,
        may_be_log="log" in chart.words,
        from_zero="zero" in chart.words,
        is_stacked="stacked" in chart.words,
        **({"size": LARGE} if is_large else {}),
    )


def _constant(curve: Curve, course: Course) -> float | None:
    """The value of a curve of two steps or more that never changes; None for other curves."""
    found = curve.range()
    return found[0] if found and found[0] == found[1] and len(course.lines) > 1 else None


def _constants(constant: Mapping[str, float]) -> str:
    if not constant:
        return ""
    listed = ", ".join(f"<code>{text(name)}</code> {text(shown(value))}" for name, value in constant.items())
    return f"<p class='note'>The same in every step: {listed}.</p>"


def _others(course: Course, sheet: Sheet, used: set[str]) -> str:
    """Every other metric that changes, in a chart of its own."""
    few = Course(course.lines, max_places=120)
    figures, constant = list[str](), dict[str, float]()
    for name in course.names:
        if name in used | NOT_DRAWN or name.startswith(START) or len(figures) == MAX_OTHER:
            continue
        curve = few.curve(name)
        if (value := _constant(curve, few)) is not None:
            constant[name] = value
        elif curve.range() is not None:
            figures.append(sheet.figure(name, [Series(name=name, colour=0, course=few, curve=curve)], may_be_log=True))
    if not figures and not constant:
        return ""
    return (
        f"<details id='others'><summary>{len(figures) + len(constant)} other metrics</summary>"
        f"<p class='note'>docs/metrics.md says what each means.</p><div class='charts'>{''.join(figures)}</div>"
        f"{_constants(constant)}</details>"
    )
