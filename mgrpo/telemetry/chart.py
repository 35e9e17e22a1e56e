"""Curves over training steps as SVG pictures of their own, and what the charts of `report.html` share with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mgrpo.telemetry.samples import Record

Points = list[tuple[int, float]]
"""`(step, value)`."""

WIDTH, HEIGHT = 760, 260
TOP, BOTTOM, RIGHT = 24, 24, 16
CHARACTER = 6.5
"""Width of a character of a label, roughly."""
MAX_POINTS = 400
COLOURS = ("#1f5a99", "#d9622b", "#3c8c4a", "#8a5fb0", "#b08d2f")
THIN = "#8fb8de"


def metric_points(lines: Iterable[Record], name: str) -> Points:
    """One metric of the lines of a metrics.jsonl; lines without a value are left out."""
    return [
        (line["step"], line[name])
        for line in lines
        if isinstance(line.get("step"), int) and isinstance(line.get(name), (int, float))
    ]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position, of fewer at the start."""
    return [sum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]


def reward_svg(rewards: Points, evaluations: Points) -> str:
    """Mean reward per step (thin), its running mean (bold) and held-out evaluations (dots) as one `<svg>` element."""
    window = max(2, min(len(rewards) // 10, 50))
    means = running_mean([value for _, value in rewards], window)
    frame = Frame([*rewards, *evaluations], WIDTH, HEIGHT)
    bold = [(step, mean) for (step, _), mean in zip(rewards, means, strict=True)]
    dots = ", on held-out prompts (dots)" if evaluations else ""
    return frame.svg(
        [
            frame.line(rewards, THIN, 1),
            frame.line(bold, COLOURS[0], 2.4),
            *(frame.dot(point, 4, COLOURS[1]) for point in evaluations),
            _label(frame.left, 13, "start", f"mean reward per step (thin), of the last {window} steps (bold){dots}"),
        ]
    )


class Frame:
    """A coordinate system around some points, with its ticks."""

    def __init__(self, points: Points, width: int, height: int) -> None:
        """
        Args:
            points: all that will be drawn, at least one.
        """
        steps, values = zip(*points, strict=True)
        self.width, self.height = width, height
        self.first, self.last = min(steps), max(steps)
        self.ticks = ticks(min(values), max(values))
        self.left = 12 + CHARACTER * max(len(_number(tick)) for tick in self.ticks)

    def x(self, step: float) -> float:
        """A step's place; that of a single one is the middle."""
        span = self.last - self.first
        share = (step - self.first) / span if span else 0.5
        return self.left + share * (self.width - RIGHT - self.left)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def line(self, points: Points, colour: str, width: float) -> str:
        """A line through the points; a dot for one alone, which has no line."""
        if len(points) == 1:
            return self.dot(points[0], 1.5 + width / 2, colour)
        corners = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in _thinned(points))
        return f"<polyline fill='none' stroke='{colour}' stroke-width='{width}' points='{corners}'/>"

    def band(self, low: Points, high: Points, colour: str) -> str:
        """The area between two lines over the same steps, so light that others show through."""
        border = [*_thinned(low), *reversed(_thinned(high))]
        corners = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in border)
        return f"<polygon fill='{colour}' fill-opacity='0.15' points='{corners}'/>"

    def dot(self, point: tuple[int, float], radius: float, colour: str) -> str:
        return f"<circle cx='{self.x(point[0]):.1f}' cy='{self.y(point[1]):.1f}' r='{radius:g}' fill='{colour}'/>"

    def svg(self, content: Sequence[str]) -> str:
        """The whole picture."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' width='{self.width}' "
            f"height='{self.height}' role='img' font-family='system-ui, sans-serif' font-size='11' fill='#444'>"
        )
        rules = [
            f"<line x1='{self.left:.1f}' x2='{self.width - RIGHT}' y1='{self.y(tick):.1f}' y2='{self.y(tick):.1f}' "
            f"stroke='#e3e3e3'/>{_label(self.left - 6, self.y(tick) + 4, 'end', _number(tick))}"
            for tick in self.ticks
        ]
        steps = [
            _label(self.x(step), self.height - 6, "middle", f"step {step}" if number == 0 else str(step))
            for number, step in enumerate(step_ticks(self.first, self.last, most=self.width // 90))
        ]
        return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *rules, *steps, *content, "</svg>"])


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers, evenly spaced, the first not above `low` and the last not below `high`; at least two."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        around = abs(low) / 2 or 1.0
        low, high = low - around, high + around
    size = _round_up((high - low) / (most - 1))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [number * size for number in range(first, last + 1)]


def step_ticks(first: int, last: int, most: int) -> list[int]:
    """Whole steps: the first, then multiples of a round number."""
    size = max(1, int(_round_up((last - first) / most))) if last > first else 1
    return [first, *(step for step in range(size * (first // size + 1), last + 1, size) if step - first >= size / 2)]


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    # 3 * 0.1 is 0.30000000000000004, and -0.0 has a sign.
    return f"{value:.6g}" if abs(value) > 1e-15 else "0"


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{text}</text>"


def _thinned(points: Points) -> Points:
    """At most `MAX_POINTS`, each the mean of its neighbours."""
    size = -(-len(points) // MAX_POINTS)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[0][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]
