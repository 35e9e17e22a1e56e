"""The worth of steps ahead, a looser bound on the age, updates in flight, active sampling and the choice of an engine: simulated.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tools/bench_stream.py

All seconds are those of a simulated clock. Producer, dispatcher, scoring and the rules that they follow (`run/produce/producer.py`,
`run/produce/groups.py`, `rollout/dispatch.py`, `rollout/engines/loads.py`, `rollout/stream.py`) are mgrpo's own; engines, learners, answers and
rewards are made up. An engine decodes all its running samples at one speed: a token takes 10 ms + 0.12 ms for each of them + 40 ns for
each token of their prompts, and a group begins with its prompt at 20,000 tokens a second, during which nothing is decoded. Samples for
which an engine has no slot wait in it, in order. Answers are log-normal, cut at the longest, and belong to their prompts: all cases of a
seed sample the same ones. Scores take no time. Every step trains for `train_s`, then the engines pause, drained or not, and have new
weights `sync_s` later. What is reported are the first `steps` steps of a longer run, from their beginning: means over the seeds, and the
greatest age of any.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import platform
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import FINISH_REASONS, Completions, Pause, PromptBatch
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.loads import Loads
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.requests import Request
from mgrpo.run.produce.producer import Producer
from mgrpo.run.produce.production import _samples_per_engine
from mgrpo.types import Prompt, PromptId, RewardContext, RolloutGroup, Score, ScoredBatch, ScoredGroup

ROOT = Path(__file__).resolve().parent.parent
TOKEN_S, SAMPLE_S, PROMPT_S = 0.010, 0.00012, 40e-9
"""Seconds of a decoded token: always, for each running sample, for each token of their prompts."""
READ_RATE = 20_000.0
"""Tokens that an engine reads in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The machines, and what is sampled."""

    engines: int = 16
    slots: int = 64
    groups: int = 64
    samples: int = 8
    mean: float = 4000.0
    sigma: float = 0.9
    longest: int = 32768
    train_s: float = 60.0
    sync_s: float = 5.0
    steps: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of the settings that are compared."""

    table: str
    name: str
    ahead: int = 0
    bound: int | None = None
    pauses: Pause = "keep"
    """In flight, reading again what was decoded under older weights (recompute) or not."""
    useful: float = 1.0
    """Share of the groups that have something to learn from."""
    oversample: float = 0.0
    refills_at_once: bool = False
    """Where engines and learners take turns as well, which mgrpo does not do: such a run would not repeat."""
    prompts: str = "short"
    loads: type[Loads] = Loads


# ---- the world


class Inline:
    """In place of a thread: work is done at once, in its order."""

    def __init__(self) -> None:
        self.work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.is_running = False

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        self.work.append((done, task))
        if not self.is_running:
            self.is_running = True
            while self.work:
                future, task = self.work.popleft()
                try:
                    future.set_result(task())
                except Exception as err:
                    future.set_exception(err)
            self.is_running = False
        return done


