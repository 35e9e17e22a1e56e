"""Rank 0's work for many engines: choosing one for each group, its answers, signs of life, and who takes part in a weight sync.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tools/bench_control_plane.py [--sizes 64x1024 1000x16000]

Producer, groups, dispatcher, fleet, roster and heartbeat are mgrpo's own; engines and rewards are made up, and an engine hands over one group
a poll, the least that it may. Seconds are CPU seconds of the thread that does the work: the dispatcher's for groups, the caller's for the
rest. "choice" is that of an engine alone, "send" and "answer" all that the thread does for a group. Every size is a batch of `groups` groups, of which every engine has several at a time, in a run that trains one step behind; "failures"
is the same with an engine in fifty that is killed at random moments, and started again. "Before" looks at every engine for every group and
for every answer, and sorts all groups that are out for every score, as mgrpo did; both see the same answers in the same order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import FINISH_REASONS, Completions, Engine, EngineError, Pause, PromptBatch
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.heartbeat import Heartbeat
from mgrpo.rollout.engines.loads import Loads
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.stream import Stream
from mgrpo.run.produce.producer import Producer
from mgrpo.types import Prompt, PromptId, RewardContext, RolloutGroup, Score, ScoredBatch, ScoredGroup

ROOT = Path(__file__).resolve().parent.parent
SAMPLES, TOKENS = 2, 8
AT_A_TIME = 8
"""Groups of an engine at a time."""
AHEAD = 1
COSTS = ("choice_us_a_group", "send_us_a_group", "answer_us_a_group")


class MadeUpEngine:
    """Hands over one group a poll, when it is told to. Implements what a run calls."""

    def __init__(self) -> None:
        self.queued: list[int] = []
        self.polls: list[Future[Completions]] = []
        self.is_dead = False
        self.ready = self._done()

    def _done(self) -> Future[None]:
        done: Future[None] = Future()
        if self.is_dead:
            done.set_exception(EngineError("it was killed"))
        else:
            done.set_result(None)
        return done

    def submit(self, batch: PromptBatch) -> Future[None]:
        self.queued += batch.numbers.tolist()
        return self._done()

    def poll(self, gather_s: float = 0.0) -> Future[Completions]:
        poll: Future[Completions] = Future()
        if self.is_dead:
            poll.set_exception(EngineError("it was killed"))
        else:
            self.polls.append(poll)
        return poll

    def answer(self, chosen: random.Random) -> bool:
        """Hand over a group, if one is there and it was polled for."""
        if not self.queued or not self.polls:
            return False
        place = chosen.randrange(len(self.queued))
        self.queued[place], self.queued[-1] = self.queued[-1], self.queued[place]
        total = SAMPLES * TOKENS
        self.polls.pop().set_result(
            {
                "numbers": np.array([self.queued.pop()]),
                "sizes": np.array([SAMPLES]),
                "tokens": np.zeros(total, np.int32),
                "logprobs": np.zeros(total, np.float32),
                "policy_versions": np.zeros(total, np.int32),
                "cu_seqlens": np.arange(0, total + 1, TOKENS),
                "finish_reasons": np.full(SAMPLES, FINISH_REASONS.index("stop"), np.int8),
            }
        )
        return True

    def die(self) -> None:
        self.is_dead, polls, self.polls = True, self.polls, []
        for poll in polls:
            poll.set_exception(EngineError("it was killed"))

    def pause(self, how: Pause) -> Future[None]:
        return self._done()

    def resume(self) -> Future[None]:
        return self._done()

    def abort(self) -> Future[None]:
        return self._done()

    def withdraw(self, numbers: Sequence[int]) -> Future[None]:
        return self._done()

    def sleep(self) -> Future[None]:
        return self._done()

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        return self._done()

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        return self._done()

    def seed(self, seed: int) -> Future[None]:
        return self._done()

    def ping(self) -> Future[None]:
        return self._done()

    def close(self) -> None:
        pass


class MadeUpRewards:
    """Rewards that differ within a group."""

    weights: dict[str, float] = {}  # noqa: RUF012
    functions: tuple[str, ...] = ()
    scale = None

    def score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        scores = tuple(Score(reward=float(place)) for place in range(SAMPLES))
        return ScoredBatch(groups=[ScoredGroup(group=group, scores=scores) for group in groups])

    def metrics(self) -> dict[str, float]:
        return {}


# ---- as it was


class ScannedLoads(Loads[Any]):
    """Looks at every engine for every group, and sorts those that are busy for every answer."""

    def _idlest(self, samples: int) -> int | None:
        having_room = [n for n in self._engines if self._has_room(self.by_engine[n], samples)]
        if not having_room:
            return None
        return min(having_room, key=lambda number: (self.by_engine[number].cost, number))

    def is_busy(self, engine: int) -> bool:
        return engine in self.busy()


class ScannedRoster(Roster):
    """Makes the table of open engines for every answer."""

    @property
    def open(self) -> dict[int, Engine]:
        with self.lock:
            return {
                number: self.engines[number] for number in self.members.numbers(lambda m: m.state.value == "serving")
            }


class SortedStream(Stream):
    """Sorts all groups that are out for every score."""

    def choose(self) -> list[int] | None:
        chosen = sorted(self.born)[: self.group_count]
        if self.is_ordered:
            return chosen if len(chosen) == self.group_count and self.finished.issuperset(chosen) else None
        oldest_first = sorted(self.finished, key=lambda number: (self.born[number], number))
        chosen = sorted(oldest_first[: self.group_count])
        births = sorted(self.born[number] for number in self.born.keys() - set(chosen))
        in_time = all(
            born + self.bound >= self.steps + 1 + place // self.group_count for place, born in enumerate(births)
        )
        can_go = in_time or self.finished.issuperset(self.born)
        return chosen if len(chosen) == self.group_count and can_go else None


# ---- a run


def config_of(engines: int, groups: int) -> Config:
    """The settings of a run of two steps."""
    return from_values(
        {
            "num_unique_prompts_rollout": groups,
            "num_samples_per_prompt_rollout": SAMPLES,
            "response_length": TOKENS,
            "total_episodes": 2 * groups * SAMPLES,
            "async_steps": AHEAD,
            "max_staleness": AHEAD + 1,
            "inflight_updates": True,
            "use_vllm_logprobs": True,
            "vllm_num_engines": engines,
            "vllm_max_num_seqs": AT_A_TIME * SAMPLES,
            "shuffle_dataset": False,
        }
    )


def cpu_of(work: Callable[[], object]) -> float:
    """CPU seconds of a piece of work in this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def choice_us(loads: type[Loads[Any]], engines: int, request: Any, rounds: int = 4) -> float:
    """CPU microseconds of choosing an engine for a group and of striking it off, with every engine half full on average."""
    own, there = loads(AT_A_TIME * SAMPLES, on_change=lambda: None), dict.fromkeys(range(engines))

    def work() -> None:
        for _ in range(rounds):
            given = [own.give(request, there) for _ in range(AT_A_TIME * engines)]
            for place in given:
                assert place is not None, "as many groups as there are places"
                own.finish(*place)

    return 1e6 * cpu_of(work) / (rounds * AT_A_TIME * engines)


