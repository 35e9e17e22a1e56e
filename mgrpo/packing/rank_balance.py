"""Documents onto mini-batches, data-parallel ranks and micro-batches, with even work.

A mini-batch is one optimizer step, at the end of which its ranks wait for each other: the step takes as long as the
costliest rank, the sum of `Cost` over its documents. Every index comes out exactly once, and equal input gives equal
output.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from mgrpo.packing.bins import Packs, best_fit, check_pack_length, checked, longest_first, next_fit
from mgrpo.packing.cost import Cost

GOOD_ENOUGH = 1.001
"""The exchange of documents ends when the costliest rank is within this ratio of the least cost it could have."""
COMPARED = 128
"""Approximate number of a rank's documents considered for a swap; of more, only every n-th by length."""


def balance(
    lengths: Sequence[int],
    pack_length: int,
    *,
    dp: int,
    num_mini_batches: int = 1,
    multiple_of: int = 1,
    micro_batches_multiple_of: int = 1,
    cost: Cost | None = None,
) -> list[list[Packs]]:
    """Indices of `lengths`: a list of mini-batches, of data-parallel ranks, of micro-batches.

    All ranks of a mini-batch have the same number of micro-batches: as many as `pack` needs, at least one, rounded up
    to a multiple of `micro_batches_multiple_of`. A rank's costly ones come first; an empty list stands for a dummy
    pack. Exactly `num_mini_batches` parts come out; see `mini_batches`.

    Args:
        lengths: tokens of each document.
        pack_length: maximum number of tokens in a pack, a multiple of `multiple_of`.
        dp: data-parallel ranks.
        num_mini_batches: optimizer steps that the documents are divided over.
        multiple_of: packs are padded to a multiple of this length.
        micro_batches_multiple_of: the number of micro-batches of a rank is rounded up to a multiple of this.
        cost: of a document, by which ranks are evened out; default `Cost()`.
    Returns:
        `result[mini_batch][rank][micro_batch]` is a list of indices of `lengths`.
    Raises:
        ValueError: a document is longer than a pack, or `pack_length` is not such a multiple.
    """
    if dp < 1 or num_mini_batches < 1:
        raise ValueError(f"dp={dp} and num_mini_batches={num_mini_batches} must be at least 1")
    check_pack_length(pack_length, multiple_of)
    lengths = checked(lengths, pack_length)
    cost = cost or Cost()
    costs = [cost.of(length) for length in lengths]
    parts = mini_batches(lengths, num_mini_batches)
    return [_to_ranks(members, lengths, costs, pack_length, dp, micro_batches_multiple_of) for members in parts]


def mini_batches(lengths: Sequence[int], num_mini_batches: int) -> list[list[int]]:
    """The documents of each optimizer step: equally many tokens in each, to within the longest document.

    The longest documents are dealt first. A mini-batch is empty only when there are fewer documents than mini-batches.
    """
    return _spread(longest_first(range(len(lengths)), lengths), lengths, num_mini_batches)


def _spread(order: Iterable[int], sizes: Sequence[float], num_bins: int) -> Packs:
    """`num_bins` bins of even size: each index, in this order, into the emptiest bin."""
    if num_bins == 1:
        return [sorted(order)]
    bins: Packs = [[] for _ in range(num_bins)]
    # Of equal bins the one with fewer documents comes first, so that documents of length 0 also spread out.
    emptiest: list[tuple[float, int, int]] = [(0.0, 0, number) for number in range(num_bins)]
    for index in order:
        size, count, number = emptiest[0]
        bins[number].append(index)
        heapq.heapreplace(emptiest, (size + sizes[index], count + 1, number))
    return [sorted(members) for members in bins]


