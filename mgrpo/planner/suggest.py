"""Layouts for the same learners that fit, the fastest first: every combination of the axes is planned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mgrpo.config.schema import Config, Parallel
from mgrpo.config.validate import problems
from mgrpo.models.family import ModelShape
from mgrpo.models.memory import padded_vocab
from mgrpo.planner.hardware import Cluster
from mgrpo.planner.plan import Plan, plan_run

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
LARGEST_CONTEXT = 8
CHUNKS = (1, 2, 4)
"""Sizes that are tried."""
ZERO_STAGES = (1, 2, 3)
RECOMPUTE = ("none", "selective", "full")
EQUALLY_FAST = 0.02
"""Share of a step's time below which the estimate is no reason to prefer a layout."""
SPARE = 0.1
"""Share of a GPU's memory that a layout had better leave free, for what the plan does not know."""
CAUSES = {
    "compute": "compute",
    "recompute": "computing again",
    "bubble": "bubble",
    "tensor": "TP",
    "context": "CP",
    "expert": "EP",
    "pipeline": "PP messages",
    "data": "DP",
    "optimizer": "optimizer",
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that fits."""

    plan: Plan
    why: str
    """What the learners' time goes into: the three largest causes."""

    @classmethod
    def of(cls, plan: Plan) -> Suggestion:
        """The plan with its reason."""
        return cls(plan, _why(plan))


def suggest(
    config: Config,
    shape: ModelShape,
    cluster: Cluster,
    *,
    num_learners: int,
    count: int,
    hf_config: Mapping[str, Any],
) -> list[Suggestion]:
    """The `count` fastest layouts that fit and that a run would accept, one for each (TP, PP, CP, EP).

    Learners, engines and everything but the layout stay as configured; see `_preference` for the order.
    """
    fitting = []
    for parallel in _axes(config.parallel, shape, cluster, num_learners):
        fitting.extend(_fitting(config, parallel, shape, cluster, num_learners))
    fitting.sort(key=_preference)
    chosen: dict[tuple[int, ...], Plan] = {}
    for plan in fitting:
        layout = plan.layout
        axes = (layout.tensor, layout.pipeline, layout.context, layout.expert)
        if axes not in chosen and not problems(
            plan.config, world_size=num_learners, hf_config=hf_config, has_dataset=True
        ):
            chosen[axes] = plan
        if len(chosen) == count:
            break
    return [Suggestion.of(plan) for plan in chosen.values()]


def _axes(given: Parallel, shape: ModelShape, cluster: Cluster, num_learners: int) -> Iterator[Parallel]:
    """Every way to cut the model that its sizes and the number of learners allow; tensor groups stay in a node."""
    for tensor in POWERS:
        if tensor > cluster.gpus_per_node or not _splits(shape, tensor):
            continue
        for stages in range(1, min(num_learners // tensor, shape.num_layers) + 1):
            for context in POWERS:
                model = tensor * stages * context
                if shape.num_layers % stages or context > LARGEST_CONTEXT or num_learners % model:
                    continue
                for expert in POWERS if shape.experts else (1,):
                    if expert > 1 and (num_learners // stages % expert or shape.experts.count % expert):
                        continue
                    for chunks in CHUNKS if stages > 1 else (1,):
                        if shape.num_layers % (stages * chunks) == 0:
                            yield replace(
                                given,
                                tensor_model_parallel_size=tensor,
                                pipeline_model_parallel_size=stages,
                                context_parallel_size=context,
                                expert_model_parallel_size=expert,
                                virtual_pipeline_model_parallel_size=chunks,
                                num_layers_in_first_pipeline_stage=None,
                                num_layers_in_last_pipeline_stage=None,
                                fsdp_shard_degree=None,
                                sequence_parallel="auto",
                            )


def _splits(shape: ModelShape, tensor: int) -> bool:
    sizes = (shape.heads, shape.ffn, shape.hidden, padded_vocab(shape))
    return all(size % tensor == 0 for size in sizes) and (shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0)


def _fitting(config: Config, parallel: Parallel, shape: ModelShape, cluster: Cluster, num_learners: int) -> list[Plan]:
    """What fits of all combinations of ZeRO and recomputation; none are tried where the thriftiest do not fit."""
    modules = ("core_attn", "moe" if shape.experts else "mlp")
    found = []
    for recompute in reversed(RECOMPUTE):
        plans = [
            plan_run(
                replace(
                    config,
                    parallel=replace(
                        parallel, zero_stage=zero, recompute_granularity=recompute, recompute_modules=modules
                    ),
                ),
                shape,
                cluster,
                num_learners=num_learners,
            )
            for zero in ZERO_STAGES
        ]
        plans = [plan for plan in plans if plan.worst.total <= cluster.gpu.memory_bytes]
        if not plans:
            break
        found.extend(plans)
    return found


def _preference(plan: Plan) -> tuple[float, ...]:
    """Order of layouts that fit: by step time, and of equally fast ones first those with memory to spare, which cut the
    model into fewer pieces, with Megatron's own distributed optimizer.
    """
    layout = plan.layout
    return (
        int(math.log(plan.step_s) / math.log1p(EQUALLY_FAST)),
        plan.worst.total > (1 - SPARE) * plan.cluster.gpu.memory_bytes,
        layout.tensor * layout.pipeline * layout.context * layout.virtual_pipeline,
        layout.zero_stage != 1,
        plan.step_s,
    )


def _why(plan: Plan) -> str:
    """The largest causes of the learners' time, with their shares."""
    seconds = dict(plan.learners.training)
    for cause, own in plan.learners.scoring.items():
        seconds[cause] = seconds.get(cause, 0.0) + own
    total = sum(seconds.values())
    largest = sorted(seconds, key=seconds.get, reverse=True)[:3]
    return ", ".join(
        f"{CAUSES[cause]} {seconds[cause] / total:.0%}" for cause in largest if seconds[cause] > 0.005 * total
    )
