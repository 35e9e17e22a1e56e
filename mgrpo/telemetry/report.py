"""A run as one HTML page, made from the files in its folder: config.yaml, metrics.jsonl and the tables of samples.

The page loads nothing and runs no script. What a model wrote is untrusted input: everything goes through `_text`.
"""

from __future__ import annotations

import html
import json
import random
import re
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mgrpo.telemetry.alerts import replay
from mgrpo.telemetry.chart import curves_svg, metric_points, reward_svg
from mgrpo.telemetry.files import write_whole
from mgrpo.telemetry.progress import PHASES
from mgrpo.telemetry.samples import NUM_SHOWN, TRAIN_SAMPLES, Record, read_records, tables

MAX_WARNINGS = 20
NUM_BEST = NUM_WORST = 3
NUM_RANDOM = 6
SHOWN_CHARACTERS = 4000

SUMMARY = (
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
"""Settings shown without unfolding the rest."""
COLUMNS = (
    "step",
    "policy_version",
    "eval/pass_at_1",
    "eval/scores",
    "eval/sequence_lengths",
    "eval/stop_rate",
    "eval/no_score_rate",
)
"""Columns of the table of evaluations; the fraction of prompts that one of several answers solves follows."""
COURSE = (
    ("completion length in tokens", {"mean": "completions/mean_length", "longest": "completions/max_length"}),
    ("entropy", {"": "policy/entropy_avg"}),
    ("KL to the reference", {"": "objective/kl2_avg"}),
    ("gradient norm", {"": "optim/grad_norm"}),
    ("learning rate", {"": "lr"}),
    ("fraction of groups without spread", {"": "frac_reward_zero_std"}),
    ("trainer and engine: mean |log-prob difference|", {"": "debug/vllm_vs_local_logprob_diff_mean"}),
    (
        "older tokens: mean |log-prob difference| by age",
        {str(age): f"async/logprob_diff_age_{age}" for age in (1, 2, 4, 8)},
    ),
    ("seconds of a step", {name: f"time/{name}" for name in PHASES}),
)
"""Small charts: title, and metrics by their names in it."""

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .25em .7em; border-bottom: 1px solid #eee }
th { text-align: left; font-weight: 600 } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f6f4; padding: .6em .8em; margin: .3em 0; white-space: pre-wrap; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
.course { display: flex; flex-wrap: wrap; gap: 12px }
.warning { background: #fff4e5; border-left: 4px solid #d9822b; padding: .4em .8em; margin: .4em 0 }
.sample { border: 1px solid #ddd; border-radius: 4px; padding: .6em .8em; margin: .8em 0 } .note { color: #666 }
"""


def write_report(folder: str | Path) -> Path:
    """Write `folder/report.html`; it appears complete or not at all.

    Raises:
        ValueError: the folder holds no metrics.
    """
    path = Path(folder) / "report.html"
    write_whole(path, page(path.parent))
    return path


def report_command(argv: Sequence[str]) -> int:
    """`mgrpo report DIR`: write the report of a run or of an evaluation again."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        sys.stderr.write("usage: mgrpo report DIR   (the output_dir of a run)\n")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        path = write_report(argv[0])
    except ValueError as err:
        sys.stderr.write(f"mgrpo report: {err}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


def page(folder: Path) -> str:
    """The whole page."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the output_dir of a run")
    lines = list(read_records([metrics]))
    config_path = folder / "config.yaml"
    config = config_path.read_text(encoding="utf-8", errors="replace") if config_path.is_file() else ""
    settings = _settings(config)
    title = str(settings.get("exp_name") or folder.absolute().name)
    sections = [
        f"<h1>{_text(title)}</h1>",
        _facts(lines, config),
        _warnings(lines, settings),
        _configuration(settings, config),
        _rewards(lines),
        _course(lines),
        _evaluations([line for line in lines if any(name.startswith("eval/") for name in line)]),
        _samples(folder / "rollouts"),
        _train_samples(folder / "rollouts" / TRAIN_SAMPLES),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
            *filter(None, sections),
            "</body></html>\n",
        ]
    )


def _settings(config: str) -> Mapping[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _num_steps(settings: Mapping[str, Any]) -> int:
    """Steps of the whole run; 0 where the settings do not say."""
    names = ("total_episodes", "num_unique_prompts_rollout", "num_samples_per_prompt_rollout")
    episodes, prompts, samples = (number if isinstance(number := settings.get(name), int) else 0 for name in names)
    return episodes // (prompts * samples) if prompts * samples > 0 else 0


def _facts(lines: Sequence[Record], config: str) -> str:
    """When it ran, and with which packages, which config.yaml says in its first line."""
    steps = [line for line in lines if "optim/steps" in line]
    times = [line["time/unix"] for line in lines if isinstance(line.get("time/unix"), (int, float))]
    facts = [f"{len(steps)} steps"] if steps else []
    if times:
        first, last = (datetime.fromtimestamp(time, timezone.utc) for time in (times[0], times[-1]))
        facts.append(f"from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC")
    idle = sum(line["optim/steps"] == 0 for line in steps)
    if idle:
        facts.append(f"{idle} of them had nothing to train on, so policy_version is behind step")
    head = config.partition("\n")[0]
    facts += [head[2:]] if head.startswith("# ") else []
    return f"<p class='note'>{_text('; '.join(facts))}</p>" if facts else ""


def _warnings(lines: Sequence[Record], settings: Mapping[str, Any]) -> str:
    # A run whose settings are not known is taken for a long one.
    found = replay(lines, _num_steps(settings) or len(lines) + 3)
    shown = [f"<div class='warning'>step {step}: {_text(text)}</div>" for step, text in found[-MAX_WARNINGS:]]
    return "\n".join(["<h2>Warnings</h2>", *shown]) if shown else ""


def _configuration(settings: Mapping[str, Any], config: str) -> str:
    if not config:
        return ""
    rows = [[name, _shown(settings[name])] for name in SUMMARY if settings.get(name) not in (None, [], "")]
    return (
        f"<h2>Configuration</h2>{_table(('setting', 'value'), rows)}"
        f"<details><summary>every setting</summary><pre>{_text(config, limit=None)}</pre></details>"
    )


def _rewards(lines: Sequence[Record]) -> str:
    rewards, evaluations = metric_points(lines, "reward"), metric_points(lines, "eval/scores")
    if not rewards:
        return ""
    return f"<h2>Reward</h2>{reward_svg(rewards, evaluations)}"


def _course(lines: Sequence[Record]) -> str:
    """Small charts of what else changes from step to step; those that are 0 throughout say nothing."""
    charts = []
    for title, metrics in COURSE:
        curves = {name: metric_points(lines, metric) for name, metric in metrics.items()}
        if any(value for points in curves.values() for _, value in points):
            charts.append(curves_svg(title, curves))
    return "\n".join(["<h2>Course</h2><div class='course'>", *charts, "</div>"]) if charts else ""


def _evaluations(evaluations: Sequence[Record]) -> str:
    if not evaluations:
        return "<h2>Evaluations</h2><p class='note'>None.</p>"
    names = {name for line in evaluations for name in line}
    # What the table leaves out is in the list below it: a table of everything is wider than any page.
    more = sorted(name for name in names - set(COLUMNS) if re.fullmatch(r"eval/pass_at_\d+", name))
    columns = [name for name in COLUMNS if name in names] + more
    rows = [[_shown(line.get(name)) for name in columns] for line in evaluations]
    last = [[name, _shown(value)] for name, value in sorted(evaluations[-1].items())]
    return (
        f"<h2>Evaluations</h2>{_table([name.removeprefix('eval/') for name in columns], rows)}"
        f"<details><summary>all metrics of the last one</summary>{_table(('metric', 'value'), last)}</details>"
    )


def _samples(folder: Path) -> str:
    evaluations = tables(folder)
    if not evaluations:
        return ""
    step, paths = list(evaluations.items())[-1]
    chosen = choose_samples(lambda: read_records(paths))
    parts = [f"<h2>Samples of the evaluation after step {step}</h2>"]
    for heading, records in chosen.items():
        parts += [f"<h3>{heading}</h3>", *map(_sample, records)] if records else []
    return "\n".join(parts)


def _train_samples(path: Path) -> str:
    """Those of the newest step that has any."""
    newest: deque[Record] = deque(read_records([path]) if path.is_file() else (), maxlen=NUM_SHOWN)
    if not newest:
        return ""
    step = newest[-1].get("step")
    shown = [_sample(record) for record in newest if record.get("step") == step]
    return "\n".join(
        [
            f"<h2>Samples of training, step {_text(step)}</h2>",
            f"<p class='note'>One prompt. rollouts/{TRAIN_SAMPLES} has those of other steps.</p>",
            *shown,
        ]
    )


def choose_samples(read: Callable[[], Iterable[Record]]) -> dict[str, list[Record]]:
    """The best and the worst by reward, each prompt at most once in either, and a few at random, always the same.

    Where all rewards are equal none is the best.

    Args:
        read: iterates over the records anew at each call; they are never all in memory.
    """
    summary = [(record.get("reward"), record.get("prompt_idx")) for record in read()]
    prompts = [prompt for _, prompt in summary]
    rewards = {index: float(reward) for index, (reward, _) in enumerate(summary) if reward is not None}
    ascending = sorted(rewards, key=rewards.__getitem__) if len(set(rewards.values())) > 1 else []
    worst = _one_per_prompt(ascending, prompts, NUM_WORST)
    best = _one_per_prompt([index for index in reversed(ascending) if index not in worst], prompts, NUM_BEST)
    rest = [index for index in range(len(summary)) if index not in {*best, *worst}]
    at_random = sorted(random.Random(0).sample(rest, min(NUM_RANDOM, len(rest))))
    wanted = {*best, *worst, *at_random}
    chosen = {index: record for index, record in enumerate(read()) if index in wanted}
    groups = {"Highest reward": best, "Lowest reward": worst, "At random": at_random}
    return {heading: [chosen[index] for index in indices] for heading, indices in groups.items()}


def _one_per_prompt(ordered: Iterable[int], prompts: Sequence[Any], count: int) -> list[int]:
    first: dict[Any, int] = {}
    for index in ordered:
        if len(first) == count:
            break
        first.setdefault(prompts[index], index)
    return list(first.values())


_ENDS = {
    "stop": "ended by itself",
    "length": "cut off",
    "max_calls": "ended with a call that was one too many",
    "done": "ended by the environment",
    "error": "lost by the environment",
    "abort": "aborted",
}
"""Finish reasons and what ends a trajectory, in words."""


def _sample(record: Record) -> str:
    correct = {True: ["correct"], False: ["not correct"]}.get(record.get("correct", ""), [])
    facts = [
        f"prompt {record.get('prompt_idx')}, sample {record.get('sample_idx')}",
        f"reward {_shown(record.get('reward'))}",
        *correct,
        *([f"advantage {_shown(record['advantage'])}"] if record.get("advantage") is not None else []),
        f"{record.get('num_tokens')} tokens, {_ENDS.get(_ended_by(record), 'end unknown')}",
        *_turns(record),
        *(f"{name} {_shown(value)}" for name, value in (record.get("scores") or {}).items()),
    ]
    known = [("ground truth", truths)] if (truths := record.get("ground_truth")) else []
    known += list((record.get("columns") or {}).items())
    labels = [
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}" for name, value in known
    ]
    return (
        f"<div class='sample'><div class='note'>{_text('; '.join(facts))}</div>"
        f"<pre>{_text(record.get('prompt', ''))}</pre><pre>{_text(record.get('completion', ''))}</pre>"
        + "".join(f"<div class='note'>{_text(label)}</div>" for label in labels)
        + "</div>"
    )


def _ended_by(record: Record) -> str:
    return (record.get("trajectory") or record).get("ended_by") or record.get("finish_reason", "")


def _turns(record: Record) -> list[str]:
    """How many turns a trajectory has, and what they called."""
    turns = (record.get("trajectory") or {}).get("turns")
    if not turns:
        return []
    calls = [f"{call['name']}{' (failed)' if call['failed'] else ''}" for turn in turns for call in turn["calls"]]
    return [f"{len(turns)} {'turn' if len(turns) == 1 else 'turns'}, called {', '.join(calls) or 'nothing'}"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td{_class(cell)}>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _class(cell: str) -> str:
    return " class='number'" if cell[-1:].isdigit() and cell.lstrip("-")[:1].isdigit() else ""


def _shown(value: object) -> str:
    """A value for readers: numbers shortened, lists as words."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _text(value: object, *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """Anything as HTML text: no markup, no invisible characters, none that change the reading direction."""
    text = str(value)
    more = f" ... {len(text) - limit} more characters" if limit is not None and len(text) > limit else ""
    visible = "".join(
        char if char in "\n\t\u200d" or unicodedata.category(char)[0] != "C" else f"\\u{ord(char):04x}"
        for char in (text[:limit] if more else text)
    )
    return html.escape(visible + more, quote=True)
