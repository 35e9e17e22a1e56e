"""docs/metrics.md: every metric that a run logs, and what became of the names that other trainers use.

`python -m tools.docs.metrics > docs/metrics.md` writes it. The metrics are the rows of mgrpo/telemetry/metrics/metrics.csv, the
other names those of other_metrics.csv beside this module, which has the columns

    section   the section of the page, in which they follow the metrics
    name      as the other trainer spells it
    of        the trainer that uses it
    status    "alias": logged under the name `target`; "not yet"; "left out": deliberately
    target    the metric that an alias means
    note      how an alias differs from its target, if it does; for the others the reason
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from mgrpo.telemetry.alerts import HALF_UNSCORED, MOST, PATIENCE, REPEAT_AFTER
from mgrpo.telemetry.metrics.batch import LENGTH_BINS, MAGNITUDES, RATE_BINS
from mgrpo.telemetry.metrics.meanings import Metric, find, metrics
from tools.docs.markdown import table


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherName:
    """A name that is not logged, a row of other_metrics.csv; the fields are the columns above."""

    section: str
    name: str
    of: str
    status: Literal["alias", "not yet", "left out"]
    target: str
    note: str


INTRODUCTION = f"""<!-- Written by `python -m tools.docs.metrics > docs/metrics.md`; do not edit. -->

# Metrics

A training step is one line of `metrics.jsonl`, an evaluation another, whose names begin with `eval/`. Names are Open Instruct's
where it has one. Each quantity is logged once; this page says under which name.

| status | meaning |
|---|---|
| logged | in the file, where it applies: no KL without a reference, no `val/rho` without the correction, no verifier without rows |
| alias | logged under the name given |
| not yet | not measured so far, for the reason given |
| left out | deliberately not logged, for the reason given |

Averages of the loss are over trained tokens: sums and counts are added over micro-batches, mini-batches and ranks and divided
once, so that no number depends on the layout. Rewards, lengths and batches are computed once, on rank 0. A completion without
a score is in no mean of rewards. What cannot be measured is `null`. Clock readings have the unit s or tokens/s, and
`async/engine_idle_share` is made of them; everything else is the same when a run is repeated, for the runs that repeat
([asynchronous.md](asynchronous.md#what-repeats)).

## Warnings

A run prints a warning, which `report.html` repeats, when one of these has lasted for {PATIENCE} steps, and again every {REPEAT_AFTER}. A run
whose steps all had nothing to learn from writes everything, and then ends with exit code 1.

| metric | warning when | likely causes |
|---|---|---|
| `frac_reward_zero_std` | 1: all rewards of each group are equal | data too hard or too easy; a verifier that expects another form; a constant reward; a low temperature |
| `val/no_score_rate` | {HALF_UNSCORED:g} or more | reward functions that return NaN or None; a verifier that fails; environments (`turns/ended_by/error`), whose reasons are in the log |
| `objective/{{verifier}}_error_rate` | 1: it scored nothing | its service, its time-out, the form of the ground truths |
| `completions/clipped_ratio` | {MOST:g} or more: almost all are cut off | `response_length` too small; an end token that is not among the stop tokens |
| `completions/max_length` | 1: all are empty | a chat template that does not suit the model |
| `tools/aggregate/failure_rate` | 1: every call fails | a service that does not answer; the form of the arguments; `tool_timeout` |
| `tools/aggregate/avg_calls_per_rollout` | 0 | another `tool_parser_type`; prompts that do not ask for calls; a model that knows no tools |
| `optim/steps`, `optim/grad_norm` | 0 | no advantage, or no trained token |

Weights that are not finite, when they are loaded or after a step, and log-probabilities of an engine that are not, end the run; the error names
the tensor and the last checkpoint.

## Histograms

Histograms are lists of counts, never more than 16:

| unit | bins |
|---|---|
| lengths | {LENGTH_BINS}: [0, 2), [2, 4), [4, 8) ... doubling, the last [2^{LENGTH_BINS - 1}, inf) |
| rates | {RATE_BINS}: nothing (0 or less), (0, 0.1), [0.1, 0.2) ... [0.9, 1), everything (1 or more) |
| advantages | {2 * len(MAGNITUDES) + 3}: bounds {", ".join(f"{m:g}" for m in MAGNITUDES)} away from 0, negative ones first, exactly 0 in the middle |
"""


@cache
def other_names() -> dict[str, OtherName]:
    """The names that are not logged, in the order of the file."""
    with Path(__file__).with_name("other_metrics.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: OtherName(**row) for row in csv.DictReader(file)}


def entry(name: str) -> Metric | OtherName | None:
    """The row of a name, or of one with braces as it stands in a table; None for an unknown one."""
    return other_names().get(name) or find(name)


def is_logged(name: str) -> bool:
    """Whether a run logs this name."""
    return isinstance(entry(name), Metric)


def to_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section in dict.fromkeys(metric.section for metric in metrics()):
        own = [(_anchored(row.name), row.unit, row.of, row.meaning) for row in metrics() if row.section == section]
        lines = [f"## {section}", "", *table(("logged", "unit", "name of", "meaning"), own), ""]
        others = [
            (
                _anchored(row.name),
                row.of,
                row.status,
                "; ".join(filter(None, (row.target and f"`{row.target}`", row.note))),
            )
            for row in other_names().values()
            if row.section == section
        ]
        if others:
            lines += [*table(("other name", "of", "status", "note"), others), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _anchored(name: str) -> str:
    """The name, with an anchor where it is a whole one."""
    return f"`{name}`" if "{" in name else f'<a id="{name}"></a>`{name}`'


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