def _to_ranks(
    members: list[int],
    lengths: list[int],
    costs: list[float],
    pack_length: int,
    dp: int,
    micro_batches_multiple_of: int,
) -> list[Packs]:
    """[rank][micro-batch] of one mini-batch: the best of three first assignments, improved by exchanges."""
    tight, consecutive = best_fit(members, lengths, pack_length), next_fit(members, lengths, pack_length)
    num_packs = min(len(tight), len(consecutive))
    count = max(1, -(-num_packs // (dp * micro_batches_multiple_of))) * micro_batches_multiple_of
    found = [
        _to_cheapest(members, lengths, costs, pack_length, dp, count),
        _deal(tight, costs, dp, count),
        _in_order(consecutive, dp, count),
    ]
    ranks = min((ranks for ranks in found if ranks), key=lambda ranks: max(_costs(ranks, costs)))
    _exchange(ranks, lengths, costs, pack_length)
    return [_evened(packs, lengths, costs, pack_length) for packs in ranks]


def _costs(ranks: list[Packs], costs: list[float]) -> list[float]:
    return [sum(map(costs.__getitem__, chain.from_iterable(packs))) for packs in ranks]


def _to_cheapest(
    members: list[int], lengths: list[int], costs: list[float], pack_length: int, dp: int, count: int
) -> list[Packs] | None:
    """Each document, longest first, to the cheapest rank with room, there into the fullest pack; None if one cannot."""
    ranks: list[Packs] = [[[] for _ in range(count)] for _ in range(dp)]
    # (room, pack) of each rank, ascending
    rooms = [[(pack_length, number) for number in range(count)] for _ in range(dp)]
    cheapest = [(0.0, 0, rank) for rank in range(dp)]
    for index in longest_first(members, lengths):
        passed_over = []
        while cheapest:
            spent, num_documents, rank = heapq.heappop(cheapest)
            if rooms[rank][-1][0] >= lengths[index]:
                break
            passed_over.append((spent, num_documents, rank))
        else:
            return None
        room, number = rooms[rank].pop(bisect_left(rooms[rank], (lengths[index],)))
        ranks[rank][number].append(index)
        insort(rooms[rank], (room - lengths[index], number))
        for entry in (*passed_over, (spent + costs[index], num_documents + 1, rank)):
            heapq.heappush(cheapest, entry)
    return ranks


def _deal(packs: Packs, costs: list[float], dp: int, count: int) -> list[Packs] | None:
    """`count` packs for each rank: costliest first, to the cheapest rank with fewer; the rest are empty packs.

    None if there are more packs than that.
    """
    if len(packs) > dp * count:
        return None
    ranks: list[Packs] = [[] for _ in range(dp)]
    sizes = _costs([[chosen] for chosen in packs], costs)
    cheapest = [(0.0, rank) for rank in range(dp)]
    for number in sorted(range(len(packs)), key=lambda number: (-sizes[number], number)):
        spent, rank = heapq.heappop(cheapest)
        ranks[rank].append(packs[number])
        if len(ranks[rank]) < count:
            heapq.heappush(cheapest, (spent + sizes[number], rank))
    return [own + [[] for _ in range(count - len(own))] for own in ranks]


def _in_order(packs: Packs, dp: int, count: int) -> list[Packs] | None:
    """`count` packs for each rank in their order; None if there are more.

    Rarely the best, but the order that other trainers use, so the result is never worse than theirs.
    """
    if len(packs) > dp * count:
        return None
    packs = packs + [[] for _ in range(dp * count - len(packs))]
    return [packs[rank * count : (rank + 1) * count] for rank in range(dp)]


def _exchange(ranks: list[Packs], lengths: list[int], costs: list[float], pack_length: int) -> None:
    """Swap a document of the costliest rank for another rank's, or move it there, as long as that helps; in place."""
    spent = _costs(ranks, costs)
    least = max(sum(spent) / len(ranks), max((costs[i] for packs in ranks for own in packs for i in own), default=0))
    while True:
        by_cost = sorted(range(len(ranks)), key=lambda rank: (spent[rank], rank))
        costliest = by_cost.pop()
        if spent[costliest] <= GOOD_ENOUGH * least:
            return
        for other in by_cost:
            gain = _swap(ranks[costliest], ranks[other], lengths, costs, pack_length, spent[costliest] - spent[other])
            if gain:
                spent[costliest] -= gain
                spent[other] += gain
                break
        else:
            return


def _swap(
    giver: Packs, taker: Packs, lengths: list[int], costs: list[float], pack_length: int, difference: float
) -> float:
    """The one swap that moves closest to half of `difference` in cost from giver to taker; the cost moved, or 0."""
    given, given_size, given_cost, given_room = _offers(giver, lengths, costs, pack_length)
    taken, taken_size, taken_cost, taken_room = _offers(taker, lengths, costs, pack_length)
    growth = given_size[:, None] - taken_size
    moved = given_cost[:, None] - taken_cost
    fits = (growth <= taken_room) & (-growth <= given_room[:, None])
    distance = np.where(fits, np.abs(moved - difference / 2), np.inf)
    i, j = np.unravel_index(distance.argmin(), distance.shape)
    # A swap has to lower the greater cost by a measurable part, or rounding errors could keep the exchange going
    # forever.
    if distance[i, j] >= difference / 2 * (1 - 1e-6):
        return 0.0
    (here, left), (there, right) = given[i], taken[j]
    for index, source, target in ((here, giver[left], taker[right]), (there, taker[right], giver[left])):
        if index is not None:
            source.remove(index)
            target.append(index)
    return float(moved[i, j])


def _offers(
    packs: Packs, lengths: list[int], costs: list[float], pack_length: int
) -> tuple[list[tuple[int | None, int]], np.ndarray, np.ndarray, np.ndarray]:
    """The offers of a rank for a swap, as (document, its pack), with its length, its cost and the room in its pack.

    A document of None offers a place in that pack and nothing in return.
    """
    held = [(index, number) for number, own in enumerate(packs) for index in own]
    held.sort(key=lambda offer: (lengths[offer[0]], offer[0]))
    offers = [*held[:: len(held) // COMPARED + 1], *((None, number) for number in range(len(packs)))]
    room = [pack_length - sum(lengths[index] for index in own) for own in packs]
    return (
        offers,
        np.array([0 if index is None else lengths[index] for index, _ in offers]),
        np.array([0.0 if index is None else costs[index] for index, _ in offers]),
        np.array([room[number] for _, number in offers]),
    )


def _evened(packs: Packs, lengths: list[int], costs: list[float], pack_length: int) -> Packs:
    """A rank's packs, evened out in cost where that is possible, costliest first.

    Even packs lower the peak of memory and leave a pipeline fewer gaps. Where ranks wait for each other in every
    micro-batch (expert parallelism, ZeRO-3), they also shorten the wait.
    """
    even = _spread(longest_first((index for own in packs for index in own), lengths), costs, len(packs))
    if all(sum(lengths[index] for index in own) <= pack_length for own in even):
        packs = even
    return sorted((sorted(own) for own in packs), key=lambda own: (-sum(costs[index] for index in own), own))