class Clock:
    """The time, and the engines that it passes for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engines: list[SimulatedEngine] = []

    def wait(self, future: Future[Any]) -> Any:
        """Let time pass until this is done."""
        while not future.done():
            if not self.pass_until(math.inf):
                raise RuntimeError("nothing is sampled, and a group is waited for")
        return future.result()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.pass_until(end):
            pass

    def pass_until(self, end: float) -> bool:
        """Go to the next sample that ends before `end`, or to `end`; whether there is one."""
        engine = min(self.engines, key=DUE)
        if engine.due > end or engine.due == math.inf:
            self.now = end
            return False
        self.now = engine.due
        engine.collect()
        return True


DUE = attrgetter("due")


@dataclass(slots=True, kw_only=True)
class Work:
    """A group in an engine."""

    number: int
    prompt_tokens: int
    lengths: Sequence[int]
    begun: int = 0
    ended: int = 0
    versions: list[int]
    """Versions of the weights with which each sample began."""


class SimulatedEngine:
    """Continuous batching with a limited number of running samples; implements what a dispatcher calls."""

    def __init__(self, clock: Clock, slots: int, lengths: np.ndarray) -> None:
        self.clock, self.slots, self.lengths = clock, slots, lengths
        self.running: list[tuple[float, int, int]] = []
        """A heap: the token of `decoded` after which a sample ends, the number of its group, its place there."""
        self.waiting: deque[tuple[int, int]] = deque()
        self.work: dict[int, Work] = {}
        self.decoded = self.time = self.reading_s = self.slot_s = 0.0
        self.begun_at: dict[tuple[int, int], float] = {}
        self.prompt_tokens = self.version = 0
        self.is_paused, self.has_new_weights = True, False
        self.ready = done()
        self.draining: Future[None] | None = None
        self.due = math.inf
        self.finished: list[Work] = []
        self.polling: Future[Completions] | None = None

    def token_s(self) -> float:
        return TOKEN_S + SAMPLE_S * len(self.running) + PROMPT_S * self.prompt_tokens

    def stands_still(self) -> bool:
        return self.is_paused and self.draining is None

    def look_ahead(self) -> None:
        """Find out when the next sample ends. After every change."""
        self.due = math.inf
        if self.running and not self.stands_still():
            self.due = self.time + self.reading_s + (self.running[0][0] - self.decoded) * self.token_s()

    def move(self) -> None:
        """Do what fits into the time that has passed."""
        passed, self.time = self.clock.now - self.time, self.clock.now
        if self.stands_still() or not self.running:
            return
        self.slot_s += passed * len(self.running)
        read = min(passed, self.reading_s)
        self.reading_s -= read
        self.decoded += (passed - read) / self.token_s()

    def fill(self) -> None:
        """Begin as many samples as there are slots."""
        while self.waiting and len(self.running) < self.slots and not self.stands_still():
            number, place = self.waiting.popleft()
            work = self.work[number]
            if not work.begun:
                self.reading_s += work.prompt_tokens / READ_RATE
            work.begun += 1
            work.versions.append(self.version)
            self.prompt_tokens += work.prompt_tokens
            self.begun_at[number, place] = self.decoded
            heapq.heappush(self.running, (self.decoded + work.lengths[place], number, place))
        self.look_ahead()

    def collect(self) -> None:
        """Hand over what has ended."""
        self.move()
        while self.running and self.running[0][0] <= self.decoded + 1e-6:
            _, number, place = heapq.heappop(self.running)
            work = self.work[number]
            del self.begun_at[number, place]
            self.prompt_tokens -= work.prompt_tokens
            work.ended += 1
            if work.ended == len(work.lengths):
                self.finished.append(self.work.pop(number))
        self.fill()
        self._hand_over()
        if self.draining is not None and not self.work:
            drained, self.draining = self.draining, None
            drained.set_result(None)

    def submit(self, batch: PromptBatch) -> Future[None]:
        self.move()
        for number, first, end in zip(batch.numbers.tolist(), batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            lengths = self.lengths[batch.tokens[first]].tolist()
            self.work[number] = Work(number=number, prompt_tokens=int(end - first) - 1, lengths=lengths, versions=[])
            self.waiting.extend((number, place) for place in range(len(lengths)))
        self.fill()
        return done()

    def poll(self, gather_s: float = 0.0) -> Future[Completions]:
        assert self.polling is None
        poll = self.polling = Future()
        self._hand_over()
        return poll

    def pause(self, how: Pause) -> Future[None]:
        self.move()
        self.is_paused, self.has_new_weights = True, how == "recompute"
        paused = self.draining = None if how != "drain" or not self.work else Future()
        self.look_ahead()
        return paused or done()

    def resume(self) -> Future[None]:
        self.move()
        if self.is_paused and self.has_new_weights:
            self.reading_s += sum(self.decoded - begun for begun in self.begun_at.values()) / READ_RATE
            self.reading_s += sum(self.work[n].prompt_tokens for n in {n for n, _ in self.begun_at}) / READ_RATE
        self.is_paused = False
        self.fill()
        return done()

    def _hand_over(self) -> None:
        if self.polling is None or not self.finished:
            return
        works, self.finished = self.finished, []
        poll, self.polling = self.polling, None
        lengths = np.concatenate([work.lengths for work in works])
        versions = np.concatenate([work.versions for work in works])
        total = int(lengths.sum())
        poll.set_result(
            {
                "numbers": np.array([work.number for work in works]),
                "sizes": np.array([len(work.lengths) for work in works]),
                "tokens": np.broadcast_to(np.int32(0), total),
                "logprobs": np.broadcast_to(np.float32(0), total),
                "policy_versions": np.repeat(versions.astype(np.int32), lengths),
                "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]),
                "finish_reasons": np.full(len(lengths), FINISH_REASONS.index("stop"), np.int8),
            }
        )


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class SimulatedDispatcher(Dispatcher):
    """Whoever waits lets time pass."""

    clock: Clock

    def wait(self, future: Future[Any]) -> Any:
        return self.clock.wait(future)


class RefillingProducer(Producer):
    """Replaces groups as soon as they have given their places back, also where sampling and training take turns."""

    def _refill(self) -> None:
        if self.is_running and self.groups.has_room:
            self._admit()


class MadeUpRewards:
    """Rewards that differ within a group, or that do not."""

    weights: dict[str, float] = {}  # noqa: RUF012
    functions: tuple[str, ...] = ()
    scale = None

    def __init__(self, is_useful: np.ndarray) -> None:
        self.is_useful = is_useful

    def score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        def scores(group: RolloutGroup) -> tuple[Score, ...]:
            differ = self.is_useful[group.prompt.id[1]]
            return tuple(Score(reward=float(differ and place % 2)) for place in range(len(group.completions)))

        return ScoredBatch(groups=[ScoredGroup(group=group, scores=scores(group)) for group in groups])

    def metrics(self) -> dict[str, float]:
        return {}


# ---- other ways to choose an engine


class RoundRobin(Loads):
    """Each group to the engine after the last one's, or to the next after that which has room."""

    def __init__(self, samples_per_engine: int | None, *, on_change: Callable[[], None]) -> None:
        super().__init__(samples_per_engine, on_change=on_change)
        self.last = -1

    def give(self, request: Request, engines: Collection[int]) -> tuple[int, int] | None:
        for engine in sorted(engines, key=lambda number: (number <= self.last, number)):
            if given := super().give(request, [engine]):
                self.last = engine
                return given
        return None


