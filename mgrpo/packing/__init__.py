"""From samples to packs: which samples form a document, which documents a pack, which packs a rank and a mini-batch.

Nothing is dropped and nothing is cut: a document that does not fit is an error, and ranks that run out of documents get
dummy packs, so that all run the same number of micro-batches. numpy only; tensors begin in the policy room.
"""

from mgrpo.packing.bins import balance, pack
from mgrpo.packing.document import SHARED_PROMPT_LIMIT, assemble, document_length, documents
from mgrpo.packing.step import pack_step
from mgrpo.packing.wire import from_arrays, to_arrays

__all__ = [
    "SHARED_PROMPT_LIMIT",
    "assemble",
    "balance",
    "document_length",
    "documents",
    "from_arrays",
    "pack",
    "pack_step",
    "to_arrays",
]
