"""Packs lengths into few packs of bounded size.

Works on lengths and indices only. Every index comes out exactly once, and equal input gives equal output.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

Packs = list[list[int]]


def pack(lengths: Sequence[int], pack_length: int, *, multiple_of: int = 1) -> Packs:
    """Indices of `lengths` in few packs: as many as `best_fit` or `next_fit` needs, whichever is fewer.

    Args:
        lengths: tokens of each document.
        pack_length: maximum number of tokens in a pack, a multiple of `multiple_of`.
        multiple_of: packs are padded to a multiple of this length.
    Returns:
        One list of indices for each pack.
    Raises:
        ValueError: a document is longer than a pack, or `pack_length` is not such a multiple.
    """
    check_pack_length(pack_length, multiple_of)
    lengths = checked(lengths, pack_length)
    members = range(len(lengths))
    return min(best_fit(members, lengths, pack_length), next_fit(members, lengths, pack_length), key=len)


def check_pack_length(pack_length: int, multiple_of: int) -> None:
    """Raise ValueError unless a full pack needs no padding; `Layout.round_up` gives a length that needs none."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} must be at least 1")
    if pack_length < 1 or pack_length % multiple_of:
        raise ValueError(
            f"pack_length={pack_length} must be a multiple of {multiple_of}, which packs are padded to; use "
            f"{max(-(-pack_length // multiple_of), 1) * multiple_of}"
        )


def checked(lengths: Sequence[int], pack_length: int) -> list[int]:
    """`lengths` as plain integers, each of which fits into a pack; else ValueError."""
    lengths = [int(length) for length in lengths]
    for index, length in enumerate(lengths):
        if length > pack_length:
            raise ValueError(
                f"document {index} has {length} tokens, more than the {pack_length} a pack can hold; raise pack_length "
                "or lower response_length or max_prompt_token_length"
            )
        if length < 0:
            raise ValueError(f"document {index} has {length} tokens")
    return lengths


def longest_first(members: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """`members` by decreasing length, ties by index."""
    return sorted(sorted(members), key=lengths.__getitem__, reverse=True)


def best_fit(members: Iterable[int], lengths: Sequence[int], pack_length: int) -> Packs:
    """Each document, longest first, into the fullest pack with room: close to the fewest packs on common lengths."""
    packs: Packs = []
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    for index in longest_first(members, lengths):
        place = bisect_left(rooms, (lengths[index],))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = pack_length, len(packs)
            packs.append([])
        packs[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return [sorted(chosen) for chosen in packs]


def next_fit(members: Iterable[int], lengths: Sequence[int], pack_length: int) -> Packs:
    """Packs cut from the documents in their order, as other trainers do."""
    packs: Packs = []
    room = -1
    for index in members:
        if lengths[index] > room:
            packs.append([])
            room = pack_length
        packs[-1].append(index)
        room -= lengths[index]
    return packs
