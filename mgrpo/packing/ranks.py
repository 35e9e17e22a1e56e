"""Documents onto mini-batches, data-parallel ranks and micro-batches, with even work.

A mini-batch is one optimizer step, at whose end its ranks wait for each other: the step takes as long as the costliest
rank, the sum of `Cost` over its documents. Every index comes out exactly once, and equal input gives equal output.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from mgrpo.packing.bins import checked, fewest_packs, longest_first, token_limit
from mgrpo.packing.cost import Cost

GOOD_ENOUGH = 1.001
"""Ratio to the least cost the costliest rank could have, at which exchanging documents ends."""
COMPARED = 128
"""Documents of a rank that are considered for an exchange; with more, a sample of every length is good enough."""

Packs = list[list[int]]


def balance(
    lengths: Sequence[int],
    pack_length: int,
    *,
    dp: int,
    num_mini_batches: int = 1,
    multiple_of: int = 1,
    micro_batches_multiple_of: int = 1,
    cost: Cost | None = None,
    epoch: int = 0,
    seed: int = 0,
) -> list[list[Packs]]:
    """Indices of `lengths` as [mini-batch][data-parallel rank][micro-batch].

    All ranks of a mini-batch have the same number of micro-batches, the fewest found to fit and at least one, rounded up
    to a multiple of `micro_batches_multiple_of`, costly ones first; an empty list stands for a dummy pack. Exactly `num_mini_batches` parts come out; see `mini_batches`.

    Args:
        pack_length: most tokens in a pack, including the padding to a multiple of `multiple_of`.
        cost: of a document, default `Cost()`.
        epoch, seed: which partition into mini-batches.
    """
    if dp < 1 or num_mini_batches < 1:
        raise ValueError(f"dp={dp} and num_mini_batches={num_mini_batches} must be at least 1")
    limit = token_limit(pack_length, multiple_of)
    lengths = checked(lengths, limit)
    cost = cost or Cost()
    costs = [cost.of(length) for length in lengths]
    parts = mini_batches(lengths, num_mini_batches, epoch=epoch, seed=seed)
    return [_to_ranks(members, lengths, costs, limit, dp, micro_batches_multiple_of) for members in parts]


def mini_batches(lengths: Sequence[int], num_mini_batches: int, *, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    """Which documents train in which optimizer step: as many tokens in each, to within the longest document.

    Epoch 0 deals the longest documents first; every later epoch deals them in an order shuffled by its number and
    `seed`, for another partition. A mini-batch is empty only when there are fewer documents than mini-batches.
    """
    order = longest_first(range(len(lengths)), lengths)
    if not epoch:
        return _spread(order, lengths, num_mini_batches)
    # The last documents dealt even out the rest: shuffling only those of similar length leaves the short ones last.
    rng = np.random.default_rng((seed, epoch))
    shuffled = np.argsort(-np.asarray(lengths) * 2 ** rng.uniform(0, 1, len(lengths)), kind="stable")
    parts = _spread(shuffled.tolist(), lengths, num_mini_batches)
    return [parts[number] for number in rng.permutation(num_mini_batches)]


def _spread(order: Iterable[int], sizes: Sequence[float], num_bins: int) -> Packs:
    """`num_bins` bins of even size: each index, in this order, into the emptiest bin."""
    bins: Packs = [[] for _ in range(num_bins)]
    # Bins of equal size are taken by their number of documents, so that documents of length 0 spread out too.
    emptiest = [(0, 0, number) for number in range(num_bins)]
    for index in order:
        size, count, number = emptiest[0]
        bins[number].append(index)
        heapq.heapreplace(emptiest, (size + sizes[index], count + 1, number))
    return [sorted(members) for members in bins]


def _to_ranks(
    members: list[int], lengths: list[int], costs: list[float], limit: int, dp: int, micro_batches_multiple_of: int
) -> list[Packs]:
    """[rank][micro-batch] of one mini-batch: the best of three first assignments, improved by exchanges."""
    packs = fewest_packs(members, lengths, limit, count_in=dp)
    count = max(1, -(-len(packs) // (dp * micro_batches_multiple_of))) * micro_batches_multiple_of
    found = [
        _to_cheapest(members, lengths, costs, limit, dp, count),
        _deal(packs, costs, dp, count),
        _in_order(members, lengths, limit, dp, count),
    ]
    ranks = min((ranks for ranks in found if ranks), key=lambda ranks: max(_costs(ranks, costs)))
    _exchange(ranks, lengths, costs, limit)
    return [_evened(packs, lengths, costs, limit) for packs in ranks]


def _costs(ranks: list[Packs], costs: list[float]) -> list[float]:
    return [sum(costs[index] for chosen in packs for index in chosen) for packs in ranks]


def _to_cheapest(
    members: list[int], lengths: list[int], costs: list[float], limit: int, dp: int, count: int
) -> list[Packs] | None:
    """Each document, longest first, to the cheapest rank with room, there into the fullest pack; None if one has no place."""
    ranks: list[Packs] = [[[] for _ in range(count)] for _ in range(dp)]
    rooms = [[(limit, number) for number in range(count)] for _ in range(dp)]  # (room, pack) of each rank, rising
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


def _deal(packs: Packs, costs: list[float], dp: int, count: int) -> list[Packs]:
    """`count` packs to each rank: costliest first, to the cheapest rank that may have one more; dummies fill up."""
    ranks: list[Packs] = [[] for _ in range(dp)]
    sizes = _costs([[chosen] for chosen in packs], costs)
    cheapest = [(0.0, rank) for rank in range(dp)]
    for number in sorted(range(len(packs)), key=lambda number: (-sizes[number], number)):
        spent, rank = heapq.heappop(cheapest)
        ranks[rank].append(packs[number])
        if len(ranks[rank]) < count:
            heapq.heappush(cheapest, (spent + sizes[number], rank))
    return [own + [[] for _ in range(count - len(own))] for own in ranks]


def _in_order(members: list[int], lengths: list[int], limit: int, dp: int, count: int) -> list[Packs] | None:
    """Next fit: packs cut from the documents as they come; None if that takes too many.

    Rarely the best, but what others train with: starting from it too, we are never worse.
    """
    packs: Packs = [[]]
    room = limit
    for index in members:
        if lengths[index] > room:
            packs.append([])
            room = limit
        packs[-1].append(index)
        room -= lengths[index]
    if len(packs) > dp * count:
        return None
    packs += [[] for _ in range(dp * count - len(packs))]
    return [packs[rank * count : (rank + 1) * count] for rank in range(dp)]


def _exchange(ranks: list[Packs], lengths: list[int], costs: list[float], limit: int) -> None:
    """Let the costliest rank swap a document with another rank, or hand one over, as long as that helps; in place."""
    spent = _costs(ranks, costs)
    least = max(sum(spent) / len(ranks), max((costs[i] for packs in ranks for own in packs for i in own), default=0))
    while True:
        by_cost = sorted(range(len(ranks)), key=lambda rank: (spent[rank], rank))
        costliest = by_cost.pop()
        if spent[costliest] <= GOOD_ENOUGH * least:
            return
        for other in by_cost:
            gain = _swap(ranks[costliest], ranks[other], lengths, costs, limit, spent[costliest] - spent[other])
            if gain:
                spent[costliest] -= gain
                spent[other] += gain
                break
        else:
            return


def _swap(giver: Packs, taker: Packs, lengths: list[int], costs: list[float], limit: int, difference: float) -> float:
    """Move half of `difference` in cost from one rank to the other as nearly as one swap can; the cost moved, or 0."""
    given, given_size, given_cost, given_room = _offers(giver, lengths, costs, limit)
    taken, taken_size, taken_cost, taken_room = _offers(taker, lengths, costs, limit)
    growth = given_size[:, None] - taken_size
    moved = given_cost[:, None] - taken_cost
    fits = (growth <= taken_room) & (-growth <= given_room[:, None])
    distance = np.where(fits, np.abs(moved - difference / 2), np.inf)
    i, j = np.unravel_index(distance.argmin(), distance.shape)
    # A swap has to lower the greater cost by a measurable part, or rounding could keep the exchange going for ever.
    if distance[i, j] >= difference / 2 * (1 - 1e-6):
        return 0.0
    (here, left), (there, right) = given[i], taken[j]
    for index, source, target in ((here, giver[left], taker[right]), (there, taker[right], giver[left])):
        if index is not None:
            source.remove(index)
            target.append(index)
    return float(moved[i, j])


def _offers(
    packs: Packs, lengths: list[int], costs: list[float], limit: int
) -> tuple[list[tuple[int | None, int]], np.ndarray, np.ndarray, np.ndarray]:
    """What a rank can put into a swap, as (document, its pack), with its length, its cost and the room in its pack.

    Beside its documents that is nothing (None), in each of its packs.
    """
    held = [(index, number) for number, own in enumerate(packs) for index in own]
    held.sort(key=lambda offer: (lengths[offer[0]], offer[0]))
    offers = [*held[:: len(held) // COMPARED + 1], *((None, number) for number in range(len(packs)))]
    room = [limit - sum(lengths[index] for index in own) for own in packs]
    return (
        offers,
        np.array([0 if index is None else lengths[index] for index, _ in offers]),
        np.array([0.0 if index is None else costs[index] for index, _ in offers]),
        np.array([room[number] for _, number in offers]),
    )


def _evened(packs: Packs, lengths: list[int], costs: list[float], limit: int) -> Packs:
    """A rank's packs with even cost if they can have it, costliest first.

    Even packs lower the peak of memory and leave a pipeline fewer gaps; and where ranks wait for each other in every
    micro-batch (expert parallelism, ZeRO-3), equals wait for equals.
    """
    even = _spread(longest_first((index for own in packs for index in own), lengths), costs, len(packs))
    if all(sum(lengths[index] for index in own) <= limit for own in even):
        packs = even
    return sorted((sorted(own) for own in packs), key=lambda own: (-sum(costs[index] for index in own), own))
