"""Sections of a page besides curves and samples: state of the run, warnings, evaluations, starts, engines and settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from mgrpo.telemetry.alerts import help_page, replay
from mgrpo.telemetry.progress import clock_text
from mgrpo.telemetry.recorded import Record, Unread
from mgrpo.telemetry.report.run import STATES, RecordedRun
from mgrpo.telemetry.report.text import percent, shown, table, text
from mgrpo.telemetry.state import told_engines

History = list[tuple[int, Record]]
"""The states of an engine, each with the first step of it."""

MAX_WARNINGS = 20
SETTINGS = (
    "model_name_or_path",
    "dataset_mixer_list",
    "dataset_mixer_eval_list",
    "reward_funcs",
    "total_episodes",
    "num_unique_prompts_rollout",
    "num_samples_per_prompt_rollout",
    "response_length",
    "temperature",
    "learning_rate",
    "beta",
    "seed",
)
"""Settings that are shown without unfolding the rest."""
COLUMNS = {
    "step": "after step",
    "policy_version": "weights version",
    "eval/pass_at_1": "accuracy (pass@1)",
    "eval/scores": "mean reward",
    "eval/sequence_lengths": "mean length",
    "eval/stop_rate": "ended by themselves",
    "eval/no_score_rate": "without a score",
}
"""Columns of the table of evaluations; after them come the shares of prompts that one of several answers solves."""
SHARES = re.compile(r"eval/(pass_at_\d+|stop_rate|no_score_rate)")
START = "time/start/"
"""The beginning of the metrics with the seconds of a start by phase, which the first step after it has."""
STRIP = 1000
"""Length of an engine's bar, which is stretched to the width of the page."""
MAX_STRIPS = 64
"""Most engines with a bar: of more, those that changed last."""
MAX_FAILURES = 64
TAIL = 10
"""The number of steps whose mean is the value now, and the value at the start."""
TILES = (
    ("Reward", "reward", "{:.3g}", ""),
    ("Length", "completions/mean_length", "{:.4g}", "tokens"),
    ("Entropy", "policy/entropy_avg", "{:.3g}", "nats"),
    ("KL", "objective/kl2_avg", "{:.3g}", "nats"),
    ("Time of a step", "time/total", "{:.3g}", "s"),
    ("Engines", "time/actor_tokens_per_second", "{:,.0f}", "tokens/s"),
)
"""Name, metric, form and unit of the numbers at the top."""


def header(run: RecordedRun) -> str:
    """The run's name, state and progress, and its main numbers."""
    model = run.settings.get("model_name_or_path")
    data = run.settings.get("dataset_mixer_list")
    about = [str(value) for value in (model, data[0] if isinstance(data, list) and data else None) if value]
    return (
        f"<header><div class='title'><h1>{text(run.title)}</h1>{pill(run)}</div>"
        f"<p class='note'>{text(' on '.join(about))}</p>{_progress(run)}{_cause(run)}{unread(run.unread)}{_tiles(run)}"
        f"<p class='note'>{text('; '.join(_facts(run)))}</p></header>"
    )


def pill(run: RecordedRun) -> str:
    """The state as a coloured label."""
    return f"<span class='pill {run.state}'>{text(run.state_words)}</span>"


def _progress(run: RecordedRun) -> str:
    total = run.num_steps
    if not run.steps:
        return ""
    times = run.times()
    parts = [f"step {run.step}" + (f" of {total}" if total else "")]
    parts += (
        [f"{clock_text(times[1] - times[0])} so far" if not run.is_over else clock_text(times[1] - times[0])]
        if times
        else []
    )
    remaining = run.remaining_s()
    parts += [f"about {clock_text(remaining)} left"] if remaining is not None else []
    bar = f"<progress max='{total}' value='{min(run.step, total)}'></progress>" if total else ""
    return f"<p class='progress'>{bar}<span>{text(' · '.join(parts))}</span></p>"


def _cause(run: RecordedRun) -> str:
    return f"<p class='warning'>{text(STATES[run.state])}: {text(run.cause)}</p>" if run.cause else ""


def unread(found: Unread) -> str:
    """A sentence about the lines that could not be read."""
    files = [f"{number} {'line' if number == 1 else 'lines'} of {name}" for name, number in found.items() if number]
    return f"<p class='warning'>Damaged, and left out here: {text(', '.join(files))}.</p>" if files else ""


