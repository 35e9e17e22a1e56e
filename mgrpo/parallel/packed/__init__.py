"""Packs of documents, and the layers that mix their tokens: attention and the gated delta rule, alone and over context-parallel ranks."""
