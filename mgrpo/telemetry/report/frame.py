"""A coordinate system over training steps, and marks in it, as SVG.

Marks have classes. The style sheet of a page gives them their colours, or `STYLE` in a picture that is a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mgrpo.telemetry.report.course import Points
from mgrpo.telemetry.report.text import text

WIDTH, HEIGHT = 440, 190
TOP, BOTTOM, RIGHT = 8, 22, 12
UNDER_TITLE = 24
"""Room above a picture with a title in it."""
CHARACTER = 6.5
"""Width of a character of a label, roughly."""
LOG_FROM = 50.0
"""Ratio of the highest to the lowest value from which an axis with "log" is logarithmic."""
CURSOR = "<g class='cursor'></g>"
"""Element in which the script of a page marks the step under the pointer."""
COLOURS = ("#1f5a99", "#d9622b", "#3c8c4a", "#8a5fb0", "#b08d2f")
"""Colours of a picture; a page has its own."""
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#444}.rule{stroke:#e3e3e3}polyline{stroke-linejoin:round}.line{stroke-width:2}"
    ".faint{stroke-width:1;opacity:.45}.band{opacity:.15}"
    + "".join(f".s{n}{{fill:none;stroke:{c}}}circle.s{n},.f{n}{{fill:{c}}}" for n, c in enumerate(COLOURS))
)
"""The style sheet of a picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The coordinate system of a chart."""

    width: int
    height: int
    top: int
    left: float
    first: int
    last: int
    low: float
    high: float
    is_log: bool
    labels: Sequence[tuple[float, str]]
    """The values that have a rule, and the label of each."""

    @classmethod
    def around(
        cls,
        ranges: Sequence[tuple[float, float]],
        first: int,
        last: int,
        *,
        unit: str = "",
        may_be_log: bool = False,
        from_zero: bool = False,
        size: tuple[int, int] = (WIDTH, HEIGHT),
        top: int = TOP,
    ) -> Frame:
        """The coordinate system around everything that is drawn.

        Args:
            ranges: the lowest and the highest value of each curve; at least one.
            first, last: the ends of the x axis, in steps.
            top: room above, in pixels: `UNDER_TITLE` for a picture that has a title.
        """
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        is_log = may_be_log and low > 0 and high / low >= LOG_FROM
        if from_zero and not is_log:
            low = min(low, 0.0)
        rules = log_ticks(low, high) if is_log else ticks(low, high)
        labels = [(rule, number(rule, unit)) for rule in rules]
        return cls(
            width=size[0],
            height=size[1],
            top=top,
            left=10 + CHARACTER * max(len(label) for _, label in labels),
            first=first,
            last=last,
            low=rules[0],
            high=rules[-1],
            is_log=is_log,
            labels=labels,
        )

    @property
    def right(self) -> int:
        """The place of the last step."""
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        """The height of the lowest value, from the top."""
        return self.height - BOTTOM

    def x(self, step: float) -> float:
        """The place of a step; with a single step, the middle."""
        span = self.last - self.first
        share = (step - self.first) / span if span else 0.5
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """A value's height, from the top."""
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)

    def lines(self, xs: Sequence[float], values: Sequence[float | None], style: str) -> list[str]:
        """A line through the values, in pieces between gaps; a piece of one value is a dot.

        Args:
            style: class names.
        """
        found = []
        for piece in _pieces(xs, values):
            if len(piece) == 1:
                (x, value) = piece[0]
                found.append(f"<circle class='{style}' cx='{self.x(x):.1f}' cy='{self.y(value):.1f}' r='1.2'/>")
                continue
            corners = " ".join(f"{self.x(x):.1f},{self.y(value):.1f}" for x, value in piece)
            found.append(f"<polyline class='{style}' points='{corners}'/>")
        return found

    def bands(
        self, xs: Sequence[float], low: Sequence[float | None], high: Sequence[float | None], style: str
    ) -> list[str]:
        """The area between two lines over the same steps."""
        found = []
        tops = dict(zip(xs, high, strict=True))
        for piece in _pieces(xs, low):
            upper = [(x, top) for x, _ in reversed(piece) if (top := tops[x]) is not None]
            corners = " ".join(f"{self.x(x):.1f},{self.y(value):.1f}" for x, value in [*piece, *upper])
            found.append(f"<polygon class='{style}' points='{corners}'/>")
        return found

    def dots(self, points: Points, style: str) -> list[str]:
        """A dot for each point."""
        return [
            f"<circle class='{style}' cx='{self.x(x):.1f}' cy='{self.y(value):.1f}' r='3.5'/>" for x, value in points
        ]

    def title(self, words: str) -> str:
        """A line above the picture."""
        return f"<text x='{self.left:.1f}' y='13'>{text(words)}</text>"

    def svg(self, content: Sequence[str], *, label: str, is_file: bool = False) -> str:
        """An `<svg>` element.

        Args:
            label: a description for those who cannot see it.
            is_file: whether it is a file of its own, with colours and on white, or part of a page.
        """
        own = f" xmlns='http://www.w3.org/2000/svg' width='{self.width}' height='{self.height}'" if is_file else ""
        before = f"<style>{STYLE}</style><rect width='100%' height='100%' fill='white'/>" if is_file else ""
        after = "" if is_file else CURSOR
        rules = [
            f"<line class='rule' x1='{self.left:.1f}' x2='{self.right}' y1='{self.y(value):.1f}' y2='{self.y(value):.1f}'/>"
            f"<text x='{self.left - 6:.1f}' y='{self.y(value) + 4:.1f}' text-anchor='end'>{name}</text>"
            for value, name in self.labels
        ]
        steps = [
            f"<text x='{self.x(step):.1f}' y='{self.height - 5}' text-anchor='middle'>{'' if index else 'step '}{step}</text>"
            for index, step in enumerate(step_ticks(self.first, self.last, most=self.width // 80))
            if step == self.first or self.x(step) < self.width - CHARACTER * len(str(step)) / 2
        ]
        return (
            f"<svg{own} viewBox='0 0 {self.width} {self.height}' role='img' aria-label='{text(label)} by step'>"
            f"{before}{''.join(rules)}{''.join(steps)}{''.join(content)}{after}</svg>"
        )


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
    """The smallest number from `value` on that is 1, 2, 2.5, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around all values, at most six."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    size = -(-(last - first) // 5)
    return [10.0**power for power in range(first, last + size, size)]


def number(value: float, unit: str = "") -> str:
    """A value of an axis in few characters."""
    if unit == "%":
        return f"{_plain(100 * value)} %"
    if abs(value) >= 1e6:
        return f"{_plain(value / 1e6)}M"
    if abs(value) >= 1e4:
        return f"{_plain(value / 1e3)}k"
    return _plain(value)


def _plain(value: float) -> str:
    # 3 * 0.1 is 0.30000000000000004, and -0.0 has a sign.
    found = f"{value:.4g}" if abs(value) > 1e-15 else "0"
    return found.replace("e-0", "e-").replace("e+0", "e")


def _pieces(xs: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The values in pieces between gaps; gaps of a few places are bridged, because not every step has each metric."""
    known = [(index, x, value) for index, (x, value) in enumerate(zip(xs, values, strict=True)) if value is not None]
    pieces: list[list[tuple[float, float]]] = []
    before = -math.inf
    for index, x, value in known:
        if index - before > max(3, len(xs) // 10):
            pieces.append([])
        pieces[-1].append((x, value))
        before = index
    return pieces
