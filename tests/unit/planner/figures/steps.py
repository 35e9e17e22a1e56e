"""The rows of figures.json that are steps of RL, generation alone, or weight syncs, planned.

Steps are NeMo RL's: `overlap` says whether engines have GPUs of their own and run ahead, with new weights in the middle of
completions; `batches_under_way` how many batches' groups are generated at once (max_trajectory_age_steps). Otherwise learners and
engines take turns on all GPUs, as vllm_mode=colocate does. NeMo RL scores the batch with the policy before every first update, so
that a step here has that pass as well; since v0.7 not where there is one update only (`scores_policy` false). Mean lengths are those reported; packs hold whole sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mgrpo.layout import InferLayout
from mgrpo.models.memory import holdings
from mgrpo.moving import from_values, load_file
from mgrpo.planner.engines.decoding import decoder, generation_time
from mgrpo.planner.engines.engine_memory import engine_memory
from mgrpo.planner.engines.public_steps import public_step
from mgrpo.planner.engines.step_pace import pace
from mgrpo.planner.engines.transfers import sync_seconds
from mgrpo.planner.hardware import GPUS, Assumptions, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.work import Workload
from tests.unit.planner.figures.nemo import beside
from tests.unit.planner.figures.published import Compared, hardware, model, of, rows

MIB = 1 << 20
CONFIGS = Path(__file__).parents[4] / "examples" / "configs"


def step(row: dict[str, Any], assumed: Assumptions | None = None) -> RunPlan:
    """The plan of a row of RL."""
    own, settings = row["assumed"], row["settings"]
    tokens = (
        settings["max_prompt_token_length"] * own["prompt_share"] + settings["response_length"] * own["response_share"]
    )
    in_pack = max(int(settings["pack_length"] / tokens), 1)
    fill = min(in_pack * tokens / settings["pack_length"], 0.95)
    assumed = dataclasses.replace(assumed or Assumptions(), pack_fill=fill, **own)
    learners = row["nodes"] * row["gpus_per_node"]
    ahead: dict[str, Any] = {}
    if row["overlap"]:
        ahead = {"async_steps": row["batches_under_way"], "inflight_updates": True, "inflight_kv": "keep"}
    values = {
        "num_learners_per_node": [row["gpus_per_node"]] * row["nodes"],
        "total_episodes": settings["num_unique_prompts_rollout"] * settings["num_samples_per_prompt_rollout"],
    }
    config = from_values(values | settings | ahead)
    if row.get("scores_policy", True):
        scored = dataclasses.replace(config.algorithm, top_entropy_quantile=0.99)
        config = dataclasses.replace(config, algorithm=scored)
    cluster, shape = hardware(row, assumed), model(row["model"])
    engines = settings["vllm_num_engines"] * settings["vllm_tensor_parallel_size"]
    if row["overlap"]:
        cluster = dataclasses.replace(cluster, nodes=row["nodes"] + engines // row["gpus_per_node"])
    else:
        memory = engine_memory(shape, config.engine, cluster, longest=settings["pack_length"], dtype_bytes=2)
        shared = dataclasses.replace(
            config.engine,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            vllm_kv_cache_mb=max(memory.cache, 0) // MIB,
        )
        config = dataclasses.replace(config, engine=shared)
    return plan_run(config, shape, cluster, num_learners=learners)


def scoring(row: dict[str, Any]) -> RunPlan:
    """The plan with one update and packs as long as those that NeMo RL scores."""
    packs = row["theirs"].get("scored_packs", 1)
    changed = {"num_mini_batches": 1, "pack_length": row["settings"]["pack_length"] * packs}
    return step(row | {"settings": row["settings"] | changed})


def step_s(row: dict[str, Any], plan: RunPlan, seconds: dict[str, float]) -> float:
    """Seconds from one step to the next of a row of RL, with what its step has beside the plan by phase."""
    if not plan.ahead:
        return plan.step_s + sum(seconds.values())
    own = decoder(plan.shape, plan.config.engine, plan.engine, plan.work, plan.hardware, dtype_bytes=plan.dtype_bytes)
    assert own is not None, row["id"]
    sync = seconds.get("sync", 0.0)
    return pace(
        plan.config,
        own,
        learn_s=plan.learners.total + sum(seconds.values()) - sync,
        sync_s=plan.sync_s + sync,
        batches_under_way=row["batches_under_way"],
    ).seconds


def generation_s(row: dict[str, Any], assumed: Assumptions | None = None) -> float:
    """Seconds of a row of generation: all requests come at once."""
    shape, cluster = model(row["model"]), hardware(row, assumed or Assumptions())
    work = Workload(
        prompts=row["requests"],
        sequences=row["requests"],
        prompt_tokens=row["prompt_tokens"] / row["requests"],
        response_tokens=row["response_tokens"] / row["requests"],
        longest_response=row["longest"],
        response_spread=cluster.assumed.response_spread,
        shares_prompts=False,
    )
    engine = from_values(row["settings"]).engine
    memory = engine_memory(shape, engine, cluster, longest=row["longest"], dtype_bytes=2)
    time = generation_time(shape, engine, memory, work, cluster, dtype_bytes=2)
    assert time is not None, row["id"]
    return time.total


def sync_s(row: dict[str, Any], assumed: Assumptions | None = None) -> float:
    """Seconds of a row of weight syncs."""
    shape, cluster = model(row["model"]), hardware(row, assumed or Assumptions())
    infer = InferLayout(engines=row["engines"], tensor=row["workers"])
    size = holdings(shape, tensor=1, expert=1).total * (1 if row["precision"] == "fp8" else 2)
    return sync_seconds(size, shape, infer, learners=row["learners"], cuts=1, hardware=cluster)


LARGE: dict[str, dict[str, Any]] = {
    "Qwen3-32B, 128 H100": {
        "model_name_or_path": "Qwen/Qwen3-32B",
        "num_learners_per_node": [8] * 8,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
        "vllm_num_engines": 16,
        "vllm_tensor_parallel_size": 4,
    },
    "Qwen3-235B-A22B, 256 H100": {
        "model_name_or_path": "Qwen/Qwen3-235B-A22B",
        "num_learners_per_node": [8] * 16,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 8,
        "expert_model_parallel_size": 16,
        "num_layers_in_first_pipeline_stage": 11,
        "num_layers_in_last_pipeline_stage": 11,
        "recompute_granularity": "full",
        "vllm_num_engines": 16,
        "vllm_tensor_parallel_size": 8,
    },
}
"""Runs of 2,048 answers of 8,704 tokens in the mean and at most 16,384; half of the GPUs are learners."""
AHEAD = {"async_steps": 2, "max_staleness": 4, "inflight_updates": True}
ONE_AHEAD = {"async_steps": 1, "inflight_updates": True}
PUBLIC_PROMPT = 102
"""Mean tokens of a prompt of NeMo RL's runs, as in their rows."""
WIDE = {
    "vllm_num_engines": 4,
    "vllm_tensor_parallel_size": 4,
    "vllm_data_parallel_size": 8,
    "vllm_enable_expert_parallel": True,
}


