"""The share of a run's time that counts, when machines fail at random moments, by how and how often it saves.

    OMP_NUM_THREADS=1 python tools/bench_goodput.py [--failures 6] [--seeds 2] [--gpus 1024 4096] [--step_s 244]

A run is simulated step by step with a clock of its own. What decides and what is written are the run's own parts: `Schedule` says when
a state is due and where it goes, `Saver` writes it (tensors of a few bytes, whose time is that of a real state), with the nodes'
disks and storage as folders that take time and in which a failure cuts the writing off at its moment; `resumable` and the manifests
say from which state the next start goes on, rotation what is deleted, and `LostTime` keeps the account, as in metrics.jsonl.
Failures come at random (exponential times, the rate of docs/checkpoints.md for the number of GPUs), each ends the run; one in
five is a crash that leaves all disks, the others take a node's disk, and one of a hundred takes two nodes that keep each other's copies.
All policies meet the same failures. Lost is 1 - goodput, the mean over seeds.

What a save and a restart take are assumptions, see `--help`; the first two policies save as the examples did before there was
`save_every_minutes`, and restart in a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from mgrpo.checkpoint.folder import Folder, is_near, near_root, open_folder, resumable, split_path, step_folder
from mgrpo.checkpoint.saver import Saver
from mgrpo.checkpoint.saving.near_folder import TENSORS, NearFolder
from mgrpo.checkpoint.saving.schedule import Due, Schedule
from mgrpo.checkpoint.shard import Part
from mgrpo.checkpoint.stored import Stored
from mgrpo.config.checkpoint import SAVE_COST_S, best_interval_s, lost_share, mtbf_s
from mgrpo.models.placement.boxes import Box
from mgrpo.run.report.lost_time import LostTime

ROOT = Path(__file__).resolve().parent.parent
CRASHES, BOTH_LOST = 0.2, 0.01
"""Of all failures, those that leave every disk, and those that take a node and the one with its copies."""
STATE = [Part("master", Box("w", (0,), (4,)), torch.arange(4.0))]
SHAPES = {"master": {"w": (4,)}}


class Killed(BaseException):
    """The failure: nothing in the run catches it."""


class Clock:
    """Seconds of the simulation. Work that would end after the next failure raises it instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self.failure = float("inf")

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        if self.now + seconds >= self.failure:
            self.now = self.failure
            raise Killed
        self.now += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a run saves and starts again."""

    name: str
    every_steps: int = 0
    every_s: float = 0.0
    has_near: bool = False
    asynchronous: bool = True
    restart_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds for a learner's part of a state."""

    copy_s: float
    """To host memory."""
    disk_s: float
    """To the node's disk."""
    send_s: float
    """To another node's."""
    storage_s: float
    """To storage."""


class TimedFolder:
    """A folder in which every file of tensors takes `seconds`."""

    def __init__(self, folder: Folder, clock: Clock, seconds: float) -> None:
        self.folder, self.clock, self.seconds = folder, clock, seconds
        self.location = folder.location

    def __getattr__(self, name: str):
        return getattr(self.folder, name)

    def child(self, name: str) -> TimedFolder:
        return TimedFolder(self.folder.child(name), self.clock, self.seconds)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        if name.endswith(TENSORS):
            self.clock.work(self.seconds)
        with self.folder.create(name) as stream:
            yield stream


