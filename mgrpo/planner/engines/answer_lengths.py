"""Lengths of a step's answers: a log-normal distribution that response_length cuts, or the lengths that a run has recorded.

A step waits for its longest answer, and a decoding step costs nearly as much for few sequences as for many, so that the mean
alone does not determine the time of generation.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
_KEPT = 1024
"""Lengths that stand for those of a recorded run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLengths:
    """Tokens of answers: `mean` of them, after the cut at `longest`."""

    mean: float
    longest: int
    spread: float = 0.0
    """Standard deviation of the logarithm of a length, before the cut; 0: all answers have the mean length."""
    recorded: tuple[float, ...] = ()
    """Lengths of a run's answers in place of the log-normal ones, ascending; `mean` is theirs."""

    def quantile(self, share: float) -> float:
        """The length that `share` of all answers do not exceed."""
        if self.recorded:
            return float(np.quantile(self.recorded, share, method="inverted_cdf"))
        if not self.spread:
            return self.mean
        return min(math.exp(_center(self) + self.spread * _NORMAL.inv_cdf(share)), self.longest)

    def longest_of(self, count: int) -> float:
        """The longest of `count` answers, as one expects it."""
        return self.quantile(1 - 0.5 / count)

    def of(self, count: int) -> np.ndarray:
        """`count` lengths, ascending, one for each part of the distribution; their mean is that of all."""
        return _lengths(self, count)

    def squares(self) -> float:
        """The mean of the squared lengths; half of it over the mean length is a token's mean number of earlier tokens."""
        lengths = self.of(1024)
        return float(np.square(lengths).mean())


@cache
def _lengths(lengths: AnswerLengths, count: int) -> np.ndarray:
    found = np.array([lengths.quantile((number + 0.5) / count) for number in range(count)])
    return np.minimum(found * (lengths.mean / found.mean()), lengths.longest)


@cache
def _center(lengths: AnswerLengths) -> float:
    """Mean of the logarithms before the cut, found by halving: the mean after the cut grows with it."""
    low, high = -20.0, math.log(lengths.longest) + 20 * lengths.spread
    for _ in range(80):
        center = (low + high) / 2
        low, high = (center, high) if _mean(center, lengths) < lengths.mean else (low, center)
    return low


def _mean(center: float, lengths: AnswerLengths) -> float:
    """The mean of a log-normal length, cut at the longest."""
    spread, cut = lengths.spread, math.log(lengths.longest)
    below = math.exp(center + spread**2 / 2) * _NORMAL.cdf((cut - center) / spread - spread)
    return below + lengths.longest * (1 - _NORMAL.cdf((cut - center) / spread))


def recorded_lengths(folder: Path) -> tuple[float, ...]:
    """Sampled tokens of completions that a run has written (`save_traces`), ascending: one for each 1024th part of them.

    Args:
        folder: a run's folder of completions, or one of its files.

    Raises:
        ValueError: no completions are there.
    """
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl"))
    found: list[float] = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            if tokens := json.loads(line).get("num_tokens"):
                found.append(float(tokens))
    if not found:
        raise ValueError(
            f"response_lengths={folder}: no completions with num_tokens; give the folder that save_traces wrote"
        )
    shares = (np.arange(_KEPT) + 0.5) / _KEPT
    return tuple(np.quantile(found, shares, method="inverted_cdf").tolist())