def large(name: str, **changes: Any) -> RunPlan:
    """The plan of one of `LARGE`."""
    values = {
        "num_unique_prompts_rollout": 128,
        "num_samples_per_prompt_rollout": 16,
        "max_prompt_token_length": 1024,
        "response_length": 16384,
        "pack_length": 17408,
        "beta": 0.0,
        "total_episodes": 2048,
        **LARGE[name],
        **changes,
    }
    config, learners = from_values(values), sum(LARGE[name]["num_learners_per_node"])
    cluster = Hardware(gpu=GPUS["H100"], nodes=2 * learners // 8, assumed=Assumptions(response_share=8704 / 16384))
    return plan_run(config, model(name.partition(",")[0].lower()), cluster, num_learners=learners)


def shipped(file: str, nodes: int, assumed: Assumptions | None = None, **rollout: Any) -> RunPlan:
    """The plan of a shipped configuration on H100, with these settings of its rollouts."""
    config = load_file(CONFIGS / f"{file}.yaml", world_size=1)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **rollout))
    shape, learners = model(Path(config.model_path).name.lower()), sum(config.parallel.num_learners_per_node)
    cluster = Hardware(gpu=GPUS["H100"], nodes=nodes, assumed=assumed or Assumptions())
    return plan_run(config, shape, cluster, num_learners=learners)