class Cluster:
    """Storage and the disks of a node and of its partner, which outlive the run's processes."""

    def __init__(self, name: str, rates: Rates, clock: Clock) -> None:
        self.root = f"memory://{name}/states"
        self.disks = [open_folder(f"memory://{name}/disk{number}") for number in range(2)]
        self.rates, self.clock = rates, clock

    def saver(self, policy: Policy) -> Saver:
        """Of one rank that stands for all, since they write at the same time."""
        near: NearFolder | None = None
        if policy.has_near:
            disk = TimedFolder(self.disks[0], self.clock, self.rates.disk_s)
            near = NearFolder(open_folder(near_root(self.root)), disk, send=self.send)
        saver = Saver(self.root, 0, 1, keep_last_n=2, near=near, threads=1)
        saver.folder = TimedFolder(saver.folder, self.clock, self.rates.storage_s)
        return saver

    def send(self, folder: Folder, name: str) -> None:
        self.clock.work(self.rates.send_s)
        # The partner deletes what is superseded on its disk as this rank does.
        NearFolder(open_folder(near_root(self.root)), self.disks[1]).make_room()
        step = folder.location.rpartition("/")[2]
        with self.disks[1].child(step).create(name) as stream:
            stream.write(folder.read(name))

    def lose(self, disks: list[int]) -> None:
        for number in disks:
            self.disks[number].remove_all()

    def newest(self) -> int:
        """The step from which the run goes on; 0: from its model."""
        for path in resumable(self.root):
            folder, step = split_path(path)
            files = [name for name in Stored(folder, step).manifest.files if name.endswith(TENSORS)]
            disks = [disk.child(step_folder(step)) for disk in self.disks]
            if not is_near(path) or all(any(disk.size(name) is not None for disk in disks) for name in files):
                return step
        return 0


def simulate(
    policy: Policy, rates: Rates, *, step_s: float, steps: int, failures: list[tuple[float, list[int]]], name: str
) -> dict:
    """A run of `steps` steps from its first start to its end; what it lost, by its own account and by the clock."""
    clock = Clock()
    cluster, ahead = Cluster(name, rates, clock), iter([*failures, (float("inf"), [])])
    moment, disks = next(ahead)
    saved: dict[int, dict[str, float]] = {}
    num_failures, done_again, done = 0, 0, 0
    while True:
        clock.failure = moment
        try:
            if num_failures:
                clock.work(policy.restart_s)
            begun_at = done = cluster.newest()
            account = LostTime(saved.get(done), clock=clock)
            account.begin()
            schedule = Schedule(
                every_steps=policy.every_steps, every_s=policy.every_s, has_near=policy.has_near, clock=clock
            )
            saver, written = cluster.saver(policy), clock.now
            while done < steps:
                clock.work(step_s)
                done += 1
                metrics = account.step(step_s)
                if (due := schedule.due(done)) is Due.NOTHING:
                    continue
                schedule.saved()
                began = clock.now
                # A save waits for the one before it.
                clock.work(max(0.0, written - clock.now) + (rates.copy_s if policy.asynchronous else 0.0))
                saved[done] = account.state_dict()
                front = clock.now
                with contextlib.suppress(*([Killed] if policy.asynchronous else [])):
                    saver.save(done, STATE, {}, SHAPES, f"a{num_failures}-{done}", near_only=due is Due.NEAR)
                written = clock.now
                if policy.asynchronous:
                    clock.now = front
                account.saved(clock.now - began)
            break
        except Killed:
            num_failures += 1
            clock.now = moment
            cluster.lose(disks)
            done_again += done - cluster.newest() if done > begun_at else 0
            # Failures while nothing runs hit what is starting.
            moment, disks = next(ahead)
            moment = max(moment, clock.now)
    open_folder(f"memory://{name}").remove_all()
    return {
        "goodput": steps * step_s / clock.now,
        "goodput by the run": metrics["time/goodput"],
        "lost at resumes, hours": metrics["time/lost"] / 3600,
        "failures": num_failures,
        "steps done again": done_again,
    }


def draw(seed: int, mtbf: float, seconds: float) -> list[tuple[float, list[int]]]:
    """Moments of failures, and the disks that each takes."""
    rng, now, found = random.Random(seed), 0.0, []
    while now < seconds:
        now += rng.expovariate(1 / mtbf)
        kind = rng.random()
        lost = [] if kind < CRASHES else [0, 1] if kind > 1 - BOTH_LOST else [rng.randrange(2)]
        found.append((now, lost))
    return found