class FewestGroups(Loads):
    """Each group to the engine that has the fewest."""

    def cost(self, request: Request) -> float:
        return 1.0


# ---- a run


def config_of(case: Case, setting: Setting) -> Config:
    """The settings of a run that is a little longer than what is reported."""
    batch = setting.groups * setting.samples
    return from_values(
        {
            "num_unique_prompts_rollout": setting.groups,
            "num_samples_per_prompt_rollout": setting.samples,
            "response_length": setting.longest,
            "pack_length": 2 * setting.longest + 4096,
            "max_prompt_token_length": setting.longest,
            "total_episodes": (setting.steps + 16) * batch,
            "async_steps": case.ahead,
            "inflight_updates": case.ahead > 0 and case.pauses != "drain",
            "active_sampling": case.useful < 1.0,
            "active_sampling_oversample": case.oversample,
            "vllm_num_engines": setting.engines,
            "vllm_max_num_seqs": setting.slots,
            "use_vllm_logprobs": True,
            "shuffle_dataset": False,
        }
        | ({} if case.bound is None else {"max_staleness": case.bound})
    )


def prompt_lengths(kind: str, count: int, random: np.random.Generator, setting: Setting) -> np.ndarray:
    """`[count]` int64."""
    if kind == "varied":
        return np.minimum(random.lognormal(math.log(1000), 1.5, count), 32768).astype(int) + 1
    if kind == "two long":
        lengths = np.full(count, 256)
        for first in range(0, count, setting.groups):
            lengths[first + random.choice(min(setting.groups, count - first), 2, replace=False)] = 32768
        return lengths
    assert kind == "short"
    return np.zeros(count, int)


