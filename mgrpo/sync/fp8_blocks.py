"""Which weights travel in fp8, and how blocks of 128 x 128 that share a scale lie across the boxes of a plan. Pure.

Not yet wired to an engine and not run on a GPU: `channel` sends weights in `model_dtype`. The scheme is DeepSeek-V3's (arXiv
2412.19437, section 3.3) and vLLM's block-wise W8A8: weights e4m3 with a float32 scale for each block, here in a tensor of its own,
`<weight>_scale_inv`. `fp8` has the numbers.

A block that lies in one box is quantised by the rank that holds it. Where boxes cut a block, as 64 key rows a rank under TP 8 do, a
part may lack the block's maximum: `shared_blocks` lists these, whose maximum their ranks agree on first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from mgrpo.models.table import EXPERT_MATRICES, Box, Shape

BLOCK = 128
SCALE_BYTES = 4
LINEAR = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", *(name for names in EXPERT_MATRICES.values() for name in names))
)


def is_quantised(name: str) -> bool:
    """Whether the HF tensor `name` travels in fp8: the matrices of linear layers and experts.

    Embeddings and lm_head, norms, routers and biases stay in the model's type: they are small, or every logit depends on them.
    """
    *_, kind, what = f".{name}".split(".")
    return what == "weight" and kind in LINEAR


def scale_shape(shape: Shape, *, block: int = BLOCK) -> Shape:
    """Of the scales of a matrix of `shape`: one for each block, also for those that its edge cuts off."""
    return tuple(-(-length // block) for length in shape)


def scale_box(box: Box, *, block: int = BLOCK) -> Box:
    """The scales of the blocks that `box` has a part of."""
    start = tuple(first // block for first in box.start)
    stop = (-(-(first + length) // block) for first, length in zip(box.start, box.shape, strict=True))
    return Box(f"{box.name}_scale_inv", start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def cut(box: Box, *, block: int = BLOCK) -> Iterator[Box]:
    """`box` in at most nine parts: one of whole blocks, and the rims of blocks that its sides cut."""
    rows, columns = (_cuts(first, first + n, block) for first, n in zip(box.start, box.shape, strict=True))
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            yield Box(box.name, (top, left), (bottom - top, right - left))


def _cuts(start: int, stop: int, block: int) -> list[int]:
    first, last = -(-start // block) * block, stop // block * block
    return sorted({start, stop, *(edge for edge in (first, last) if start < edge < stop)})


def shared_blocks(
    sources: Sequence[Sequence[Box]], shapes: Mapping[str, Shape], *, block: int = BLOCK
) -> dict[Box, tuple[int, ...]]:
    """The blocks that no box holds whole, each as the box of its scale, and all ranks that hold a part of it.

    Under one rank alone such a block lies in several of its boxes, as the query rows of two groups do.

    Args:
        sources: for each training rank the boxes it holds; those of a tensor are equal or do not overlap.
        shapes: of all HF tensors; only quantised ones are looked at.
    """
    found: dict[Box, set[int]] = {}
    for rank, boxes in enumerate(sources):
        for box in boxes:
            if is_quantised(box.name):
                for place in _partial(box, shapes[box.name], block):
                    found.setdefault(place, set()).add(rank)
    return {place: tuple(sorted(ranks)) for place, ranks in found.items()}


def _partial(box: Box, shape: Shape, block: int) -> Iterator[Box]:
    """The scales of the blocks that the sides of `box` cut."""
    own = scale_box(box, block=block)
    sides = []
    for first, length, whole, start, count in zip(box.start, box.shape, shape, own.start, own.shape, strict=True):
        stop = first + length
        is_cut = {start} if first % block else set()
        sides.append(is_cut | ({start + count - 1} if stop % block and stop < whole else set()))
    for row in range(own.start[0], own.start[0] + own.shape[0]):
        columns = range(own.start[1], own.start[1] + own.shape[1])
        for column in columns if row in sides[0] else sorted(sides[1]):
            yield Box(own.name, (row, column), (1, 1))


def wire_bytes(boxes: Iterable[Box], *, itemsize: int, block: int = BLOCK) -> int:
    """Bytes of these boxes on the wire: one a quantised weight and four for each block, `itemsize` for each other weight."""
    return sum(
        box.size + SCALE_BYTES * scale_box(box, block=block).size if is_quantised(box.name) else box.size * itemsize
        for box in boxes
    )
