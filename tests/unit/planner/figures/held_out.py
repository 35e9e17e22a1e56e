"""How far a plan of training is off where its two derived numbers come from other sources' rows.

`compute_efficiency` and `expert_efficiency` are not measured: they are what makes the mean of the absolute errors of all rows
of training smallest. Here they are derived without one source and judged by it, source after source.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import mean

from mgrpo.planner.hardware import Assumptions
from tests.unit.planner.figures.published import compare_training, of

PRODUCTS = (0.5, 0.55, 0.6, 0.65, 0.7)
EXPERTS = (0.2, 0.25, 0.3, 0.35, 0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One source without which the numbers were derived."""

    source: str
    rows: int
    compute_efficiency: float
    expert_efficiency: float
    error: float
    """Mean of the absolute errors of its rows."""


def hold_out() -> tuple[tuple[float, float], list[HeldOut]]:
    """The numbers derived from all rows, and every source held out."""
    tried = {
        (products, experts): of(
            "tok_s_gpu", compare_training(Assumptions(compute_efficiency=products, expert_efficiency=experts))
        )
        for products, experts in itertools.product(PRODUCTS, EXPERTS)
    }
    sources = sorted({row.source for row in next(iter(tried.values()))})

    def best(without: str | None) -> tuple[float, float]:
        return min(tried, key=lambda pair: mean(abs(row.error) for row in tried[pair] if row.source != without))

    held = []
    for source in sources:
        pair = best(source)
        errors = [abs(row.error) for row in tried[pair] if row.source == source]
        held.append(
            HeldOut(
                source=source,
                rows=len(errors),
                compute_efficiency=pair[0],
                expert_efficiency=pair[1],
                error=mean(errors),
            )
        )
    return best(None), held