def simulate(engines: int, groups: int, *, kills: int = 0, is_before: bool = False, seed: int = 0) -> dict[str, float]:
    """The CPU microseconds of one batch for each group, and the milliseconds of a heartbeat and of a sync's membership.

    Raises:
        AssertionError: a group came twice or never.
    """
    chosen, config = random.Random(seed), config_of(engines, groups)
    roster = (ScannedRoster if is_before else Roster)(
        [MadeUpEngine() for _ in range(engines)], config.engine, start=lambda number: MadeUpEngine()
    )
    fleet = Fleet(roster, seed=seed, seeds_prompts=True, pauses="keep")
    limit = AT_A_TIME * SAMPLES
    own = Dispatcher(
        fleet,
        config.rollout,
        run_seed=seed,
        decode=lambda tokens: [""] * len(tokens),
        stop_token_ids=(),
        samples_per_engine=limit,
    )
    if is_before:
        own.loads = ScannedLoads(limit, on_change=own.loads.on_change)

    def prompt(prompt_id: PromptId) -> Prompt:
        return Prompt(id=prompt_id, tokens=np.zeros(4, np.int32), text="", verifiers=(), ground_truths=())

    producer = Producer(config, Sampler(2 * groups, seed), prompt=prompt, dispatcher=own, rewarder=MadeUpRewards())
    if is_before:
        settled = producer.groups.stream
        producer.groups.stream = SortedStream(
            **{name: getattr(settled, name) for name in ("group_count", "num_steps", "ahead", "bound", "extra")}
        )

    def now() -> float:
        return own.thread.submit(time.thread_time).result()

    start = now()
    taking = producer.take()
    given = now()
    moments = sorted(chosen.sample(range(groups), kills), reverse=True)
    answered = 0
    while not taking.done():
        # Meanwhile the dispatcher's thread takes what it has been told.
        for engine in list(roster.engines):
            answered += engine.answer(chosen)
            if moments and answered >= moments[-1]:
                moments.pop()
                chosen.choice(roster.engines).die()
        own.thread.submit(int).result()
    done = now()
    rollouts = taking.result()
    taken = [scored.group.prompt.id for scored in rollouts.groups]
    assert len(set(taken)) == len(taken) == groups, "every group once"
    assert roster.num_deaths <= kills and not moments

    heartbeat = Heartbeat(roster, patience_s=30.0)
    beat_s = cpu_of(lambda: heartbeat.beat(heartbeat.beat_s))

    def sync() -> None:
        seats = fleet.begin_sync()
        calls = fleet.receive_weights(fleet.seated(seats), 1, check=False, step=1)
        fleet.end_sync(1, calls, fleet.finish(calls, "receive weights"))

    sync_s = cpu_of(sync)
    roster.close()
    own.thread.close()
    asked = own.for_training(0, prompt((0, 0)), print, failed=print)
    return {
        "choice_us_a_group": choice_us(ScannedLoads if is_before else Loads, engines, asked),
        "send_us_a_group": 1e6 * (given - start) / groups / (AHEAD + 1),
        "answer_us_a_group": 1e6 * (done - given) / max(answered, 1),
        "heartbeat_ms": 1e3 * beat_s,
        "sync_members_ms": 1e3 * sync_s,
        "deaths": roster.num_deaths,
        "groups_again": rollouts.engine_metrics["engines/replayed_groups"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["64x1024", "256x4096", "1000x16000"], help="engines x groups")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "control_plane.json")
    args = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    simulate(8, 64)  # what is imported at the first call
    print(
        f"{'engines':>8}{'groups':>8} {'':<10}{'choice us':>10}{'send us':>9}{'answer us':>10}{'beat ms':>9}{'sync ms':>9}{'deaths':>7}"
    )
    for size in args.sizes:
        engines, groups = map(int, size.split("x"))
        cases = {"before": {"is_before": True}, "now": {}, "failures": {"kills": max(1, engines // 50)}}
        for name, settings in cases.items():
            row = {"engines": engines, "groups": groups, "case": name} | simulate(engines, groups, **settings)
            rows.append(row)
            print(
                f"{engines:>8}{groups:>8} {name:<10}{row['choice_us_a_group']:>10.1f}{row['send_us_a_group']:>9.1f}{row['answer_us_a_group']:>10.1f}"
                f"{row['heartbeat_ms']:>9.2f}{row['sync_members_ms']:>9.2f}{row['deaths']:>7}",
                flush=True,
            )
    for before, now in itertools.pairwise(rows):
        if now["case"] == "now":
            now["times_less"] = {name: before[name] / now[name] for name in COSTS}
            less = ", ".join(f"{name.split('_')[0]} {ratio:.1f}" for name, ratio in now["times_less"].items())
            print(f"{now['engines']} engines, times less for a group: {less}")
    report = {
        "protocol": " ".join((__doc__ or "").split("\n\n", 2)[2].split()),
        "machine": {"cpus": os.cpu_count(), "load_before": load},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("mgrpo", "numpy")},
        "results": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
