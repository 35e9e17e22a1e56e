"""The course of metrics over the steps of a run, thinned to as many places as a chart can show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgrpo.telemetry.metrics.meanings import Metric
from mgrpo.telemetry.recorded import Record

MAX_PLACES = 300
"""Places along the x axis of a chart; each stands for one step or for several in a row."""
MIN_SMOOTHED = 20
"""The fewest values of which a smoothed line is worth drawing."""

Points = list[tuple[int, float]]
"""Pairs `(step, value)`."""
Values = list[float | None]
"""A value for each place; None: no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric: its mean at each place, its range at places of several steps, and its smoothed line."""

    mean: Values
    low: Values
    high: Values
    smooth: Values

    def range(self) -> tuple[float, float] | None:
        """The lowest and the highest drawn value; None: no values."""
        known = [value for values in (self.low, self.high) for value in values if value is not None]
        return (min(known), max(known)) if known else None

    def last(self) -> float | None:
        """The newest value."""
        return next((value for value in reversed(self.smooth or self.mean) if value is not None), None)


class Course:
    """The metrics of a run over `places`: the first and the last step of each."""

    def __init__(self, lines: Sequence[Record], max_places: int = MAX_PLACES) -> None:
        self.lines = [line for line in lines if isinstance(line.get("step"), int)]
        self.size = max(1, -(-len(self.lines) // max_places))
        starts = range(0, len(self.lines), self.size)
        chunks = [self.lines[start : start + self.size] for start in starts]
        self.places = [(chunk[0]["step"], chunk[-1]["step"]) for chunk in chunks]
        self.names = sorted({name for line in self.lines for name in line})

    def matching(self, metric: Metric) -> dict[str, str]:
        """The logged names that a row with braces describes, by the text that stands for the braces."""
        return {found[1]: name for name in self.names if (found := metric.match(name))}

    def curve(self, name: str, *, is_smoothed: bool = True) -> Curve:
        """One metric; a smoothed line only if `is_smoothed`, because the mean of a schedule is not its value."""
        known = [
            (index, float(value))
            for index, line in enumerate(self.lines)
            if isinstance(value := line.get(name), (int, float)) and not isinstance(value, bool)
        ]
        groups: list[list[float]] = [[] for _ in self.places]
        for index, value in known:
            groups[index // self.size].append(value)
        smooth: Values = []
        if is_smoothed and len(known) >= MIN_SMOOTHED:
            smooth = [None] * len(self.places)
            means = centred_mean([value for _, value in known], window_of(len(known)))
            for (index, _), mean in zip(known, means, strict=True):
                smooth[index // self.size] = mean
        return Curve(
            mean=[sum(group) / len(group) if group else None for group in groups],
            low=[min(group, default=None) for group in groups],
            high=[max(group, default=None) for group in groups],
            smooth=smooth,
        )


def evaluation_points(evaluations: Sequence[Record], name: str) -> Points:
    """A metric of evaluations; where two follow the same step, the later one."""
    return list(dict(metric_points(evaluations, name)).items())


def metric_points(lines: Iterable[Record], name: str) -> Points:
    """A metric from the lines of a metrics.jsonl; lines without a value are left out."""
    return [
        (line["step"], line[name])
        for line in lines
        if isinstance(line.get("step"), int) and isinstance(line.get(name), (int, float))
    ]


def window_of(num_values: int) -> int:
    """The number of values, odd, in each mean of a smoothed line of `num_values`, which are at least `MIN_SMOOTHED`."""
    return min(num_values // 10, 50) | 1


def centred_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the `window` values around each position, of those that exist at both ends; a trailing mean would lag."""
    half = window // 2
    around = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [sum(near) / len(near) for near in around]
