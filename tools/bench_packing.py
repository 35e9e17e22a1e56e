"""How even, how full and how fast packing is, compared with other trainers and with a long search.

    python tools/bench_packing.py

Every method gets the same documents and has to spread them over data-parallel ranks and micro-batches of at most
pack_length tokens. The step takes as long as its costliest rank: "max/mean" is that rank's cost over the mean, "bound"
its cost over a lower bound for any assignment of the trained documents. Writes benchmarks/packing.json.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mgrpo.packing import Cost, balance

Ranks = list[list[list[int]]]
"""[rank][micro-batch][index]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Documents of one optimizer step."""

    lengths: list[int]
    pack_length: int
    dp: int
    cost: Cost


def long_answers(rng: np.random.Generator, count: int) -> list[int]:
    """Log-normal, median 7,000 tokens, a tail up to 32k."""
    return np.clip(rng.lognormal(np.log(7000), 0.9, count), 64, 32768).astype(int).tolist()


def short_answers(rng: np.random.Generator, count: int) -> list[int]:
    """Maths answers: mean 200 tokens, cut at 512."""
    return np.clip(rng.gamma(2, 100, count), 5, 512).astype(int).tolist()


def equal_answers(rng: np.random.Generator, count: int) -> list[int]:
    return [1000] * count


def one_giant(rng: np.random.Generator, count: int) -> list[int]:
    """One document of 32k among tiny ones."""
    return [32768, *rng.integers(20, 200, count - 1).tolist()]


LENGTHS: dict[str, tuple[Callable[[np.random.Generator, int], list[int]], int]] = {
    "log-normal to 32k": (long_answers, 35840),
    "maths, mean 200": (short_answers, 2048),
    "constant 1000": (equal_answers, 4096),
    "one giant, tiny": (one_giant, 35840),
}
"""Name -> (lengths, pack_length)."""


def next_fit(lengths: list[int], limit: int) -> list[list[int]]:
    """Packs cut from the documents in their order; one longer than the limit has a pack of its own."""
    packs: list[list[int]] = [[]]
    used = 0
    for index, length in enumerate(lengths):
        if packs[-1] and used + length > limit:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += length
    return packs


def first_fit_decreasing(lengths: list[int], limit: int) -> list[list[int]]:
    packs: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        number = next((n for n, room in enumerate(rooms) if room >= lengths[index]), len(packs))
        if number == len(packs):
            packs.append([])
            rooms.append(limit)
        packs[number].append(index)
        rooms[number] -= lengths[index]
    return packs


def differencing(weights: list[float], num_parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method, for several parts.

    Starts with one partition for each weight (or, for equal counts, for each `num_parts` weights of similar size) and
    joins the two most uneven ones, heavy parts with light parts, until one is left.
    """
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    step = num_parts if equal_counts else 1
    uneven: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), step)):
        parts = [(weights[index], [index]) for index in order[start : start + step]]
        parts += [(0.0, [])] * (num_parts - len(parts))
        uneven.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(uneven)
    while len(uneven) > 1:
        _, number, heavy_first = heapq.heappop(uneven)
        _, _, other = heapq.heappop(uneven)
        parts = [
            (left + right, mine + yours)
            for (left, mine), (right, yours) in zip(heavy_first, reversed(other), strict=True)
        ]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(uneven, (parts[-1][0] - parts[0][0], number, parts))
    return [members for _, members in uneven[0][2]]


def by_mgrpo(batch: Batch) -> Ranks:
    return balance(batch.lengths, batch.pack_length, dp=batch.dp, cost=batch.cost)[0]


def by_next_fit_dropping(batch: Batch) -> Ranks:
    """Open Instruct: the number of packs is rounded down to a multiple of dp, and what is left over is not trained."""
    share = sum(batch.lengths) // batch.dp
    packs = next_fit(batch.lengths, batch.pack_length if batch.dp == 1 else min(batch.pack_length, share))
    each = len(packs) // batch.dp
    return [packs[rank * each : (rank + 1) * each] for rank in range(batch.dp)]


