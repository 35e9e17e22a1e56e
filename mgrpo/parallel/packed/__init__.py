"""Packs of documents, and what mixes their tokens: attention and the gated delta rule, alone and over context-parallel ranks."""
