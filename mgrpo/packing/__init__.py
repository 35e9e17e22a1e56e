"""Samples to packs: the samples of a document, the documents of a pack, the packs of a rank and a mini-batch.

Nothing is dropped and nothing is cut: a document that does not fit is an error, and ranks that run out of documents get
dummy packs, so that all run the same number of micro-batches. numpy only; tensors begin in the policy room.
"""

from mgrpo.packing.bins import pack
from mgrpo.packing.cost import Cost
from mgrpo.packing.document import assemble, document_length, documents
from mgrpo.packing.lengths import pack_lengths
from mgrpo.packing.rank_balance import balance, mini_batches
from mgrpo.packing.received import from_slice, teacher_packs
from mgrpo.packing.slices import Slice, to_slices
from mgrpo.packing.step import plan_step

__all__ = [
    "Cost",
    "Slice",
    "assemble",
    "balance",
    "document_length",
    "documents",
    "from_slice",
    "mini_batches",
    "pack",
    "pack_lengths",
    "plan_step",
    "teacher_packs",
    "to_slices",
]
