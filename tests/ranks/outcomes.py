"""One training step of all ranks together, and its differences from a reference that trained the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mgrpo.models.placement.boxes import Box
from tests.ranks import cases

LIMITS = {"logprob": 2e-5, "entropy": 6e-6, "loss": 1.9e-6, "norm": 3e-6, "gradient": 3e-5, "row": 2.8e-4}
"""At most four times the largest difference between correct steps in float32: see "Limits" in docs/parity.md."""
SMALLEST_ROW = 1e-2
"""A row of a gradient counts as at least this part of its matrix's largest element, whose rounding it shares."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss, log-probabilities and whole gradients of one training step."""

    loss: float
    logprobs: dict[Any, np.ndarray]
    """By sample; those without adapters by (sample, "without")."""
    entropies: dict[int, np.ndarray]
    gradients: dict[str, np.ndarray]
    grad_norms: list[float]
    """Global gradient norm that each rank reports."""
    spread: float = 0.0
    """Largest relative difference between two ranks' copies of one gradient."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest differences of an outcome from a reference, by the kinds of `LIMITS`."""

    logprob: float
    entropy: float
    loss: float
    norm: float
    """Of the global gradient norm, relative."""
    gradient: float
    """Of an element, relative to the largest of its tensor; also between two ranks' copies of it."""
    row: float
    """Of an element, relative to the largest of its row: of one output or token, in stacked experts of one expert."""
    tensor: str
    """Tensor with the largest difference in units of the limits."""

    @property
    def is_equal(self) -> bool:
        """All kinds within their limits."""
        return all(getattr(self, kind) <= limit for kind, limit in LIMITS.items())


def joined(ranks: list[dict[str, Any]], kind: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Whole tensors from the boxes of all ranks; a ValueError if no rank holds some element."""
    whole = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for box, values in _boxes(ranks, kind):
        whole[box.name][cases.region(box)] = values
    missing = [name for name, values in whole.items() if np.isnan(values).any()]
    if missing:
        raise ValueError(f"no rank has the {kind} of {missing[:3]} whole")
    return whole


def _boxes(ranks: list[dict[str, Any]], kind: str) -> Iterator[tuple[Box, np.ndarray]]:
    return ((box, values) for rank in ranks for box, values in rank[kind])


def collect(ranks: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> Outcome:
    """The outcome of all ranks together; a ValueError if no rank holds some element, or two trained one sample."""
    gradients = joined(ranks, "gradients", shapes)
    apart = [
        float(np.abs(gradients[box.name][cases.region(box)] - values).max() / (np.abs(values).max() + 1e-12))
        for box, values in _boxes(ranks, "gradients")
    ]
    last = [rank for rank in ranks if rank["reports_metrics"]]
    samples = [(number, values) for rank in last for number, values in rank["samples"].items()]
    if len(dict(samples)) != len(samples):
        raise ValueError("several ranks report one sample")
    return Outcome(
        loss=sum(rank["loss"] for rank in last),
        logprobs={number: np.array(logprobs) for number, (logprobs, _) in samples}
        | {(n, "without"): np.array(values) for rank in last for n, values in rank["without_adapters"].items()},
        entropies={number: np.array(entropies) for number, (_, entropies) in samples},
        gradients=gradients,
        grad_norms=[rank["grad_norm"] for rank in ranks],
        spread=max(apart),
    )


def global_norm(gradients: dict[str, np.ndarray]) -> float:
    """Norm of all gradients as one vector."""
    return float(np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values())))


def compare(outcome: Outcome, reference: Outcome) -> Difference:
    """The largest differences; both must have trained the same samples."""
    assert outcome.logprobs.keys() == reference.logprobs.keys(), "some sample was not trained"
    norm = reference.grad_norms[0]
    gradient, row, tensor = gradient_differences(outcome.gradients, reference.gradients)
    return Difference(
        logprob=_largest(outcome.logprobs, reference.logprobs),
        entropy=_largest(outcome.entropies, reference.entropies),
        loss=abs(outcome.loss - reference.loss),
        norm=float(np.abs(np.array(outcome.grad_norms) / norm - 1).max()),
        gradient=max(gradient, outcome.spread),
        row=row,
        tensor=tensor,
    )


def _largest(found: dict[Any, np.ndarray], expected: dict[Any, np.ndarray]) -> float:
    assert all(found[key].shape == values.shape for key, values in expected.items())
    return float(np.concatenate([np.abs(found[key] - values) for key, values in expected.items()]).max())


def gradient_differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, float, str]:
    """The fields `gradient`, `row` and `tensor` of a `Difference`."""
    by_tensor = {}
    for name, truth in expected.items():
        rows, apart = (np.atleast_2d(np.abs(values)).max(-1) for values in (truth, found[name] - truth))
        of_rows = apart / (np.maximum(rows, SMALLEST_ROW * rows.max(-1, keepdims=True)) + 1e-12)
        by_tensor[name] = apart.max() / (rows.max() + 1e-12), of_rows.max()
    worst = max(
        by_tensor, key=lambda name: max(by_tensor[name][0] / LIMITS["gradient"], by_tensor[name][1] / LIMITS["row"])
    )
    of_tensors, of_rows = np.array(list(by_tensor.values())).max(0).tolist()
    return of_tensors, of_rows, worst
