"""Progress of a run: the parts of its start, a live panel on a terminal or a dozen lines in a log, and a summary at the end.

Only rank 0 reports. Metrics are plain dicts, and any of them may be missing. There is no thread: `update` redraws the
panel a few times per second at most, so that its cost is negligible even for steps of milliseconds.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Metrics = Mapping[str, float]

PHASES = ("generate", "score", "teach", "train", "drain", "sync")
"""Phases of a step, in order; a run shows those in its metrics."""
EVALUATE = "evaluate"
LINES_PER_RUN = 12
LOG_COLUMNS = 140
REDRAW_EVERY_S = 0.25
MAX_QUIET_S = 300.0
"""Seconds after which a log gets a line even if none is due, so that a run with long steps does not seem to hang."""
BARS = " ▁▂▃▄▅▆▇█"


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(slots=True, kw_only=True)
class StartUp:
    """Prints a line for each part of a start, with the seconds since it began, and adds up the seconds of its phases.

    A phase ends when another begins, so that together they make up the start; concurrent work counts only while a phase waits for it.
    """

    clock: Callable[[], float] = time.monotonic
    write: Callable[[str], None] = _print
    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each finished phase, in order."""
    _phase: str = "checks"
    _since: float | None = None

    def say(self, what: str, phase: str) -> None:
        """Print the part of the start that begins now, in `phase`."""
        self.write(f"[{self.enter(phase):4.0f} s] {what}")

    def enter(self, phase: str) -> float:
        """Begin a phase without a line; returns the seconds since the start."""
        now = self.clock()
        since = self.began if self._since is None else self._since
        if now > since:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - since
        self._phase, self._since = phase, now
        return now - self.began

    def sampled(self) -> None:
        """Record an answer of an engine. The first one after `enter("sample")` ends the start and prints its phases."""
        if self._phase == "sample":
            whole = self.enter("")
            parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
            self.write(f"[{whole:4.0f} s] first sample; the start by phase (s): {parts}")


class Progress:
    """Reports training steps; also a context manager that restores the terminal.

    Args:
        console: a rich Console; by default standard output, with the live panel only on a terminal.
        highest: the reward of a right answer, printed with every reward unless it is 1; 0 where there is none.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        highest: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = History(total_steps, clock, highest=highest)
        self._out = console.file if console is not None else sys.stdout
        screen = console if console is not None else terminal()
        has_panel = screen is not None and screen.is_terminal and not screen.is_dumb_terminal
        self._screen = screen if has_panel else None
        self._live: Live | None = None
        self._drawn_at = self._printed_at = -float("inf")

    def update(self, step: int, metrics: Metrics) -> None:
        """Report that `step` is done; the first one is 1."""
        history = self.history
        history.add(step, metrics)
        now = history.clock()
        is_last = step >= history.total_steps
        if self._screen is not None:
            if is_last or now - self._drawn_at >= REDRAW_EVERY_S:
                self._draw(self._screen)
                self._drawn_at = now
            return
        is_due = step == 1 or step % max(1, history.total_steps // LINES_PER_RUN) == 0
        if is_last or is_due or now - self._printed_at >= MAX_QUIET_S:
            self.say(step_line(history))
            self._printed_at = now

    def evaluation(self, metrics: Metrics, *, when: str, seconds: float = 0.0, before: Metrics | None = None) -> None:
        """Report an evaluation, for example `when="before training"`; with `before`, also the change since then."""
        self.history.seconds[EVALUATE] += seconds
        self.say(evaluation_line(metrics, when=when, before=before, highest=self.history.highest))

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """Print a line of text, above the panel if there is one."""
        if self._screen is not None:
            self._screen.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            # A log whose encoding lacks bars gets question marks: progress must never end a run.
            encoding = getattr(self._out, "encoding", None) or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), file=self._out, flush=True)

    def show(self, make: Callable[[int], RenderableType]) -> None:
        """Print the result of `make` for a number of columns, above the panel if there is one; plain in a log."""
        from rich.console import Console

        screen = self._screen
        if screen is None:
            # A log is as wide as its reader likes: not rich's 80 columns.
            width = int(os.environ.get("COLUMNS", "") or LOG_COLUMNS)
            screen = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, emoji=False)
        screen.print(make(screen.width))
        if isinstance(screen.file, io.StringIO):
            self.say("\n".join(map(str.rstrip, screen.file.getvalue().splitlines())))

    def finish(self, *, before: Metrics | None = None, after: Metrics | None = None) -> None:
        """Close the panel and print the summary; `before`, `after`: metrics of the evaluations, if any."""
        self.close()
        self.say("\n".join(["", *summary_lines(self.history, before=before, after=after)]))

    def close(self) -> None:
        """Restore the terminal; a second call does nothing."""
        if self._live is not None:
            self._live.update(panel(self.history), refresh=True)
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, screen: Console) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=screen, auto_refresh=False)
            self._live.start()
        self._live.update(panel(self.history), refresh=True)


def terminal() -> Console | None:
    """A console where standard output is a terminal and rich is installed."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


