"""Lengths into packs of bounded size, and packs onto mini-batches and data-parallel ranks.

Knows lengths and indices only. Every index comes out exactly once, and equal input gives equal output.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def pack(lengths: Sequence[int], pack_length: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Indices of `lengths` in few packs: longest first, each into the first pack with room.

    Args:
        pack_length: most tokens in a pack, including the padding to a multiple of `multiple_of`.
    """
    limit = token_limit(pack_length, multiple_of)
    lengths = _checked(lengths, limit)
    return _first_fit(range(len(lengths)), lengths, limit)


def balance(
    lengths: Sequence[int], pack_length: int, *, dp: int, num_mini_batches: int = 1, multiple_of: int = 1
) -> list[list[list[list[int]]]]:
    """Indices of `lengths` as [mini-batch][data-parallel rank][micro-batch], with even numbers of tokens.

    All ranks of a mini-batch have the same number of micro-batches, the fewest found to fit and at least one; an empty
    list stands for a dummy pack. A mini-batch is empty only when there are fewer documents than mini-batches.
    """
    if dp < 1 or num_mini_batches < 1:
        raise ValueError(f"dp={dp} and num_mini_batches={num_mini_batches} must be at least 1")
    limit = token_limit(pack_length, multiple_of)
    lengths = _checked(lengths, limit)
    mini_batches = _spread(range(len(lengths)), lengths, num_mini_batches)
    return [_micro_batches(members, lengths, limit, dp) for members in mini_batches]


def token_limit(pack_length: int, multiple_of: int) -> int:
    """Most tokens of documents in a pack: a full pack must still be able to end at a multiple of `multiple_of`."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} must be at least 1")
    if pack_length < multiple_of:
        raise ValueError(
            f"pack_length={pack_length} is less than the {multiple_of} tokens a pack is padded to a multiple of"
        )
    return pack_length // multiple_of * multiple_of


def _checked(lengths: Sequence[int], limit: int) -> list[int]:
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


def _longest_first(members: Iterable[int], lengths: list[int]) -> list[int]:
    return sorted(members, key=lambda index: (-lengths[index], index))


def _first_fit(members: Iterable[int], lengths: list[int], limit: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[int] = []
    order = _longest_first(members, lengths)
    shortest = lengths[order[-1]] if order else 0
    first_open = 0
    for index in order:
        length = lengths[index]
        # Packs that nothing fits into any more form a growing prefix in the usual case; without skipping it thousands of
        # documents would cost the square of their number.
        while first_open < len(packs) and room[first_open] < shortest:
            first_open += 1
        for number in range(first_open, len(packs)):
            if room[number] >= length:
                break
        else:
            number = len(packs)
            packs.append([])
            room.append(limit)
        packs[number].append(index)
        room[number] -= length
    return [sorted(members) for members in packs]


def _spread(
    members: Iterable[int], lengths: list[int], num_bins: int, limit: int | None = None
) -> list[list[int]] | None:
    """`num_bins` bins of even size: longest first, each into the emptiest bin; None if one would exceed `limit`."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # Bins of equal size are taken by their number of documents, so that documents of length 0 spread out too.
    emptiest = [(0, 0, number) for number in range(num_bins)]
    for index in _longest_first(members, lengths):
        size, count, number = emptiest[0]
        size += lengths[index]
        if limit is not None and size > limit:
            return None
        bins[number].append(index)
        heapq.heapreplace(emptiest, (size, count + 1, number))
    return [sorted(members) for members in bins]


def _micro_batches(members: list[int], lengths: list[int], limit: int, dp: int) -> list[list[list[int]]]:
    """[rank][micro-batch] of one mini-batch.

    Even packs are tried from the smallest count that could hold the tokens; first fit, which is uneven but packs tighter,
    bounds the count from above.
    """
    tight = _first_fit(members, lengths, limit)
    most = max(1, -(-len(tight) // dp))
    fewest = max(1, -(-sum(lengths[index] for index in members) // (limit * dp)))
    for num_micro_batches in range(fewest, most + 1):
        packs = _spread(members, lengths, num_micro_batches * dp, limit)
        if packs is not None:
            return _deal(packs, lengths, dp)
    return _deal(tight + [[] for _ in range(most * dp - len(tight))], lengths, dp)


def _deal(packs: list[list[int]], lengths: list[int], dp: int) -> list[list[list[int]]]:
    """The same number of packs to each rank, largest first to the rank with the fewest tokens.

    Large packs come first on every rank: memory peaks at the first micro-batch, and equals wait for equals.
    """
    sizes = [sum(lengths[index] for index in members) for members in packs]
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    lightest = [(0, rank) for rank in range(dp)]
    for number in sorted(range(len(packs)), key=lambda number: (-sizes[number], number)):
        size, rank = heapq.heappop(lightest)
        ranks[rank].append(packs[number])
        if len(ranks[rank]) < len(packs) // dp:
            heapq.heappush(lightest, (size + sizes[number], rank))
    return ranks
