"""A run as one HTML page, made from the files in its folder: config.yaml, metrics.jsonl and the tables of samples.

The page loads nothing and runs no script. What a model wrote is hostile text: everything goes through `_text`.
"""

from __future__ import annotations

import html
import json
import os
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.telemetry.chart import metric_points, reward_svg
from mgrpo.telemetry.samples import Record, read_records, tables

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
"""Settings that stand above the others."""
COLUMNS = (
    "step",
    "policy_version",
    "eval/pass_at_1",
    "eval/scores",
    "eval/sequence_lengths",
    "eval/stop_rate",
    "eval/no_score_rate",
)
"""Of every evaluation; pass@k and the parts of a mixture follow."""

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; display: block; overflow-x: auto } th, td { padding: .25em .7em; border-bottom: 1px solid #eee }
th { text-align: left; font-weight: 600 } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f6f4; padding: .6em .8em; margin: .3em 0; white-space: pre-wrap; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
.sample { border: 1px solid #ddd; border-radius: 4px; padding: .6em .8em; margin: .8em 0 } .note { color: #666 }
"""


def write_report(folder: str | Path) -> Path:
    """Write `folder/report.html`; it appears complete or not at all.

    Raises:
        ValueError: the folder holds no metrics.
    """
    folder = Path(folder)
    path = folder / "report.html"
    partial = folder / "report.html.partial"
    partial.write_text(page(folder), encoding="utf-8")
    os.replace(partial, path)
    return path


def report_command(argv: Sequence[str]) -> int:
    """`mgrpo report DIR`: write the report of a run, or of an evaluation, again."""
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
        _configuration(settings, config),
        _rewards(lines),
        _evaluations([line for line in lines if any(name.startswith("eval/") for name in line)]),
        _samples(folder / "rollouts"),
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
        found = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


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


def _evaluations(evaluations: Sequence[Record]) -> str:
    if not evaluations:
        return "<h2>Evaluations</h2><p class='note'>There were none.</p>"
    names = {name for line in evaluations for name in line}
    more = sorted(name for name in names - set(COLUMNS) if name.startswith(("eval/pass_at_", "eval/by_")))
    columns = [name for name in COLUMNS if name in names] + more
    rows = [[_shown(line.get(name)) for name in columns] for line in evaluations]
    last = [[name, _shown(value)] for name, value in sorted(evaluations[-1].items())]
    return (
        f"<h2>Evaluations</h2>{_table([name.removeprefix('eval/') for name in columns], rows)}"
        f"<details><summary>everything that the last one measured</summary>{_table(('metric', 'value'), last)}</details>"
    )


def _samples(folder: Path) -> str:
    found = tables(folder)
    if not found:
        return ""
    step, paths = list(found.items())[-1]
    chosen = choose_samples(lambda: read_records(paths))
    parts = [f"<h2>Samples of the evaluation after step {step}</h2>"]
    for heading, records in chosen.items():
        parts += [f"<h3>{heading}</h3>", *map(_sample, records)] if records else []
    return "\n".join(parts)


def choose_samples(read: Callable[[], Iterable[Record]]) -> dict[str, list[Record]]:
    """The best and the worst by reward, a prompt at most once each, and a few at random, always the same.

    Args:
        read: gives the records anew each time; they are never all held.
    """
    rewards = [(record.get("reward"), record.get("prompt_idx")) for record in read()]
    scored = [number for number, (reward, _) in enumerate(rewards) if reward is not None]
    scored.sort(key=lambda number: rewards[number][0])
    worst = _one_a_prompt(scored, rewards, NUM_WORST)
    best = _one_a_prompt([n for n in reversed(scored) if n not in worst], rewards, NUM_BEST)
    rest = [number for number in range(len(rewards)) if number not in {*best, *worst}]
    anywhere = sorted(random.Random(0).sample(rest, min(NUM_RANDOM, len(rest))))
    wanted = {*best, *worst, *anywhere}
    kept = {number: record for number, record in enumerate(read()) if number in wanted}
    groups = {"Highest reward": best, "Lowest reward": worst, "At random": anywhere}
    return {heading: [kept[number] for number in numbers] for heading, numbers in groups.items()}


def _one_a_prompt(ordered: Iterable[int], rewards: Sequence[tuple[Any, Any]], most: int) -> list[int]:
    chosen: dict[Any, int] = {}
    for number in ordered:
        if len(chosen) == most:
            break
        chosen.setdefault(rewards[number][1], number)
    return list(chosen.values())


def _sample(record: Record) -> str:
    correct = {True: "correct", False: "not correct"}.get(record.get("correct"))
    facts = [
        f"prompt {record.get('prompt_idx')}, sample {record.get('sample_idx')}",
        f"reward {_shown(record.get('reward'))}",
        *([correct] if correct else []),
        f"{record.get('num_tokens')} tokens, ended by {record.get('finish_reason')}",
        *(f"{name} {_shown(value)}" for name, value in (record.get("scores") or {}).items()),
    ]
    truths = record.get("ground_truth") or []
    return (
        f"<div class='sample'><div class='note'>{_text('; '.join(facts))}</div>"
        f"<pre>{_text(record.get('prompt', ''))}</pre><pre>{_text(record.get('completion', ''))}</pre>"
        f"<div class='note'>ground truth: {_text(json.dumps(truths, ensure_ascii=False))}</div></div>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td{_class(cell)}>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _class(cell: str) -> str:
    return " class='number'" if cell[-1:].isdigit() and cell.lstrip("-")[:1].isdigit() else ""


def _shown(value: object) -> str:
    """A value as one reads it: numbers short, lists as words."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _text(value: object, *, limit: int | None = SHOWN_CHARACTERS) -> str:
    """Anything as HTML text: no markup, nothing invisible, nothing that turns the reading direction."""
    text = str(value)
    more = f" ... {len(text) - limit} more characters" if limit is not None and len(text) > limit else ""
    visible = "".join(
        char if char in "\n\t\u200d" or unicodedata.category(char)[0] != "C" else f"\\u{ord(char):04x}"
        for char in (text[:limit] if more else text)
    )
    return html.escape(visible + more, quote=True)
