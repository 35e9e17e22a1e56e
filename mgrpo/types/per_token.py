"""Records per token of a completion, other than its log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Routes = np.ndarray
"""`[tokens, MoE layers, top_k]` uint8 or uint16: the experts that the routers chose for each token, in any order.

Only tokens that an engine has read have a choice: a context with the completion sampled after it has a row for each token
except the last. A row of the type's highest value marks an unknown choice: experts of a token are distinct, so it cannot be one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Sampling mask of each token: the ids that top_p, top_k, min_p or a grammar left when it was sampled, itself included.

    The set of a token that was not sampled is empty, as is a set that the engine does not report in full.
    """

    ids: np.ndarray
    """`[kept]` int32, set after set; within one in no particular order."""
    offsets: np.ndarray
    """`[len + 1]` int64, where each token's set begins in `ids`, and its end: the sets of a large step have billions of ids."""

    @classmethod
    def of_sizes(cls, ids: np.ndarray, sizes: np.ndarray) -> KeptTokens:
        """Sets of so many ids each."""
        return cls(ids=ids, offsets=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))))

    @classmethod
    def none(cls, num_tokens: int) -> KeptTokens:
        """An empty set for each token."""
        return cls(ids=np.zeros(0, np.int32), offsets=np.zeros(num_tokens + 1, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Sets of consecutive runs of tokens, concatenated."""
        empty = cls.none(0)
        return cls.of_sizes(
            np.concatenate([empty.ids, *(part.ids for part in parts)]),
            np.concatenate([empty.sizes, *(part.sizes for part in parts)]),
        )

    def filled(self, tokens: np.ndarray) -> KeptTokens:
        """Sets with the token itself in place of each empty one; `tokens` `[len]`."""
        is_empty = self.sizes == 0
        ids = np.insert(self.ids, self.offsets[:-1][is_empty], tokens[is_empty])
        return KeptTokens.of_sizes(ids, self.sizes + is_empty)

    @property
    def sizes(self) -> np.ndarray:
        """`[len]` int32."""
        return np.diff(self.offsets).astype(np.int32)

    def part(self, start: int, end: int) -> KeptTokens:
        """Sets of the tokens from `start` to `end`, end excluded."""
        first, last = self.offsets[start], self.offsets[end]
        return KeptTokens(ids=self.ids[first:last], offsets=self.offsets[start : end + 1] - first)

    def where(self, chosen: np.ndarray) -> KeptTokens:
        """Sets of the tokens in `chosen`, `[len]` bool."""
        return KeptTokens.of_sizes(self.ids[np.repeat(chosen, self.sizes)], self.sizes[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """A teacher's log-probabilities of a completion's tokens, by which it was not sampled."""

    logprobs: np.ndarray
    """`[len]` float32; NaN where the token was not sampled by the policy, or the teacher gave none."""
    ids: np.ndarray | None = None
    """`[len, k]` int32, the teacher's likeliest tokens at each place; -1 where it gave fewer. None: only the tokens' own were requested."""
    likeliest: np.ndarray | None = None
    """`[len, k]` float32, the log-probabilities of `ids`; NaN where `ids` is -1."""

    @classmethod
    def none(cls, num_tokens: int, num_likeliest: int) -> TeacherScores:
        """Unknown scores of so many tokens, with k = `num_likeliest`; 0: without likeliest tokens."""
        shape = num_tokens, num_likeliest
        return cls(
            logprobs=np.full(num_tokens, np.nan, np.float32),
            ids=np.full(shape, -1, np.int32) if num_likeliest else None,
            likeliest=np.full(shape, np.nan, np.float32) if num_likeliest else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[TeacherScores]) -> TeacherScores:
        """Scores of consecutive runs of tokens, concatenated; at least one part, all with the same k."""
        ids = [part.ids for part in parts if part.ids is not None]
        likeliest = [part.likeliest for part in parts if part.likeliest is not None]
        return cls(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ids=np.concatenate(ids) if ids else None,
            likeliest=np.concatenate(likeliest) if likeliest else None,
        )

    @property
    def num_likeliest(self) -> int:
        """k; 0 where only the tokens' own were requested."""
        return 0 if self.ids is None else self.ids.shape[1]

    def part(self, chosen: slice | np.ndarray) -> TeacherScores:
        """Scores of some of the tokens: a slice, or `[len]` bool."""
        return TeacherScores(
            logprobs=self.logprobs[chosen],
            ids=None if self.ids is None else self.ids[chosen],
            likeliest=None if self.likeliest is None else self.likeliest[chosen],
        )

    def spread(self, places: np.ndarray) -> TeacherScores:
        """Scores scattered to `places`, `[len of the whole]` bool; unknown at all others."""
        whole = TeacherScores.none(len(places), self.num_likeliest)
        whole.logprobs[places] = self.logprobs
        if whole.ids is not None and whole.likeliest is not None:
            whole.ids[places], whole.likeliest[places] = self.ids, self.likeliest
        return whole


def unrouted(num_tokens: int, like: Routes) -> Routes:
    """Rows of unknown choices, with the type, layers and top_k of `like`."""
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def lengthened(routes: Routes, num_tokens: int) -> Routes:
    """Routes padded with rows of unknown choices to `num_tokens`."""
    assert len(routes) <= num_tokens, f"routes of {len(routes)} tokens, there are {num_tokens}"
    return routes if len(routes) == num_tokens else np.concatenate([routes, unrouted(num_tokens - len(routes), routes)])