def simulate(case: Case, setting: Setting, seed: int) -> dict[str, float]:
    """The figures of one run."""
    random = np.random.default_rng(seed)
    count = 4 * (setting.steps + 16) * setting.groups
    mu = math.log(setting.mean) - setting.sigma**2 / 2
    drawn = random.lognormal(mu, setting.sigma, (count, setting.samples))
    lengths = np.minimum(drawn, setting.longest - 1).astype(int) + 1
    is_useful = random.random(count) < case.useful
    read = prompt_lengths(case.prompts, count, random, setting)

    def prompt(prompt_id: PromptId) -> Prompt:
        # Its first token is its number: by that the engine knows which answers are its own.
        row = prompt_id[1]
        tokens = np.full(read[row] + 1, row, np.int32)
        return Prompt(id=prompt_id, tokens=tokens, text="", verifiers=(), ground_truths=())

    config, clock = config_of(case, setting), Clock()
    clock.engines = [SimulatedEngine(clock, setting.slots, lengths) for _ in range(setting.engines)]
    fleet = Fleet(Roster(clock.engines, config.engine), seed=seed, pauses=case.pauses)
    limit = _samples_per_engine(config)
    dispatcher = SimulatedDispatcher(
        fleet,
        config.rollout,
        run_seed=seed,
        decode=lambda tokens: [""] * len(tokens),
        stop_token_ids=(),
        samples_per_engine=limit,
    )
    dispatcher.clock, dispatcher.loads = clock, case.loads(limit, on_change=dispatcher.loads.on_change)
    dispatcher.thread = Inline()
    make = RefillingProducer if case.refills_at_once else Producer
    sampler = Sampler(count, seed, shuffle=False)
    producer = make(config, sampler, prompt=prompt, dispatcher=dispatcher, rewarder=MadeUpRewards(is_useful))
    producer.scoring.thread = dispatcher.thread

    ages, token_ages, trained, useless = [], [], [], 0
    for step in range(setting.steps):
        producer.begin()
        rollouts = clock.wait(producer.take())
        stream, chosen = producer.groups.stream, producer.groups.chosen
        ages += [step - stream.born[number] for number in chosen if number in stream.born]
        token_ages += [step - min(int(c.policy_versions[0]) for c in s.group.completions) for s in rollouts.groups]
        trained += [scored.group.prompt.id for scored in rollouts.groups]
        useless += len(rollouts.dropped)
        producer.hand_over(prepare=True)
        clock.sleep(setting.train_s)
        if config.max_age:
            producer.pause()
        clock.sleep(setting.sync_s)
        for engine in clock.engines:
            engine.move()
            engine.version = step + 1

    # Every prompt that was begun has been trained on, has given its place back, or is still out.
    out = {group.prompt.id for group in producer.groups.out.values() if group.prompt}
    begun = producer.groups.sampler.state_dict()["position"]
    returned = useless + len(producer.groups.returned)
    assert len(set(trained)) == len(trained) == setting.steps * setting.groups and not out & set(trained)
    assert max(token_ages) <= max(ages) <= config.max_age
    return {
        "s_per_step": clock.now / setting.steps,
        "learner_busy": setting.steps * setting.train_s / clock.now,
        "slots_used": sum(engine.slot_s for engine in clock.engines) / (clock.now * setting.engines * setting.slots),
        "age_mean": float(np.mean(ages)),
        "age_max": max(ages),
        "groups_thrown_away": begun - len(trained) - len(out) - returned,
        "groups_without_signal": returned,
    }


# ---- what is compared