def by_next_fit(batch: Batch) -> Ranks:
    """The same packs, filled up with dummies instead."""
    return consecutive(next_fit(batch.lengths, batch.pack_length), batch.dp)


def by_first_fit(batch: Batch) -> Ranks:
    """Fewer packs than next fit, handed out in turn."""
    packs = first_fit_decreasing(batch.lengths, batch.pack_length)
    packs += [[]] * (-len(packs) % batch.dp)
    return [packs[rank :: batch.dp] for rank in range(batch.dp)]


def by_differencing(batch: Batch) -> Ranks:
    """verl: equal counts of documents to each rank, then even micro-batches, which ignore the limit."""
    weights = [batch.cost.of(length) for length in batch.lengths]
    own = differencing(weights, batch.dp, equal_counts=len(weights) % batch.dp == 0)
    count = max(-(-sum(batch.lengths[index] for index in members) // batch.pack_length) for members in own)
    ranks = []
    for members in own:
        parts = differencing([weights[index] for index in members], count, equal_counts=False) if members else []
        ranks.append([[members[number] for number in part] for part in parts] + [[]] * (count - len(parts)))
    return ranks


def consecutive(packs: list[list[int]], dp: int) -> Ranks:
    each = -(-len(packs) // dp)
    packs = packs + [[]] * (each * dp - len(packs))
    return [packs[rank * each : (rank + 1) * each] for rank in range(dp)]


METHODS: dict[str, Callable[[Batch], Ranks]] = {
    "mgrpo": by_mgrpo,
    "next fit, dropping": by_next_fit_dropping,
    "next fit, dummies": by_next_fit,
    "first fit decreasing": by_first_fit,
    "Karmarkar-Karp": by_differencing,
}


def rank_costs(ranks: Ranks, batch: Batch) -> list[float]:
    return [sum(batch.cost.of(batch.lengths[index]) for own in packs for index in own) for packs in ranks]


def long_search(batch: Batch, ranks: Ranks, *, steps: int, seed: int) -> float:
    """Cost of the costliest rank after simulated annealing from `ranks`, at the same number of packs.

    Moves and swaps of single documents, accepted by the sum of squared rank costs; starts hot enough to forget its
    starting point. The best of all states counts, including the first.
    """
    rng = random.Random(seed)
    lengths = batch.lengths
    per_rank = len(ranks[0])
    packs = [own for packs in ranks for own in packs]
    pack_of = {index: number for number, own in enumerate(packs) for index in own}
    room = [batch.pack_length - sum(lengths[index] for index in own) for own in packs]
    spent = rank_costs(ranks, batch)
    costs = [batch.cost.of(length) for length in lengths]
    best = max(spent)
    mean = sum(spent) / len(spent)
    hot, cold = (0.2 * mean) ** 2, (2e-4 * mean) ** 2
    for step in range(steps):
        first = rng.randrange(len(lengths))
        if rng.random() < 0.8:
            second = rng.randrange(len(lengths))
            target, size, worth = pack_of[second], lengths[second], costs[second]
        else:
            second, target, size, worth = None, rng.randrange(len(packs)), 0, 0.0
        source = pack_of[first]
        growth = lengths[first] - size
        if source == target or room[target] < growth or room[source] < -growth:
            continue
        giver, taker = source // per_rank, target // per_rank
        moved = costs[first] - worth if giver != taker else 0.0
        change = 2 * moved * (moved - spent[giver] + spent[taker])
        if change > 0 and rng.random() >= math.exp(-change / (hot * (cold / hot) ** (step / steps))):
            continue
        pack_of[first] = target
        if second is not None:
            pack_of[second] = source
        room[source] += growth
        room[target] -= growth
        spent[giver] -= moved
        spent[taker] += moved
        if change < 0:
            best = min(best, max(spent))
    return best


def measure(method: Callable[[Batch], Ranks], batch: Batch) -> dict[str, float]:
    start = time.process_time()
    ranks = method(batch)
    seconds = time.process_time() - start
    spent = rank_costs(ranks, batch)
    packs = [own for packs in ranks for own in packs]
    trained = [index for own in packs for index in own]
    each = [batch.cost.of(batch.lengths[index]) for index in trained]
    bound = max(sum(each) / batch.dp, max(each, default=0.0))
    return {
        "micro_batches": len(ranks[0]),
        "packs": len(packs),
        "packs_over_limit": sum(sum(batch.lengths[index] for index in own) > batch.pack_length for own in packs),
        "dropped_tokens": 1 - sum(batch.lengths[index] for index in trained) / sum(batch.lengths),
        "cost_max_over_mean": max(spent) / (sum(spent) / batch.dp) if trained else math.nan,
        "cost_max_over_bound": max(spent) / bound if trained else math.nan,
        "ms": seconds * 1e3,
    }


def gap(batch: Batch, *, steps: int, seed: int) -> float:
    """How much costlier our costliest rank is than that of a long search from our and from first fit's assignment."""
    ours = by_mgrpo(batch)
    starts = [ours]
    tight = by_first_fit(batch)
    if len(tight[0]) == len(ours[0]):
        starts.append(tight)
    best = min(long_search(batch, start, steps=steps, seed=seed) for start in starts)
    return max(rank_costs(ours, batch)) / best - 1


def compare(batches: list[Batch], *, search_steps: int) -> Iterator[dict[str, str | float]]:
    """Every method's means over batches of one kind, printed and returned; then how far ours is from the long search."""
    dp = batches[0].dp
    for method in METHODS:
        runs = [measure(METHODS[method], batch) for batch in batches]
        row = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        print(
            f"{dp:>4} {method:<22}{row['packs']:>8.1f}{row['packs_over_limit']:>8.1f}"
            f"{row['dropped_tokens']:>9.1%}{row['cost_max_over_mean']:>10.3f}"
            f"{row['cost_max_over_bound']:>8.3f}{row['ms']:>9.1f}",
            flush=True,
        )
        yield {"method": method, **row}
    # One rank leaves no choice, and thousands of documents reach the bound itself.
    if dp > 1 and len(batches[0].lengths) <= 1024 and search_steps:
        worst = max(gap(batch, steps=search_steps, seed=0) for batch in batches)
        print(f"{dp:>4} over the long search, worst of {len(batches)}: {worst:.2%}", flush=True)
        yield {"method": "mgrpo over long search", "gap": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 8, 32, 96])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search_steps", type=int, default=300_000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "benchmarks" / "packing.json")
    args = parser.parse_args()

    rows = []
    for name, (lengths_of, pack_length) in LENGTHS.items():
        for count in args.documents:
            print(f"\n{name}, {count} documents, pack_length {pack_length}")
            print(f"{'dp':>4} {'method':<22}{'packs':>8}{'over':>8}{'dropped':>9}{'max/mean':>10}{'bound':>8}{'ms':>9}")
            for dp in args.dp:
                batches = [
                    Batch(
                        lengths=lengths_of(np.random.default_rng(seed), count),
                        pack_length=pack_length,
                        dp=dp,
                        cost=Cost(),
                    )
                    for seed in range(args.seeds)
                ]
                case = {"lengths": name, "documents": count, "dp": dp}
                rows += [case | row for row in compare(batches, search_steps=args.search_steps)]
    report = {
        "protocol": (
            f"means over {args.seeds} seeds; cost = len + len^2 / (6 * 4096); ms of CPU time; long search: simulated "
            f"annealing, {args.search_steps} steps from mgrpo's and from first fit's assignment, worst seed"
        ),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "rows": rows,
    }
    # A method that trains nothing has no cost (NaN), which JSON cannot hold.
    rows[:] = [{key: None if value != value else value for key, value in row.items()} for row in rows]
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
