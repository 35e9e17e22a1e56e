"""Lengths of documents, next fit, first fit, and a long search for the evenest ranks: what packing is compared with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

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


def by_mgrpo(batch: Batch) -> Ranks:
    return balance(batch.lengths, batch.pack_length, dp=batch.dp, cost=batch.cost)[0]


def by_first_fit(batch: Batch) -> Ranks:
    """Fewer packs than next fit, handed out in turn."""
    packs = first_fit_decreasing(batch.lengths, batch.pack_length)
    packs += [[]] * (-len(packs) % batch.dp)
    return [packs[rank :: batch.dp] for rank in range(batch.dp)]


def consecutive(packs: list[list[int]], dp: int) -> Ranks:
    each = -(-len(packs) // dp)
    packs = packs + [[]] * (each * dp - len(packs))
    return [packs[rank * each : (rank + 1) * each] for rank in range(dp)]


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


def gap(batch: Batch, *, steps: int, seed: int) -> float:
    """How much costlier our costliest rank is than that of a long search from our and from first fit's assignment."""
    ours = by_mgrpo(batch)
    starts = [ours]
    tight = by_first_fit(batch)
    if len(tight[0]) == len(ours[0]):
        starts.append(tight)
    best = min(long_search(batch, start, steps=steps, seed=seed) for start in starts)
    return max(rank_costs(ours, batch)) / best - 1