ORDER, ACTIVE, DISPATCH = "order", "active sampling", "dispatch"
TITLES = {
    ORDER: "async_steps / max_staleness",
    ACTIVE: "active sampling, 60 % of the groups are useful",
    DISPATCH: "choice of an engine",
}
PROMPTS = {"two long": "two prompts of 32k among 62 of 256", "varied": "prompts of 25 to 32k tokens, median 1,000"}


def cases() -> list[Case]:
    """All rows, in order."""
    order = [
        Case(table=ORDER, name="0 (synchronous)"),
        Case(table=ORDER, name="1 / 1, drained", ahead=1, pauses="drain"),
        *(Case(table=ORDER, name=f"{a} / {b}", ahead=a, bound=b) for a, b in [(1, 1), (2, 2), (4, 4), (8, 8)]),
        *(Case(table=ORDER, name=f"{a} / {b}", ahead=a, bound=b) for a, b in [(1, 2), (2, 4), (4, 8)]),
        Case(table=ORDER, name="2 / 4, inflight_kv=recompute", ahead=2, bound=4, pauses="recompute"),
        Case(table=ORDER, name="2 / 4, drained", ahead=2, bound=4, pauses="drain"),
    ]
    some = replace(order[0], table=ACTIVE, useful=0.6)
    active = [
        replace(some, name="0, in rounds"),
        replace(some, name="0, replaced at once (mgrpo does not)", refills_at_once=True),
        replace(some, name="0, oversample 0.67", oversample=0.67),
        replace(some, name="2 / 4", ahead=2, bound=4),
    ]
    dispatch = [
        Case(table=DISPATCH, name=f"{steps}, {PROMPTS[kind]}: {how}", prompts=kind, loads=loads, **settings)
        for kind in PROMPTS
        for steps, settings in (("0", {}), ("2 / 4", {"ahead": 2, "bound": 4}))
        for how, loads in (("fewest tokens", Loads), ("fewest groups", FewestGroups), ("in turn", RoundRobin))
    ]
    return order + active + dispatch


def measure(case: Case, setting: Setting, seeds: int) -> dict[str, Any]:
    """A row: the means over seeds."""
    runs = [simulate(case, setting, seed) for seed in range(seeds)]
    mean = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
    seconds = [run["s_per_step"] for run in runs]
    greatest = {"s_per_step_least": min(seconds), "s_per_step_most": max(seconds)}
    greatest |= {name: max(run[name] for run in runs) for name in ("age_max", "groups_thrown_away")}
    assert greatest["groups_thrown_away"] == 0
    return {"table": case.table, "case": case.name} | mean | greatest


def cpu_model() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def show(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['case']:<66}{row['s_per_step']:>8.1f} ({row['s_per_step_least']:.1f} to {row['s_per_step_most']:.1f})"
        f"{row['learner_busy']:>7.2f}{row['age_mean']:>7.2f} / {row['age_max']}"
        f"{row['groups_thrown_away']:>4}{row['groups_without_signal']:>8.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small and short, to try the tool")
    parser.add_argument("--tables", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "stream.json")
    args = parser.parse_args()

    setting = Setting()
    if args.quick:
        small = {"engines": 4, "slots": 16, "groups": 16, "samples": 4, "steps": 10}
        setting = replace(setting, **small, mean=400, longest=3277, train_s=6.0, sync_s=0.5)
    rows: list[dict[str, Any]] = []
    for case in cases():
        if case.table not in args.tables:
            continue
        if not rows or rows[-1]["table"] != case.table:
            print(
                f"\n{TITLES[case.table]:<66}s/step (seeds), learners busy, age mean / max, groups thrown away, without signal"
            )
        rows.append(measure(case, setting, args.seeds))
        print(show(rows[-1]), flush=True)
    report = {
        "protocol": " ".join((__doc__ or "").split("\n\n", 2)[2].split()),
        "machine": {"cpu": cpu_model(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("mgrpo", "numpy")},
        "seeds": list(range(args.seeds)),
        "setting": asdict(setting),
        "results": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
