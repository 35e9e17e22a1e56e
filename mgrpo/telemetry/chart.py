"""The reward curve as SVG: in `report.html`, and as a picture of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mgrpo.telemetry.samples import Record

Points = list[tuple[int, float]]
"""`(step, value)`."""

WIDTH, HEIGHT, MARGIN = 760, 260, 44
MAX_POINTS = 400


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
    steps, values = zip(*rewards, *evaluations, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)

    def x(step: float) -> float:
        return MARGIN + (step - first) / ((last - first) or 1) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN / 2 - (value - low) / ((high - low) or 1) * (HEIGHT - MARGIN)

    def line(points: Points, style: str) -> str:
        corners = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in _thinned(points))
        return f"<polyline fill='none' {style} points='{corners}'/>"

    ticks = [low + (high - low) * part / 4 for part in range(5)]
    bold = [(step, mean) for (step, _), mean in zip(rewards, means, strict=True)]
    dots = ", on held-out prompts (dots)" if evaluations else ""
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
            "role='img' font-family='system-ui, sans-serif' font-size='11' fill='#444'>",
            "<rect width='100%' height='100%' fill='white'/>",
            *(
                f"<line x1='{MARGIN}' x2='{WIDTH - MARGIN}' y1='{y(tick):.1f}' y2='{y(tick):.1f}' stroke='#e3e3e3'/>"
                + _label(MARGIN - 6, y(tick) + 4, "end", f"{tick:.3g}")
                for tick in ticks
            ),
            _label(x(first), HEIGHT - 4, "start", f"step {first}"),
            _label(x(last), HEIGHT - 4, "end", f"step {last}"),
            line(rewards, "stroke='#8fb8de' stroke-width='1'"),
            line(bold, "stroke='#1f5a99' stroke-width='2.4'"),
            *(f"<circle cx='{x(step):.1f}' cy='{y(value):.1f}' r='4' fill='#d9622b'/>" for step, value in evaluations),
            _label(MARGIN, 13, "start", f"mean reward per step (thin), of the last {window} steps (bold){dots}"),
            "</svg>",
        ]
    )


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{text}</text>"


def _thinned(points: Points) -> Points:
    """At most `MAX_POINTS`, each the mean of its neighbours."""
    size = -(-len(points) // MAX_POINTS)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[0][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]
