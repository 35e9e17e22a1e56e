"""Lengths into the fewest packs of bounded size.

Knows lengths and indices only. Every index comes out exactly once, and equal input gives equal output.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

SEARCH_STEPS = 200
"""Packs the search may take back before it gives up: enough to settle a few dozen documents, a few ms for hundreds."""
SEARCHED_PACKS = 1000
"""Most packs the search is tried for: beyond, it costs a second and more, and best fit is a fraction of a percent off."""
WINDOW = 64
"""Documents the search considers at a time to fill up a pack: more cost time and find hardly anything."""


def pack(lengths: Sequence[int], pack_length: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Indices of `lengths` in as few packs as can be found: see `fewest_packs`.

    Args:
        pack_length: most tokens in a pack, including the padding to a multiple of `multiple_of`.
    """
    limit = token_limit(pack_length, multiple_of)
    lengths = checked(lengths, limit)
    return fewest_packs(range(len(lengths)), lengths, limit)


def token_limit(pack_length: int, multiple_of: int) -> int:
    """Most tokens of documents in a pack: a full pack must still be able to end at a multiple of `multiple_of`."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} must be at least 1")
    if pack_length < multiple_of:
        raise ValueError(
            f"pack_length={pack_length} is less than the {multiple_of} tokens a pack is padded to a multiple of"
        )
    return pack_length // multiple_of * multiple_of


def checked(lengths: Sequence[int], limit: int) -> list[int]:
    """`lengths` as plain integers, each of which fits into a pack."""
    lengths = [int(length) for length in lengths]
    for index, length in enumerate(lengths):
        if length > limit:
            raise ValueError(
                f"document {index} has {length} tokens, more than the {limit} a pack can hold; raise pack_length or "
                "lower response_length or max_prompt_token_length"
            )
        if length < 0:
            raise ValueError(f"document {index} has {length} tokens")
    return lengths


def longest_first(members: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """`members` by falling length, equals by index."""
    return sorted(members, key=lambda index: (-lengths[index], index))


def fewest_packs(members: Iterable[int], lengths: list[int], limit: int, *, count_in: int = 1) -> list[list[int]]:
    """`members` in packs of at most `limit` tokens, few enough that no smaller multiple of `count_in` is known to do.

    Best fit is within a pack or two of the fewest on common lengths. Where `lower_bound` leaves it open whether fewer
    would do, a search decides: nearly always for a few dozen documents, mostly for hundreds.
    """
    order = longest_first(members, lengths)
    packs = _best_fit(order, lengths, limit)
    low = -(-lower_bound([lengths[index] for index in order], limit) // count_in)
    high = -(-len(packs) // count_in)
    while low < high:
        middle = (low + high) // 2
        fewer = _search(order, lengths, limit, middle * count_in)
        if fewer is None:
            low = middle + 1
        else:
            packs, high = fewer, middle
    return [sorted(chosen) for chosen in packs]


def lower_bound(lengths: Sequence[int], limit: int) -> int:
    """A number of packs that no packing can undercut (Martello and Toth's L2, Discrete Applied Mathematics 28, 1990).

    Documents longer than limit / 2 need a pack each. For any threshold t up to limit / 2, documents of t tokens or more
    fit only beside those of at most limit - t; what the room there cannot take needs packs of its own. Second, of
    documents of at least t tokens no pack holds more than limit / t.
    """
    if not len(lengths):
        return 0
    rising = np.sort(np.asarray(lengths, dtype=np.int64))
    total = np.concatenate([[0], np.cumsum(rising)])
    thresholds = np.unique(np.append(rising[2 * rising <= limit], 0))
    half = np.searchsorted(rising, limit // 2, side="right")
    small = np.searchsorted(rising, thresholds, side="left")
    alone = np.searchsorted(rising, limit - thresholds, side="right")
    room_beside = (alone - half) * limit - (total[alone] - total[half])
    rest = total[half] - total[small] - room_beside
    by_room = len(rising) - half + np.maximum(0, -(-rest // limit))
    by_number = -(-np.arange(len(rising), 0, -1) // (limit // np.maximum(rising, 1)))
    return int(max(by_room.max(), by_number.max()))


def _best_fit(order: list[int], lengths: list[int], limit: int) -> list[list[int]]:
    """Each document, longest first, into the fullest pack that has room."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, pack), rising
    for index in order:
        place = bisect_left(rooms, (lengths[index],))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = limit, len(packs)
            packs.append([])
        packs[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return packs


def _search(order: list[int], lengths: list[int], limit: int, count: int) -> list[list[int]] | None:
    """`order`, longest first, in `count` packs, or None if none were found: depth first, pack by pack.

    Each pack starts with the longest document left, which has to go somewhere, and is filled up in every way that
    wastes no more room than all packs together can spare (Korf's bin completion, AAAI 2002).
    """
    spare = count * limit - sum(lengths[index] for index in order)
    if spare < 0 or count > SEARCHED_PACKS:
        return None
    packs: list[list[int]] = []
    open_choices = [_next_packs(order, lengths, limit, count, spare)]
    steps = count + SEARCH_STEPS
    while open_choices and steps:
        choice = next(open_choices[-1], None)
        if choice is None:
            open_choices.pop()
            if packs:
                packs.pop()
            continue
        steps -= 1
        chosen, left, spare = choice
        packs.append(chosen)
        if not left:
            return packs
        open_choices.append(_next_packs(left, lengths, limit, count - len(packs), spare))
    return None


def _next_packs(
    left: list[int], lengths: list[int], limit: int, count: int, spare: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """Ways to make one of the last `count` packs out of `left`: its documents, what is left then, and the spare room.

    Full packs come first, and of these the ones with long documents: short ones fill the last packs more easily. Full
    means at most twice the pack's share of the spare room empty.
    """
    if not count:
        return
    room = limit - lengths[left[0]]
    fitting = bisect_left(left, -room, lo=1, key=lambda index: -lengths[index])
    places = list(range(fitting, len(left)))
    if len(places) > WINDOW:
        # The longest that fit, and some of every length to end with.
        tail = len(places) - 3 * WINDOW // 4
        step = tail / (WINDOW // 4)
        places = places[:-tail] + [places[-1 - int(step * i)] for i in reversed(range(WINDOW // 4))]
    sizes = [lengths[left[place]] for place in places]
    least = max(0, room - spare)
    full = max(least, room - 2 * spare // count)
    for low, high in ((full, room), (least, full - 1)):
        for numbers in _subsets(sizes, low, high):
            taken = [0] + [places[number] for number in numbers]
            chosen = [left[place] for place in taken]
            rest = left.copy()
            for place in reversed(taken):
                del rest[place]
            yield chosen, rest, spare - limit + sum(lengths[index] for index in chosen)


def _subsets(sizes: list[int], low: int, high: int) -> Iterator[list[int]]:
    """Every choice of falling `sizes` that sums to `low` .. `high`, as numbers; longest documents first, equals once."""
    if low > high:
        return
    # Bit s of reachable[n] says that some of the last n sizes sum to s: no branch of the walk ends in nothing.
    reachable = [1]
    for size in reversed(sizes):
        reachable.append((reachable[-1] | reachable[-1] << size) & (1 << high + 1) - 1)

    def walk(number: int, least: int, most: int) -> Iterator[list[int]]:
        previous = None
        for taken in range(number, len(sizes)):
            size = sizes[taken]
            if size > most or size == previous:
                continue
            previous = size
            rest = max(0, least - size)
            if reachable[len(sizes) - taken - 1] >> rest & (1 << most - size - rest + 1) - 1:
                for others in walk(taken + 1, least - size, most - size):
                    yield [taken, *others]
        if least <= 0:
            yield []

    yield from walk(0, low, high)
