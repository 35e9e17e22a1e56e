"""Several runs on one page: their curves in the same charts, the settings that differ, and answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mgrpo.telemetry.progress import clock_text
from mgrpo.telemetry.recorded import Record
from mgrpo.telemetry.report import overview
from mgrpo.telemetry.report.charts import compared_charts
from mgrpo.telemetry.report.figure import NUM_COLOURS, Sheet
from mgrpo.telemetry.report.page import CHART_TOOLS, Follow, whole, with_tools
from mgrpo.telemetry.report.run import RecordedRun
from mgrpo.telemetry.report.sample_pages import Gallery, by_prompt, choose_prompts, mean_rewards
from mgrpo.telemetry.report.text import percent, shown, table, text
from mgrpo.telemetry.samples import tables

OWN = {"output_dir", "exp_name", "run_name", "rollouts_save_path", "cache_evolving_rubric_data_dir"}
"""Settings that identify a run and have no influence on its results."""
MAX_SIDE_BY_SIDE = 6


def comparison(folders: Sequence[Path], *, follow: Follow | None = None) -> str:
    """The whole page.

    Args:
        follow: see `page`.
    Raises:
        ValueError: a folder holds no metrics.
    """
    runs = [RecordedRun.read(folder) for folder in folders]
    labels = labels_of(folders)
    if follow is None:
        follow = "" if all(run.is_over for run in runs) else "reload"
    steps = [
        step for run in runs for line in (*run.steps, *run.evaluations) if isinstance(step := line.get("step"), int)
    ]
    sheet, gallery = Sheet(min(steps, default=0), max(steps, default=1)), Gallery()
    charts = compared_charts(runs, labels, sheet)
    legend = "".join(
        f"<button class='key k{index % NUM_COLOURS}' data-name='{text(label)}' aria-pressed='true'>{text(label)}</button>"
        for index, label in enumerate(labels)
    )
    sections = {
        "runs": ("Runs", f"<h2 id='runs'>Runs</h2>{_runs(runs, labels)}"),
        "differences": ("Settings that differ", _differences(runs, labels)),
        "curves": (
            "Curves",
            f"<h2 id='curves'>Curves</h2><div class='tools sticky runs'>{legend}</div>{CHART_TOOLS}{charts}"
            if charts
            else "",
        ),
        "evaluations": ("Evaluations", _evaluations(runs, labels)),
        "samples": ("Samples", with_tools(_samples(runs, labels, gallery), has_tokens=bool(gallery.tokens))),
    }
    title = f"Comparison of {len(runs)} runs"
    found = sum((run.unread for run in runs), gallery.unread)
    header = (
        f"<header><div class='title'><h1>{text(title)}</h1></div><p class='note'>{text(' · '.join(labels))}</p>"
        f"{overview.unread(found)}</header>"
    )
    return whole(title, header, sections, sheet=sheet, gallery=gallery, follow=follow)


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its path without the part that all folders share."""
    parts = [folder.absolute().parts for folder in folders]
    common = len(list(takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))))
    names = ["/".join(path[min(common, len(path) - 1) :]) for path in parts]
    return [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _runs(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    rows = []
    for run, label in zip(runs, labels, strict=True):
        accuracy = [v for line in run.evaluations if isinstance(v := line.get("eval/pass_at_1"), (int, float))]
        rewards = [v for line in run.steps if isinstance(v := line.get("reward"), (int, float))]
        few = max(1, min(overview.TAIL, len(rewards) // 4))
        times = run.times()
        rows.append(
            [
                label,
                run.state_words,
                f"{run.step} of {run.num_steps}" if run.num_steps else str(run.step),
                clock_text(times[1] - times[0]) if times else "",
                *(shown(sum(part) / few) if part else "" for part in (rewards[:few], rewards[-few:])),
                *(percent(accuracy[end]) if accuracy else "" for end in (0, -1)),
                percent(max(accuracy, default=None)),
            ]
        )
    heads = ("run", "state", "steps", "time", "reward at the start", "reward now")
    return table((*heads, "held-out at the start", "held-out now", "held-out best"), rows)


def _differences(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    names = {name for run in runs for name in run.settings} - OWN
    missing = "not set"
    rows = [
        [str(name), *(shown(run.settings.get(name, missing)) for run in runs)]
        for name in sorted(names, key=str)
        if len({repr(run.settings.get(name, missing)) for run in runs}) > 1
    ]
    found = table(("setting", *labels), rows) if rows else "<p class='note'>None: their settings are the same.</p>"
    return f"<h2 id='differences'>Settings that differ</h2>{found}"


def _evaluations(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    """Held-out accuracy, or the mean reward where nothing is right or wrong, by step and run."""
    by_run: list[dict[Any, str]] = []
    for run in runs:
        by_run.append({line.get("step"): _result(line) for line in run.evaluations})
    steps = sorted({step for found in by_run for step in found if isinstance(step, int)})
    if not steps:
        return ""
    rows = [[str(step), *(found.get(step, "") for found in by_run)] for step in steps]
    return f"<h2 id='evaluations'>Evaluations</h2>{table(('after step', *labels), rows)}"


def _result(line: Record) -> str:
    accuracy = line.get("eval/pass_at_1")
    return percent(accuracy) if isinstance(accuracy, (int, float)) else f"reward {shown(line.get('eval/scores'))}"


def _samples(runs: Sequence[RecordedRun], labels: Sequence[str], gallery: Gallery) -> str:
    """The newest evaluations of runs, for prompts that are the same in all of them."""
    columns = {}
    for run, label in list(zip(runs, labels, strict=True))[:MAX_SIDE_BY_SIDE]:
        evaluations = tables(run.folder / "rollouts")
        if evaluations:
            step, paths = list(evaluations.items())[-1]
            records = by_prompt(paths, gallery.unread).values()
            # Other data may have other prompts under the same number.
            columns[f"{label}, step {step}"] = {answers[0].get("prompt"): answers for answers in records}
    if len(columns) < 2:
        return ""
    shared = set.intersection(*(set(found) for found in columns.values()))
    first, last = (
        {prompt: mean for prompt, mean in mean_rewards(found).items() if prompt in shared}
        for found in (next(iter(columns.values())), list(columns.values())[-1])
    )
    if not shared:
        return ""
    names = {"Rose most": "Better in the last run", "Fell most": "Worse in the last run"}
    chosen = {names.get(heading, heading): found for heading, found in choose_prompts(first, last).items()}
    return (
        "<h3 id='held-out'>Held-out prompts</h3><p class='note'>The newest evaluation of each run.</p>"
        + gallery.side_by_side(columns, chosen)
    )
