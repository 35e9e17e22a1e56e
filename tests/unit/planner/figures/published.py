"""The rows of figures.json, planned: what others reported, on which hardware and with which layout.

A row has its source, model, GPU (`gpu_differs`: where theirs is not the data sheet's), nodes and precision. A row of training
has `sequences` of `length` tokens, all of which count, and settings by the names of a run; whole sequences fill its packs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from mgrpo.models.family import shape_of
from mgrpo.models.memory import padded_vocab
from mgrpo.models.shape import ModelShape
from mgrpo.moving import from_values
from mgrpo.planner.hardware import GIB, GPUS, Assumptions, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import shipped_config
from mgrpo.planner.work import forward_flops

FIGURES: dict[str, Any] = json.loads(Path(__file__).with_name("figures.json").read_text())
NOT_SHIPPED = {
    "llama-3.1-405b": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": 126,
    }
}
"""Sizes of a model, where they differ from those of Llama 3.1 70B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of a row: as reported and as planned."""

    row: str
    source: str
    figure: str
    """tok_s_gpu: tokens per second and GPU; mem_gib: GiB of the fullest GPU; step_s, generation_s, sync_s, or of a phase: seconds."""
    reported: float
    planned: float
    note: str
    alone: float | None = None
    """The plan without what the row's program does beside."""

    @property
    def error(self) -> float:
        """Relative to what was reported."""
        return self.planned / self.reported - 1


def rows(kind: str) -> list[dict[str, Any]]:
    """The rows of one kind: train, rl, sync or gen."""
    return [row for row in FIGURES["rows"] if row["kind"] == kind]


@cache
def model(name: str) -> ModelShape:
    """A shipped size, or one of `NOT_SHIPPED`."""
    differs = NOT_SHIPPED.get(name)
    values = shipped_config(name if differs is None else "llama-3.1-70b")
    assert values is not None, name
    return shape_of(values | (differs or {}))


def hardware(row: dict[str, Any], assumed: Assumptions) -> Hardware:
    """The row's nodes."""
    gpu = dataclasses.replace(GPUS[row["gpu"]], **row.get("gpu_differs", {}))
    return Hardware(
        gpu=gpu,
        nodes=row["nodes"],
        gpus_per_node=row["gpus_per_node"],
        assumed=assumed,
        in_8_bits=("dense", "own", "experts") if row["precision"] == "fp8" else (),
        dispatches_by_node=row.get("dispatches_by_node", False),
    )


def training(row: dict[str, Any], assumed: Assumptions | None = None) -> RunPlan:
    """The plan of a row of training; of its phases only training counts."""
    facts = {"prompt_share": 1.0, "response_share": 1.0, "pack_fill": 1.0} | row.get("assumed", {})
    assumed = dataclasses.replace(assumed or Assumptions(), **facts)
    # Every token is trained: a prompt of one token stands for the first, which nothing predicts.
    values = {
        "num_unique_prompts_rollout": row["sequences"] // 2,
        "num_samples_per_prompt_rollout": 2,
        "max_prompt_token_length": 1,
        "response_length": row["length"] - 1,
        "total_episodes": row["sequences"],
        "beta": 0.0,
        "num_learners_per_node": [row["gpus_per_node"]] * row["nodes"],
        "weight_sync_bucket_mb": 1,
    }
    config = from_values(values | row["settings"])
    return plan_run(
        config, model(row["model"]), hardware(row, assumed), num_learners=row["nodes"] * row["gpus_per_node"]
    )


def seconds(row: dict[str, Any], plan: RunPlan) -> float:
    """Of a step; `repeats`: share of a forward pass's products that are repeated beside all other work of it."""
    causes = plan.learners.training
    return (
        plan.learners.total
        + row.get("repeats", 0.0) * causes["compute"] / 3
        + bool(row.get("repeats")) * causes["memory"] / 3
    )


def gpu_gib(row: dict[str, Any], plan: RunPlan) -> float:
    """GiB of torch's allocator on the fullest GPU, without what CUDA and NCCL take beside it.

    `memory` of a row is what its program keeps and mgrpo does not: bytes of all states of a weight in place of 18, bytes of
    a logit at the peak of the loss, elements of a token and layer that its recomputation keeps.
    """
    stage, facts = plan.worst, row.get("memory", {})
    states = (stage.states.total - stage.states.unsharded) * facts.get("state_bytes", 18) / 18 + stage.states.unsharded
    kept, loss = float(stage.activations.kept), float(stage.loss)
    pack = plan.config.parallel.pack_length
    if "kept" in facts:
        kept = pack * plan.shape.num_layers * facts["kept"] * plan.dtype_bytes
    if "logit_bytes" in facts:
        loss = pack * padded_vocab(plan.shape) * facts["logit_bytes"] + stage.gradients.head
    passes = kept + stage.activations.buffers + max(loss, stage.layer)
    return (states + passes * (1 + stage.waste)) / GIB


def compare_training(
    assumed: Assumptions | None = None, *, settings: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> list[Compared]:
    """Speed and memory of all rows of training.

    Args:
        settings: what a row is planned with, from what it has.
    """
    found = []
    for row in map(settings, rows("train")):
        plan, reported = training(row, assumed), row["reported"]
        tokens = row["sequences"] * row["length"]
        gpus = row["nodes"] * row["gpus_per_node"]
        # Operations a second are turned into tokens by the plan's own count of operations.
        speed = (
            reported.get("tok_s_gpu")
            or reported["tflops"] * 1e12 * tokens / 3 / forward_flops(plan.shape, plan.work).total
        )
        planned = {"tok_s_gpu": tokens / gpus / seconds(row, plan), "mem_gib": gpu_gib(row, plan)}
        figures = {"tok_s_gpu": speed} | ({"mem_gib": reported["mem_gib"]} if "mem_gib" in reported else {})
        found += [
            Compared(
                row=row["id"],
                source=row["source"],
                figure=figure,
                reported=value,
                planned=planned[figure],
                note=row["note"],
            )
            for figure, value in figures.items()
        ]
    return found


def of(figure: str, compared: Iterable[Compared]) -> list[Compared]:
    """The rows that have this figure."""
    return [row for row in compared if row.figure == figure]


def mean_error(compared: Iterable[Compared]) -> float:
    """Mean of the absolute errors."""
    return mean(abs(row.error) for row in compared)


def median_error(compared: Iterable[Compared]) -> float:
    """Median of the errors with their signs."""
    return median(row.error for row in compared)