class History:
    """Totals over the steps so far."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic, *, highest: float = 0.0) -> None:
        self.total_steps, self.highest = total_steps, highest
        self.clock = clock
        self.started_at = clock()
        self.step = 0
        self.num_added = 0
        self.latest: dict[str, float] = {}
        self.rewards: list[float] = []
        self.seconds = dict.fromkeys((*PHASES, EVALUATE), 0.0)
        self._first: tuple[int, float] | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        """Add one step."""
        self.step, self.latest = step, dict(metrics)
        self.num_added += 1
        if self._first is None:
            self._first = (step, self.clock())
        reward = metrics.get("reward")
        if reward is not None and reward == reward:
            self.rewards.append(float(reward))
        for phase, seconds in _phases(metrics):
            self.seconds[phase] += seconds

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started_at

    def remaining_s(self) -> float | None:
        """Seconds left at the pace so far, evaluations included; None before the first step."""
        if self._first is None:
            return None
        first_step, first_at = self._first
        if self.step > first_step:
            pace = (self.clock() - first_at) / (self.step - first_step)
        else:
            pace = self.latest.get("time/total") or 0.0
        return pace * (self.total_steps - self.step) if pace else None

    def reward_ends(self) -> tuple[float, float, int] | None:
        """Mean reward of the first and of the last steps, and their number: a tenth of the run, at most 10."""
        if not self.rewards:
            return None
        count = max(1, min(10, len(self.rewards) // 10))
        return sum(self.rewards[:count]) / count, sum(self.rewards[-count:]) / count, count


def step_line(history: History) -> str:
    """The latest step as one line of a log."""
    latest = history.latest
    width = len(str(history.total_steps))
    parts = [
        f"step {history.step:>{width}}/{history.total_steps}",
        _named("reward", latest.get("reward"), "{:6.3f}" + _of(history.highest)),
        _named("kl", latest.get("objective/kl2_avg"), "{:.4f}"),
        _named("entropy", latest.get("policy/entropy_avg"), "{:.2f}"),
        _step_time(latest),
        _named("tok/s", latest.get("time/actor_tokens_per_second"), "{:,.0f}"),
    ]
    remaining = history.remaining_s()
    if remaining is not None and history.step < history.total_steps:
        parts.append(f"left {clock_text(remaining)}")
    return "  ".join(part for part in parts if part)


def _named(name: str, value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{name} {form.format(value)}" if value == value else f"{name} none"


def _step_time(latest: Metrics) -> str:
    if latest.get("time/total") is None:
        return ""
    split = [f"{phase} {seconds:.1f}" for phase, seconds in _phases(latest)]
    return f"{latest['time/total']:.1f} s" + (f" ({', '.join(split)})" if split else "")


def _phases(latest: Metrics) -> list[tuple[str, float]]:
    return [(phase, seconds) for phase in PHASES if (seconds := latest.get(f"time/{phase}")) is not None]


def _of(highest: float) -> str:
    """The highest reward, as the end of a phrase: 3.125 means little where a right answer earns 10."""
    return f" of {highest:g}" if highest not in (0, 1) else ""


def evaluation_line(metrics: Metrics, *, when: str, before: Metrics | None = None, highest: float = 0.0) -> str:
    """An evaluation as one line."""
    parts = []
    accuracy, reward = metrics.get("eval/pass_at_1"), metrics.get("eval/scores")
    if accuracy is not None:
        earlier = (before or {}).get("eval/pass_at_1")
        change = "" if earlier is None else f" ({100 * (accuracy - earlier):+.1f} points)"
        parts.append(f"accuracy {100 * accuracy:.1f} %{change}")
    if reward is not None:
        parts.append(f"mean reward {reward:.3f}{_of(highest)}")
    return f"evaluation {when}: {', '.join(parts) or 'no result'}"


def summary_lines(history: History, *, before: Metrics | None = None, after: Metrics | None = None) -> list[str]:
    """The end of a run: evaluations and rewards at its two ends, and the time per phase."""
    rows: list[tuple[str, str, str]] = []
    evaluated = [before or {}, after or {}]
    for what, metric, shown in (
        ("accuracy", "eval/pass_at_1", lambda share: f"{100 * share:.1f} %"),
        ("reward", "eval/scores", "{:.3f}".format),
    ):
        found = ["-" if (value := metrics.get(metric)) is None else shown(value) for metrics in evaluated]
        # If answers are right or wrong, the accuracy replaces the reward.
        if not rows and set(found) != {"-"}:
            rows.append((f"held-out {what}", found[0], found[1]))
    note = ""
    ends = history.reward_ends()
    if ends is not None:
        rows.append(("training reward", f"{ends[0]:.3f}", f"{ends[1]:.3f}"))
        remarks = [f"mean of {ends[2]} steps"] if ends[2] > 1 else []
        remarks += [f"a right answer has {history.highest:g}"] if _of(history.highest) else []
        note = f"   ({'; '.join(remarks)})" if remarks else ""
    lines = [f"{'':20}{'start':>10}{'end':>10}"] if rows else []
    lines += [f"{name:20}{one:>10}{other:>10}" for name, one, other in rows]
    if rows and note:
        lines[-1] += note
    return [*lines, *_time_lines(history)]


def _time_lines(history: History) -> list[str]:
    """Total time, and a bar per phase: its seconds over all steps and its share of the whole run."""
    total = history.elapsed_s()
    # A run that continues another has fewer of its own.
    count = "" if history.num_added == history.step else f"{history.num_added} of "
    lines = ["", f"{count}{history.step} {'step' if history.step == 1 else 'steps'} in {clock_text(total)}"]
    phases = {phase: seconds for phase, seconds in history.seconds.items() if seconds}
    if not phases:
        return lines
    # Phases that overlap add up to more than the elapsed time.
    whole = max(total, sum(phases.values()))
    phases["other"] = whole - sum(phases.values())
    for phase, seconds in phases.items():
        share = seconds / whole
        bar = "█" * round(24 * share)
        lines.append(f"  {phase:10}{seconds:9.1f} s{100 * share:5.0f} %  {bar}".rstrip())
    return lines


def clock_text(seconds: float) -> str:
    """`75` as `1:15`, `3700` as `1:01:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float], width: int) -> str:
    """`values` in `width` characters: each the mean of an equal share, scaled from the lowest to the highest mean."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * edge // width for edge in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[1 + round((mean - low) / span * (len(BARS) - 2))] for mean in means)


def panel(history: History) -> RenderableType:
    """The live view on a terminal."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    latest, step, total = history.latest, history.step, history.total_steps
    remaining = history.remaining_s()
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {step}/{total}", style="bold"),
        ProgressBar(total=max(1, total), completed=step, width=32),
        Text(f"{clock_text(history.elapsed_s())} so far", style="dim"),
        Text("" if remaining is None or step >= total else f"{clock_text(remaining)} left", style="dim"),
    )
    reward = Text.assemble(
        ("reward ", "dim"), (_formatted(latest.get("reward"), "{:.3f}" + _of(history.highest)), "bold green")
    )
    if len(history.rewards) > 1:
        reward.append(f"   {history.rewards[0]:.2f} ", style="dim")
        reward.append(sparkline(history.rewards, 40), style="green")
        reward.append(f" {history.rewards[-1]:.2f}", style="dim")
    numbers = _row(
        ("KL", _formatted(latest.get("objective/kl2_avg"), "{:.4f}")),
        ("entropy", _formatted(latest.get("policy/entropy_avg"), "{:.2f}")),
        ("clipped", _formatted(latest.get("policy/clipfrac_avg"), "{:.1%}")),
        ("length", _formatted(latest.get("val/sequence_lengths"), "{:.0f}")),
        ("grad norm", _formatted(latest.get("optim/grad_norm"), "{:.2f}")),
    )
    seconds = _row(
        ("step", _formatted(latest.get("time/total"), "{:.2f} s")),
        *((phase, f"{seconds:.2f}") for phase, seconds in _phases(latest)),
        ("tokens/s", _formatted(latest.get("time/actor_tokens_per_second"), "{:,.0f}")),
    )
    return Panel(
        Group(head, reward, numbers, seconds), title="GRPO", title_align="left", border_style="dim", expand=False
    )


def _formatted(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _row(*pairs: tuple[str, str]) -> RenderableType:
    from rich.text import Text

    row = Text()
    for name, value in pairs:
        row.append(f"{name} ", style="dim")
        row.append(f"{value}   ")
    return row
