"""Boxes of HF tensors: the rank that writes each, and their completeness. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mgrpo.layout import least_loaded
from mgrpo.models.placement.boxes import Box, Shape


def assign(holdings: Sequence[Sequence[tuple[str, Box]]], itemsizes: Mapping[str, int]) -> list[list[int]]:
    """Choose one writer for every box, the bytes balanced over the ranks that hold it. Every rank computes the same.

    Args:
        holdings: for each rank the (kind, box) pairs it holds. Boxes of one kind and tensor are equal (replicas) or
            disjoint; anything else is a ValueError.
        itemsizes: bytes of one element of each kind.
    Returns:
        For each rank the indices of the boxes it writes, ascending.
    """
    holders: dict[tuple[str, Box], dict[int, int]] = {}
    for rank, held in enumerate(holdings):
        for index, item in enumerate(held):
            holders.setdefault(item, {}).setdefault(rank, index)
    _check_disjoint(holders)
    load = [0] * len(holdings)
    chosen: list[list[int]] = [[] for _ in holdings]

    # Boxes with one holder leave no choice and come first; then the largest, because a large one at the end
    # would upset the balance.
    def order(item: tuple[str, Box]) -> tuple[bool, int, str, str, Shape]:
        kind, box = item
        return len(holders[item]) > 1, -box.size * itemsizes[kind], kind, box.name, box.start

    for item in sorted(holders, key=order):
        writer = least_loaded(holders[item], load)
        load[writer] += item[1].size * itemsizes[item[0]]
        chosen[writer].append(holders[item][writer])
    return [sorted(indices) for indices in chosen]


def covers(boxes: Iterable[Box], shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError unless the boxes cover each tensor of `shapes` exactly once and belong to no other tensor."""
    by_name: dict[str, list[Box]] = {name: [] for name in shapes}
    for box in boxes:
        if box.name not in by_name:
            raise ValueError(f"{box.name} is not a tensor of the model")
        by_name[box.name].append(box)
    for name, own in by_name.items():
        shape = shapes[name]
        whole = Box(name, (0,) * len(shape), shape)
        for box in own:
            if len(box.shape) != len(shape) or (box.size and box.intersect(whole) != box):
                raise ValueError(f"{described(box)} lies outside its tensor, of shape {list(shape)}")
        for box, other in overlaps(own):
            raise ValueError(f"{described(box)} and {described(other)} overlap")
        covered = sum(box.size for box in own)
        if covered != whole.size or not own:
            raise ValueError(f"{name}: {covered} of {whole.size} elements are present, in {len(own)} pieces")


def overlaps(boxes: Sequence[Box]) -> Iterable[tuple[Box, Box]]:
    """Pairs of boxes of one tensor that have elements in common; the same box twice is also a pair."""
    # A sweep along the first dimension: shards are cut along few dimensions, so few boxes are open at any row.
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start):
        first = box.start[:1]
        open_boxes = [other for other in open_boxes if not first or other.start[0] + other.shape[0] > first[0]]
        for other in open_boxes:
            if other.intersect(box) is not None:
                yield other, box
        open_boxes.append(box)


def described(box: Box) -> str:
    """A box as errors show it: `name[0:4, 8:16]`."""
    return f"{box.name}[{', '.join(f'{a}:{a + n}' for a, n in zip(box.start, box.shape, strict=True))}]"


def _check_disjoint(holders: Mapping[tuple[str, Box], Mapping[int, int]]) -> None:
    by_tensor: dict[tuple[str, str], list[Box]] = {}
    for kind, box in holders:
        by_tensor.setdefault((kind, box.name), []).append(box)
    for (kind, _), boxes in by_tensor.items():
        for box, other in overlaps(boxes):
            raise ValueError(
                f"{kind} {described(box)} of rank {_ranks(holders[kind, box])} and {described(other)} of rank "
                f"{_ranks(holders[kind, other])} overlap; shards must be equal or disjoint"
            )


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
