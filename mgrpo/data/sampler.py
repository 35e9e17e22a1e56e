"""The order of prompts: reshuffled every epoch, or the order of the data; endless, and exactly resumable.

Rank 0 alone has a sampler, so that the stream of prompts is the same for any number of learners and engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mgrpo.types import PromptId

_WINDOW = 4096


class Sampler:
    """Hands out (epoch, index) pairs; an epoch's order depends only on the seed and the epoch's number."""

    def __init__(self, num_prompts: int, seed: int, *, shuffle: bool = True) -> None:
        """`shuffle`: False: every epoch is in the order of the data."""
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}; at least one prompt is needed")
        if seed < 0:
            raise ValueError(f"seed={seed}; it must not be negative")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._is_excluded = np.zeros(num_prompts, dtype=bool)
        self._excluded: list[int] = []
        self._order = self._permutation()

    def exclude(self, indices: Collection[int]) -> None:
        """Never hand out these rows again; the order of the others does not change."""
        if indices:
            self._is_excluded[list(indices)] = True
            # A new list, because earlier states hold the old one.
            self._excluded = np.flatnonzero(self._is_excluded).tolist()

    @property
    def num_excluded(self) -> int:
        """Rows that are never handed out again."""
        return len(self._excluded)

    def take(self, n: int) -> list[PromptId]:
        """The next `n` prompts, across the end of an epoch if need be, but never the same prompt twice in one epoch.

        At most as many as there are rows left, and none once every row is excluded.
        """
        taken: list[PromptId] = []
        n = min(n, self._num_prompts - len(self._excluded)) if self._excluded else n
        while len(taken) < n:
            if self._position == self._num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            wanted = n - len(taken)
            # Wide enough to skip a long run of excluded rows at once.
            window = self._order[self._position : self._position + max(wanted, _WINDOW)]
            places = np.flatnonzero(~self._is_excluded[window])[:wanted]
            taken.extend((self._epoch, index) for index in window[places].tolist())
            self._position += int(places[-1]) + 1 if len(places) == wanted else len(window)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position, in JSON; not to be changed."""
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "excluded": self._excluded,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; ValueError if data, seed or shuffling differ."""
        for name, here in (("num_prompts", self._num_prompts), ("seed", self._seed)):
            if state[name] != here:
                raise ValueError(
                    f"the saved data order has {name}={state[name]}, this run has {here}; "
                    "resume with the data and the seed that the run began with"
                )
        # Old states lack the key: those runs always shuffled.
        if state.get("shuffle", True) != self._shuffle:
            raise ValueError(
                f"the saved data order has shuffle_dataset={state.get('shuffle', True)}, this run has {self._shuffle}; "
                "resume with the order that the run began with"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._is_excluded[:] = False
        self._excluded = []
        self.exclude(state["excluded"])
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_prompts)
        # RandomState, not Generator: numpy promises that its streams never change, so a run resumes under any version.
        bits = np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch]))
        return np.random.RandomState(bits).permutation(self._num_prompts)
