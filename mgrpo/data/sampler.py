"""The order of prompts: shuffled anew every epoch, for ever, and exactly resumable."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mgrpo.types import PromptId


class Sampler:
    """Hands out (epoch, index) pairs; an epoch's order depends on the seed and the epoch's number alone."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}; at least one prompt is needed")
        if seed < 0:
            raise ValueError(f"seed={seed}; it must not be negative")
        self._num_prompts = num_prompts
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._excluded: set[int] = set()
        self._order = self._permutation()

    def exclude(self, indices: Collection[int]) -> None:
        """Never hand out these rows again; the order of the others stays as it was."""
        self._excluded.update(indices)

    @property
    def num_excluded(self) -> int:
        """Rows that are never handed out again."""
        return len(self._excluded)

    def take(self, n: int) -> list[PromptId]:
        """The next `n` prompts; a take may run over the end of an epoch, but meets no prompt twice in the same one.

        Never more than there are rows left, and none once every row is excluded.
        """
        taken: list[PromptId] = []
        n = min(n, self._num_prompts - len(self._excluded)) if self._excluded else n
        while len(taken) < n:
            if self._position == self._num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            end = min(self._num_prompts, self._position + n - len(taken))
            indices = self._order[self._position : end].tolist()
            taken.extend((self._epoch, index) for index in indices if index not in self._excluded)
            self._position = end
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands, in JSON."""
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "excluded": sorted(self._excluded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; other data or another seed would be another order, and is refused."""
        for name, here in (("num_prompts", self._num_prompts), ("seed", self._seed)):
            if state[name] != here:
                raise ValueError(
                    f"the saved data order has {name}={state[name]}, this run has {here}; "
                    "resume with the data and the seed that the run began with"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._excluded = set(state["excluded"])
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        # RandomState and not Generator: numpy promises that its streams never change, so a run resumes under any numpy.
        bits = np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch]))
        return np.random.RandomState(bits).permutation(self._num_prompts)