def policies(args: argparse.Namespace, mtbf: float) -> list[Policy]:
    own_s = best_interval_s(SAVE_COST_S, mtbf)
    old, new = args.old_restart_s, args.restart_s
    return [
        Policy(name="every 50 steps, training waits", every_steps=50, asynchronous=False, restart_s=old),
        Policy(name="every 25 steps, training waits", every_steps=25, asynchronous=False, restart_s=old),
        Policy(name="by the size of the run, in the background", every_s=own_s, restart_s=old),
        Policy(name="the same, planned restart", every_s=own_s, restart_s=new),
        Policy(
            name="three times as often on the nodes, every 25 steps on storage",
            every_s=own_s / 3,
            every_steps=25,
            has_near=True,
            restart_s=new,
        ),
    ]


def rates_of(args: argparse.Namespace, learners: int) -> Rates:
    gigabytes = args.state_tb * 1000 / learners
    return Rates(
        copy_s=gigabytes / args.copy_gb_s,
        disk_s=gigabytes / args.disk_gb_s,
        send_s=gigabytes / args.send_gb_s,
        storage_s=max(gigabytes / args.storage_gb_s, args.state_tb * 1000 / args.all_storage_gb_s),
    )


def measure(args: argparse.Namespace, num_gpus: int) -> dict[str, dict]:
    mtbf, rates = mtbf_s(num_gpus), rates_of(args, num_gpus // 2)
    seconds = args.failures * mtbf
    steps = round(seconds / args.step_s)
    found: dict[str, dict] = {}
    for policy in policies(args, mtbf):
        runs = [
            simulate(
                policy, rates, step_s=args.step_s, steps=steps, failures=draw(seed, mtbf, 20 * seconds),
                name=f"{num_gpus}-{seed}-{next(_names)}",
            )
            for seed in range(args.seeds)
        ]  # fmt: skip
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        interval = min(filter(None, (policy.every_s, policy.every_steps * args.step_s)))
        formula = lost_share(
            max(interval, args.step_s), save_s=rates.copy_s if policy.asynchronous else rates.storage_s,
            restart_s=policy.restart_s, mtbf_s=mtbf,
        )  # fmt: skip
        found[policy.name] = {"lost": 1 - mean["goodput"], "lost by the formula": formula, **mean}
    baseline = found["every 50 steps, training waits"]["lost"]
    return {name: {**own, "lost / baseline": own["lost"] / baseline} for name, own in found.items()}


_names = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=6, help="on average, in the steps of a run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--step_s", type=float, default=244, help="seconds of a step; near that of 32b_16x8.yaml")
    parser.add_argument("--state_tb", type=float, default=0.393, help="of a training state: 32B weights of 12 bytes")
    parser.add_argument("--copy_gb_s", type=float, default=32, help="a GPU to page-locked memory")
    parser.add_argument("--disk_gb_s", type=float, default=1, help="a GPU's share of its node's disks")
    parser.add_argument("--send_gb_s", type=float, default=1, help="over sockets to another node, of one GPU's copies")
    parser.add_argument("--storage_gb_s", type=float, default=1, help="a learner to storage")
    parser.add_argument("--all_storage_gb_s", type=float, default=50, help="all learners to storage")
    parser.add_argument("--old_restart_s", type=float, default=900)
    parser.add_argument("--restart_s", type=float, default=180, help="`mgrpo plan` names its phases")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "goodput.json")
    args = parser.parse_args()
    results = {}
    for num_gpus in args.gpus:
        results[str(num_gpus)] = found = measure(args, num_gpus)
        print(f"{num_gpus} GPUs, a failure every {mtbf_s(num_gpus) / 3600:.1f} hours", flush=True)
        for name, own in found.items():
            print(f"  {name:60} lost {own['lost']:6.2%}  {own['lost / baseline']:5.2f} of the baseline", flush=True)
    assumptions = {key: value for key, value in vars(args).items() if key != "out"}
    args.out.write_text(
        json.dumps({"python": platform.python_version(), "assumptions": assumptions, "gpus": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
