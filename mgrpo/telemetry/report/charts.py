"""The charts of a run, and of several runs in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mgrpo.telemetry.chart import Points
from mgrpo.telemetry.report.catalog import GROUPS, Chart
from mgrpo.telemetry.report.course import Course, Curve, Values, evaluation_points
from mgrpo.telemetry.report.figure import NUM_COLOURS, Series, Sheet
from mgrpo.telemetry.report.run import RecordedRun
from mgrpo.telemetry.report.text import shown, text

LARGE = (660, 250)
MAX_OTHER = 80
"""Charts of metrics that no other chart shows."""
NOT_DRAWN = {"step", "policy_version", "episode", "time/unix"}


def chart_groups(run: RecordedRun, sheet: Sheet) -> str:
    """All charts of a run; a metric that never changes is named below them instead."""
    course = Course(run.steps)
    used, constant, parts = set[str](), dict[str, float](), []
    for heading, charts in GROUPS.items():
        figures = []
        for chart in charts:
            curves = {
                name: (metric, course.curve(metric, is_smoothed=chart.is_smoothed))
                for name, metric in _expanded(chart.metrics, course)
            }
            used |= {metric for metric, _ in curves.values()}
            dots = {name: evaluation_points(run.evaluations, m) for name, m in _held_out(chart, run)}
            still = {m: only for m, curve in curves.values() if (only := _constant(curve, course)) is not None}
            has_dots = any(dots.values())
            # A line that moves shows the ones that do not; alone, they are better read than seen.
            if not has_dots and len(still) == sum(curve.range() is not None for _, curve in curves.values()):
                constant |= still
                continue
            series = _series(course, {name: curve for name, (_, curve) in curves.items()}, dots)
            if series:
                names = " ".join(metric for metric, curve in curves.values() if curve.range() is not None)
                figures.append(_figure(sheet, chart, series, names or " ".join(m for _, m in _held_out(chart, run))))
        if figures:
            parts.append(f"<h3>{text(heading)}</h3><div class='charts'>{''.join(figures)}</div>")
    return "".join([*parts, _constants(constant), _others(course, sheet, used)])


def compared_charts(runs: Sequence[RecordedRun], labels: Sequence[str], sheet: Sheet) -> str:
    """The same charts with the leading metric of each, one line per run."""
    courses = [Course(run.steps) for run in runs]
    parts, known = list[str](), list[list[Values]]()
    for heading, charts in GROUPS.items():
        figures = []
        for chart in charts:
            metric = chart.lead or next(iter(chart.metrics.values()), "")
            name, held_out = next(iter(chart.held_out.items()), ("", ""))
            names = _names(courses, metric)
            for wanted in names:
                series = [
                    Series(name=label, colour=index % NUM_COLOURS, course=course, curve=curve, dots=dots)
                    for index, (run, label, course) in enumerate(zip(runs, labels, courses, strict=True))
                    for curve in [course.curve(wanted, is_smoothed=chart.is_smoothed)]
                    for dots in [evaluation_points(run.evaluations, held_out)]
                    if curve.range() or dots
                ]
                drawn = [one.curve.mean for one in series]
                # Several names of one quantity: a single verifier, and the sum of all verifiers.
                if len(names) > 1 and drawn in known:
                    continue
                known.append(drawn)
                if any(one.dots or _constant(one.curve, one.course) is None for one in series):
                    shown_as = Chart(
                        title=chart.title if not metric.count("*") else f"{chart.title}: {_stars(metric, wanted)}",
                        metrics={},
                        note=chart.note + (f" Dots: {name}." if held_out and wanted else ""),
                        unit=chart.unit,
                        may_be_log=chart.may_be_log,
                        from_zero=chart.from_zero or chart.is_stacked,
                        is_large=chart.is_large,
                    )
                    figures.append(_figure(sheet, shown_as, series, wanted or held_out))
        if figures:
            parts.append(f"<h3>{text(heading)}</h3><div class='charts'>{''.join(figures)}</div>")
    return "".join(parts)


def _names(courses: Iterable[Course], metric: str) -> list[str]:
    if "*" not in metric:
        return [metric]
    return sorted({name for course in courses for name in course.matching(metric).values()})


def _stars(pattern: str, name: str) -> str:
    before, after = pattern.split("*")
    return name.removeprefix(before).removesuffix(after)


def _expanded(metrics: Mapping[str, str], course: Course) -> Iterable[tuple[str, str]]:
    for name, metric in metrics.items():
        if "*" in metric:
            yield from list(course.matching(metric).items())[:NUM_COLOURS]
        else:
            yield name, metric


def _held_out(chart: Chart, run: RecordedRun) -> Iterable[tuple[str, str]]:
    names = {name for line in run.evaluations for name in line}
    for name, metric in chart.held_out.items():
        before, star, after = metric.partition("*")
        if not star:
            yield name, metric
            continue
        found = [m.removeprefix(before) for m in names if m.startswith(before) and m.removeprefix(before).isdigit()]
        # pass@1 is drawn by itself.
        yield from ((f"pass@{k}", f"{before}{k}{after}") for k in sorted(found, key=int) if k != "1")


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


def _figure(sheet: Sheet, chart: Chart, series: Sequence[Series], names: str) -> str:
    return sheet.figure(
        chart.title,
        series,
        note=chart.note,
        names=names,
        unit=chart.unit,
        may_be_log=chart.may_be_log,
        from_zero=chart.from_zero,
        is_stacked=chart.is_stacked,
        **({"size": LARGE} if chart.is_large else {}),
    )


def _constant(curve: Curve, course: Course) -> float | None:
    """The value of a curve that never changes over two steps or more."""
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
        if name in used | NOT_DRAWN or len(figures) == MAX_OTHER:
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
