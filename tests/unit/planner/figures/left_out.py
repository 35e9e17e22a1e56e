"""What the rows of training owe to what they state of their own programs: each such statement left out of all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.planner.figures.published import compare_training, mean_error, median_error, of

Row = dict[str, Any]


def _without(*names: str) -> Callable[[Row], Row]:
    return lambda row: {name: value for name, value in row.items() if name not in names}


def _not_assumed(name: str) -> Callable[[Row], Row]:
    return lambda row: row | {"assumed": {key: value for key, value in row.get("assumed", {}).items() if key != name}}


def _at_peak(row: Row) -> Row:
    return row | {"gpu_differs": {key: value for key, value in row.get("gpu_differs", {}).items() if key != "tflops"}}


OWN_SETTINGS: dict[str, Callable[[Row], Row]] = {
    "nothing": dict,
    "torchtitan's peak (989 in place of 835)": _at_peak,
    "torchtitan's repeated products (37 %)": _without("repeats"),
    "torchtitan's passes without a compiler (3.2)": _not_assumed("elementwise_passes"),
    "hidden tensor-parallel traffic (0.63 exposed)": _not_assumed("tensor_exposed"),
    "hidden traffic of experts (0 exposed)": _not_assumed("expert_exposed"),
    "dispatchers by node": _without("dispatches_by_node"),
    "FlashAttention 3 and cuDNN (0.55)": _not_assumed("attention_efficiency"),
    "gradients that products add (0 bytes)": _not_assumed("gradient_bytes"),
    "what they keep in memory": _without("memory"),
    "all of these": lambda row: _at_peak(_without("repeats", "dispatches_by_node", "memory", "assumed")(row)),
}
"""Settings that a row has beside its model, layout and hardware, as they are taken from it."""


def sensitivity() -> list[tuple[str, float, float, float]]:
    """What is left out of all rows; mean and median error of their speeds, and mean error of their memory."""
    found = []
    for name, settings in OWN_SETTINGS.items():
        compared = compare_training(settings=settings)
        speed = of("tok_s_gpu", compared)
        found.append((name, mean_error(speed), median_error(speed), mean_error(of("mem_gib", compared))))
    return found