def like_public(**rollout: Any) -> RunPlan:
    """The shipped configuration of 235B with as many answers, as long in the mean, as the public run of that model."""
    public = public_step(weights=235, has_experts=True, gpu="H100")
    assert public is not None
    answer = (public.tokens - PUBLIC_PROMPT) / 7168
    groups = {"num_unique_prompts_rollout": public.sequences // 32, "num_samples_per_prompt_rollout": 32}
    assumed = Assumptions(prompt_share=PUBLIC_PROMPT / 1024, response_share=answer)
    return shipped("235b_a22b_32x8", public.gpus // 8, assumed, **groups, **rollout)


def large_table() -> str:
    """Their steps, in turn and ahead, and with experts over copies of the attention; and those of shipped configurations."""
    lines = [
        "| run | engines | steps | answers, mean tokens | generation s | learners s | s per step | tokens a second and GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plans: list[tuple[str, str, str, RunPlan]] = []
    for name in LARGE:
        forms: list[tuple[str, dict[str, Any]]] = [("configured", {})] + (
            [("4 of 4 x 8 workers", WIDE)] if model(name.partition(",")[0].lower()).experts else []
        )
        plans += [
            (name, form, steps, large(name, **engines, **ahead))
            for form, engines in forms
            for steps, ahead in (("in turn", {}), ("2 ahead", AHEAD))
        ]
    for file, nodes in (("32b_16x8", 16), ("235b_a22b_32x8", 32)):
        plans += [
            (f"`{file}.yaml`", "configured", steps, shipped(file, nodes, **ahead))
            for steps, ahead in (("in turn", {}), ("2 ahead", AHEAD))
        ]
    plans += [
        ("the same with the public run's answers", "configured", steps, like_public(**ahead))
        for steps, ahead in (("in turn", {}), ("1 ahead", ONE_AHEAD), ("2 ahead", AHEAD))
    ]
    for name, form, steps, plan in plans:
        tokens = f"{plan.work.sequences:,} x ({plan.work.prompt_tokens:.0f} + {plan.work.response_tokens:.0f})"
        lines.append(
            f"| {name} | {form} | {steps} | {tokens} | {plan.phases['generate']:.0f} | {plan.learners.total:.0f} | {plan.pace_s:.0f} | {plan.tokens_s_gpu:.0f} |"
        )
    return "\n".join(lines)


def compare_steps(assumed: Assumptions | None = None) -> list[Compared]:
    """Seconds of all rows that can be planned: of steps and their phases, of generation, and of syncs."""
    found = []
    for row in rows("rl"):
        if "model" in row:
            found += _compare_step(row, step(row, assumed))
    for kind, figure, key, planned in (
        ("gen", "generation_s", "seconds", generation_s),
        ("sync", "sync_s", "sync_s", sync_s),
    ):
        found += [
            Compared(
                row=row["id"],
                source=row["source"],
                figure=figure,
                reported=row["reported"][key],
                planned=planned(row, assumed),
                note=row["note"],
            )
            for row in rows(kind)
            if "model" in row
        ]
    return found


def alone_errors(compared: Iterable[Compared]) -> list[float]:
    """Errors of steps without what only their program does: those of `mgrpo plan`."""
    return [row.alone / row.reported - 1 for row in of("step_s", compared) if row.alone is not None]


def _compare_step(row: dict[str, Any], plan: RunPlan) -> list[Compared]:
    seconds = beside(row, plan, scoring(row))
    figures = {"step_s": (step_s(row, plan, seconds), step_s(row, plan, {}))}
    figures |= {phase: (spent + seconds.get(phase, 0.0), spent) for phase, spent in plan.phases.items()}
    return [
        Compared(
            row=row["id"],
            source=row["source"],
            figure=figure,
            reported=reported,
            planned=figures[figure][0],
            alone=figures[figure][1],
            note=row["note"],
        )
        for figure, reported in row["reported"].items()
    ]