def _tiles(run: RecordedRun) -> str:
    """The main numbers now and at the start."""
    tiles = []
    held_out = [v for line in run.evaluations if isinstance(v := line.get("eval/pass_at_1"), (int, float))]
    if held_out:
        before = percent(held_out[0]) if len(held_out) > 1 else ""
        tiles.append(_tile("Held-out accuracy", percent(held_out[-1]), before))
    for name, metric, form, unit in TILES:
        values = [v for line in run.steps if isinstance(v := line.get(metric), (int, float))]
        if not values or not any(values):
            continue
        few = max(1, min(TAIL, len(values) // 4))
        start, now = (form.format(sum(part) / few) for part in (values[:few], values[-few:]))
        tiles.append(_tile(name, now, start if len(values) > few and start != now else "", unit))
    return f"<div class='tiles'>{''.join(tiles)}</div>" if tiles else ""


def _tile(name: str, now: str, before: str, unit: str = "") -> str:
    was = f"<small>start {text(before)}</small>" if before else ""
    return f"<div class='tile'><span>{text(name)} <i>{unit}</i></span><b>{text(now)}</b>{was}</div>"


def _facts(run: RecordedRun) -> list[str]:
    """The number of steps, the times of the run, and its packages, which the first line of config.yaml lists."""
    facts = [f"{len(run.steps)} {'step' if len(run.steps) == 1 else 'steps'}"] if run.steps else []
    idle = sum(line.get("optim/steps") == 0 for line in run.steps)
    if idle:
        facts.append(
            f"{idle} of them had nothing to train on, so the weights' version (policy_version) is behind the step"
        )
    if times := run.times():
        first, last = (datetime.fromtimestamp(time, timezone.utc) for time in times)
        facts.append(f"from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC")
    head = run.config.partition("\n")[0]
    return facts + ([head[2:]] if head.startswith("# ") else [])


def warnings(run: RecordedRun) -> str:
    """Each sign once, with all steps at which it was reported and the page that helps."""
    # A run with unknown settings counts as a long one.
    found: dict[str, tuple[list[int], str]] = {}
    for step, name, sentence in replay(run.steps, run.num_steps or len(run.steps) + 3):
        steps = found.pop(name, ([], ""))[0]
        found[name] = ([*steps, step], sentence)
    rows = [
        f"<div class='warning'><b>step {text(', '.join(map(str, steps[-5:])))}</b> {text(sentence)} "
        f"<span class='note'>See {text(help_page(name))}.</span></div>"
        for name, (steps, sentence) in list(found.items())[-MAX_WARNINGS:]
    ]
    return "".join(["<h2 id='warnings'>Warnings</h2>", *rows]) if rows else ""


def evaluations(run: RecordedRun) -> str:
    """A row for each evaluation."""
    if not run.evaluations:
        return "<h2 id='evaluations'>Evaluations</h2><p class='note'>None.</p>" if run.steps else ""
    names = {name for line in run.evaluations for name in line}
    # Other metrics are in the list below the table: a table of all would be wider than any page.
    more = sorted((name for name in names - set(COLUMNS) if re.fullmatch(r"eval/pass_at_\d+", name)), key=_number)
    columns = [name for name in COLUMNS if name in names] + more
    heads = [COLUMNS[name] if name in COLUMNS else f"one of {_number(name)} right" for name in columns]
    rows = [[_cell(name, line.get(name)) for name in columns] for line in run.evaluations]
    last = [[name, shown(value)] for name, value in sorted(run.evaluations[-1].items())]
    return (
        f"<h2 id='evaluations'>Evaluations</h2>{table(heads, rows)}"
        f"<details id='last-evaluation'><summary>all metrics of the last one</summary>{table(('metric', 'value'), last)}</details>"
    )


def _cell(name: str, value: object) -> str:
    return percent(value) if SHARES.fullmatch(name) else shown(value)


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def starts(run: RecordedRun) -> str:
    """A row for each start of the run: its phases, and the time to the first sample."""
    found = []
    for line in run.steps:
        phases = {k: v for k, v in line.items() if k.startswith(START) and isinstance(v, (int, float))}
        if phases:
            found.append((line.get("step"), phases))
    if not found:
        return ""
    names = list(dict.fromkeys(name for _, phases in found for name in phases))
    heads = ["before step", "first sample after", *(name.removeprefix(START) for name in names)]
    rows = [
        [shown(step), f"{sum(phases.values()):.1f}", *(f"{phases[n]:.1f}" if n in phases else "" for n in names)]
        for step, phases in found
    ]
    return f"<h2 id='starts'>Starts</h2><p class='note'>Seconds by phase, as rank 0 waited for them.</p>{table(heads, rows)}"


def settings(run: RecordedRun) -> str:
    """The settings that describe a run best, and a folded list of all of them."""
    if not run.config:
        return ""
    rows = [[name, shown(run.settings[name])] for name in SETTINGS if run.settings.get(name) not in (None, [], "")]
    return (
        f"<h2 id='settings'>Settings</h2>{table(('setting', 'value'), rows)}"
        f"<details id='every-setting'><summary>every setting</summary><pre>{text(run.config, limit=None)}</pre></details>"
    )


def engines(run: RecordedRun) -> str:
    """The states of the engines by step: a bar for each engine, the failures, and the present states."""
    if not run.engines:
        return ""
    last = max(run.step, 1)
    histories, present = _histories(run.engines)
    rows = [_strip(number, histories[number], last) for number in _shown_engines(histories)]
    failures = sorted(failure for number, history in histories.items() for failure in _failures(number, history))
    states = sorted({engine["state"] for history in histories.values() for _, engine in history})
    legend = "".join(f"<span class='key engine {text(state)}'>{text(state)}</span>" for state in states)
    ends = f"<span></span><p class='ends'><span>step 1</span><span>{last}</span></p>" if rows else ""
    unseen = len(histories) - len(rows)
    hint = f" {unseen} engines without a change, or without a recent one, have no bar." if unseen else ""
    few = [[str(step), str(number), why] for step, number, why in failures[-MAX_FAILURES:]]
    more = (
        f"<p class='hint'>The last {MAX_FAILURES} of {len(failures)} failures.</p>" if len(failures) > len(few) else ""
    )
    return (
        f"<h3 id='engines'>Engines</h3><figure class='chart wide'><div class='legend'>{legend}</div>"
        f"<div class='strips'>{''.join(rows)}{ends}</div>"
        f"<p class='hint'>{'At the end: ' if run.is_over else 'Now: '}{text(_standing(present), limit=None)}."
        f"{hint} docs/engines.md says what each state means.</p>"
        f"</figure>" + (table(("by step", "engine", "failure"), few) + more if failures else "")
    )


def _histories(lines: Sequence[Record]) -> tuple[dict[int, History], list[Record]]:
    """The states of each engine, by number, each with the first step of it; and the states of all engines at the end."""
    histories: dict[int, History] = {}
    present: dict[int, Record] = {}
    for line in lines:
        if "engines" in line:
            present = {}
        for engine in told_engines(line):
            history = histories.setdefault(engine["engine"], [])
            if not history or engine != history[-1][1]:
                history.append((line["step"], engine))
            present[engine["engine"]] = engine
    return dict(sorted(histories.items())), list(present.values())


def _shown_engines(histories: Mapping[int, History]) -> list[int]:
    """All engines, or those of many that changed last."""
    if len(histories) <= MAX_STRIPS:
        return [*histories]
    changed = [number for number, history in histories.items() if len(history) > 1]
    return sorted(sorted(changed, key=lambda number: -histories[number][-1][0])[:MAX_STRIPS])


def _strip(number: int, history: History, last: int) -> str:
    bars = []
    for (step, engine), end in zip(history, [*(step for step, _ in history[1:]), last + 1], strict=True):
        left, right = (_place(at, last) for at in (step, end))
        bars.append(
            f"<rect class='engine {text(engine['state'])}' x='{left:.1f}' "
            f"width='{max(right - left, 2):.1f}' height='1'><title>engine {number}, from step {step} on: "
            f"{text(engine['state'])}</title></rect>"
        )
    return (
        f"<span>engine {number}</span><svg viewBox='0 0 {STRIP} 1' preserveAspectRatio='none' role='img' "
        f"aria-label='states of engine {number} by step'>{''.join(bars)}</svg>"
    )


def _failures(number: int, history: History) -> Iterator[tuple[int, int, str]]:
    """Step, engine and reason of each failure of an engine."""
    starts = 1
    for step, engine in history:
        if engine["starts"] > starts or (engine["state"] in ("dead", "retired") and engine["last_failure"]):
            yield step, number, str(engine["last_failure"])
        starts = max(starts, engine["starts"])


def _standing(present: Sequence[Record]) -> str:
    if len(present) <= MAX_STRIPS:
        return ", ".join(f"engine {engine['engine']} {engine['state']}" for engine in present)
    counts = Counter(engine["state"] for engine in present)
    return ", ".join(f"{count} engines {state}" for state, count in counts.most_common())


def _place(step: float, last: int) -> float:
    return STRIP * (min(max(step, 1), last + 1) - 1) / last


def contents(parts: Sequence[tuple[str, str]]) -> str:
    """Links to the sections of the page."""
    if not parts:
        return ""
    links = "".join(f"<a href='#{place}'>{name}</a>" for place, name in parts)
    return f"<nav>{links}</nav>"
