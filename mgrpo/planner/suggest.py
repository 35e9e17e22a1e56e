"""Layouts of the same learners that fit, fastest first: every combination of the axes is planned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mgrpo.config.derived import layout_of
from mgrpo.config.schema import Config, Engine, Parallel
from mgrpo.config.validate import problems
from mgrpo.models.cuts import layout_problems
from mgrpo.models.hf_config import HfConfig
from mgrpo.models.shape import ModelShape
from mgrpo.planner.engines.decoding import generation_time
from mgrpo.planner.engines.engine_memory import engine_memory
from mgrpo.planner.hardware import Hardware
from mgrpo.planner.plan import RunPlan, plan_run

Recompute = Literal["none", "selective", "full"]
ZeroStage = Literal[1, 2, 3]

# The sizes that are tried; of ZeRO stages only the first where adapters are trained.
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
LARGEST_CONTEXT = 8
COPIES = (2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)
ZERO_STAGES: tuple[ZeroStage, ...] = (1, 2, 3)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

EQUALLY_FAST = 0.02
"""Step times within this share of each other count as equal: the estimate is not more precise."""
SHOWN_SPLITS = 3
AHEAD: dict[str, Any] = {"async_steps": 2, "max_staleness": 4, "inflight_updates": True}
"""Settings of docs/asynchronous.md for answers of very different lengths."""
SPARE = 0.1
"""Share of a GPU's memory that a layout should leave free, as a margin for omissions of the plan."""
CAUSES = {
    "compute": "compute",
    "memory": "norms and gates",
    "gradients": "gradients",
    "host": "host",
    "offload": "offload",
    "recompute": "recomputation",
    "bubble": "bubble",
    "tensor": "TP",
    "context": "CP",
    "expert": "EP",
    "pipeline": "PP messages",
    "adapters": "adapters",
    "data": "DP",
    "optimizer": "optimizer",
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that fits, and the largest causes of its time."""

    plan: RunPlan
    why: str
    """The three largest causes of the learners' time."""

    @classmethod
    def of(cls, plan: RunPlan) -> Suggestion:
        """The plan with its largest causes."""
        return cls(plan, _why(plan))


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """A run whose engines and learners take turns, with generation at the same time as training instead."""

    settings: dict[str, Any]
    """Settings to add to the given ones."""
    plan: RunPlan

    @property
    def sentence(self) -> str:
        """Its pace, and the settings by name."""
        named = " ".join(f"--{name} {str(value).lower()}" for name, value in self.settings.items())
        return (
            f"generation beside training: about {self.plan.pace_s:.0f} s per step, {self.plan.tokens_s_gpu:,.0f} tokens a second and GPU, "
            f"on tokens up to {self.settings['max_staleness']} steps old, with {named}"
        )

    def as_json(self) -> dict[str, Any]:
        """Settings, seconds and tokens."""
        return {"settings": self.settings, "pace": self.plan.pace_s, "tokens_s_gpu": self.plan.tokens_s_gpu}


def suggest(plan: RunPlan, *, count: int, hf_config: HfConfig, teachers: Sequence[HfConfig] = ()) -> list[Suggestion]:
    """The `count` fastest layouts that fit and that a run would accept, one per (TP, PP, CP, EP).

    Learners, engines and everything except the layout stay as planned; see `_preference` for the order. If the cluster
    is too small for them, learners get at least half of it, and more of it until a layout fits.

    Args:
        teachers: of the models that learners hold besides the policy, with its layout.
    """
    hf_configs, num_gpus = (hf_config, *teachers), plan.hardware.num_gpus - plan.split.teachers
    if not count or plan.hardware.num_gpus < 2:
        return []
    if plan.split.idle >= 0:
        return _layouts(plan, plan.config, plan.split.learners, count=count, hf_configs=hf_configs)
    workers = plan.config.engine.num_workers
    for engines in range(num_gpus // 2 // workers, 0, -1):
        config, num_learners = _with_engines(plan.config, engines), num_gpus - engines * workers
        if found := _layouts(plan, config, num_learners, count=count, hf_configs=hf_configs):
            return found
    return []


def _layouts(
    plan: RunPlan, config: Config, num_learners: int, *, count: int, hf_configs: Sequence[HfConfig]
) -> list[Suggestion]:
    fitting = []
    for parallel in _axes(config, plan.shape, plan.hardware, num_learners, hf_configs):
        fitting.extend(_fitting(plan, config, parallel, num_learners))
    fitting.sort(key=_preference)
    chosen: dict[tuple[int, ...], RunPlan] = {}
    for found in fitting:
        layout = found.layout
        axes = (layout.tensor, layout.pipeline, layout.context, layout.expert)
        if axes not in chosen and not problems(
            found.config, world_size=num_learners, hf_config=hf_configs[0], has_dataset=True
        ):
            chosen[axes] = found
        if len(chosen) == count:
            break
    return [Suggestion.of(found) for found in chosen.values()]


def other_splits(plan: RunPlan, layouts: Iterable[Suggestion], *, hf_config: HfConfig) -> list[Suggestion]:
    """The fastest other ways to divide the same GPUs between learners and engines, at most `SHOWN_SPLITS`.

    Each is planned with the axes of the configured layout and of the suggested ones, as far as they divide its learners; and,
    for an MoE model, with engines that spread the experts over copies of their attention.
    """
    choices = [plan.config.parallel, *(suggestion.plan.config.parallel for suggestion in layouts)]
    fastest: dict[Engine, RunPlan] = {}
    num_gpus = plan.hardware.num_gpus - plan.split.teachers
    for form, eighths in itertools.product(_forms(plan), range(1, 8)):
        engine = replace(form, vllm_num_engines=max(num_gpus * eighths // 8 // form.num_workers, 1))
        num_learners = num_gpus - engine.vllm_num_engines * engine.num_workers
        for parallel in choices:
            config = replace(plan.config, engine=engine, parallel=replace(parallel, num_learners_per_node=()))
            if num_learners < 1 or problems(config, world_size=num_learners, hf_config=hf_config, has_dataset=True):
                continue
            for found in _fitting(plan, config, config.parallel, num_learners):
                if found.fits and (engine not in fastest or _preference(found) < _preference(fastest[engine])):
                    fastest[engine] = found
    if plan.fits:
        fastest.pop(plan.config.engine, None)
    return [Suggestion.of(found) for found in sorted(fastest.values(), key=_preference)[:SHOWN_SPLITS]]


def steps_ahead(plan: RunPlan) -> StepsAhead | None:
    """The same run with generation at the same time as training.

    None if the plan does not fit, the run already does so, its engines share the learners' GPUs, or it refuses these settings.
    """
    config = plan.config
    if not plan.fits or config.rollout.async_steps or config.engine.vllm_mode != "ray":
        return None
    loss, settings = config.loss, dict(AHEAD)
    if not (loss.use_rho_correction or config.algorithm.use_vllm_logprobs or ":" in loss.policy_loss):
        loss, settings["use_rho_correction"] = replace(loss, use_rho_correction=True), True
    changed = replace(config, loss=loss, rollout=replace(config.rollout, **AHEAD))
    learners = plan.split.learners
    before, after = (problems(own, world_size=learners, has_dataset=True) for own in (config, changed))
    if set(after) - set(before):
        return None
    return StepsAhead(
        settings, plan_run(changed, plan.shape, plan.hardware, num_learners=learners, teachers=plan.teachers)
    )


def _forms(plan: RunPlan) -> list[Engine]:
    """The configured engine, and of those with copies of the attention the one whose GPUs generate most."""
    own, shape, hardware = plan.config.engine, plan.shape, plan.hardware
    if not shape.experts or own.vllm_mode != "ray":
        return [own]
    seconds: dict[Engine, float] = {}
    for tensor, copies in itertools.product(POWERS[:4], COPIES):
        engines = plan.split.engines // (tensor * copies)
        if tensor > hardware.gpus_per_node or not engines or shape.experts.count % (tensor * copies):
            continue
        form = replace(
            own,
            vllm_num_engines=engines,
            vllm_tensor_parallel_size=tensor,
            vllm_data_parallel_size=copies,
            vllm_enable_expert_parallel=True,
        )
        memory = engine_memory(
            shape, form, hardware, longest=plan.config.max_model_length, dtype_bytes=plan.dtype_bytes
        )
        if time := generation_time(shape, form, memory, plan.work, hardware, dtype_bytes=plan.dtype_bytes):
            seconds[form] = time.total
    best = min(seconds, key=seconds.__getitem__, default=own)
    return list(dict.fromkeys((own, best)))


def _with_engines(config: Config, engines: int) -> Config:
    """The configuration with this many engines and learners on all other GPUs."""
    return replace(
        config,
        parallel=replace(config.parallel, num_learners_per_node=()),
        engine=replace(config.engine, vllm_num_engines=engines),
    )


def _axes(
    config: Config, shape: ModelShape, hardware: Hardware, num_learners: int, hf_configs: Sequence[HfConfig]
) -> Iterator[Parallel]:
    """Every split of the model that its sizes and the number of learners allow; tensor groups stay within a node."""
    for tensor in POWERS:
        if tensor > hardware.gpus_per_node:
            continue
        for stages in range(1, min(num_learners // tensor, shape.num_layers) + 1):
            for context in POWERS:
                if context > LARGEST_CONTEXT or num_learners % (tensor * stages * context):
                    continue
                for expert in POWERS if shape.experts else (1,):
                    if num_learners // stages % expert:
                        continue
                    for chunks in CHUNKS if stages > 1 else (1,):
                        first, last = _ends(shape.num_layers, stages, chunks)
                        parallel = replace(
                            config.parallel,
                            tensor_model_parallel_size=tensor,
                            pipeline_model_parallel_size=stages,
                            context_parallel_size=context,
                            expert_model_parallel_size=expert,
                            virtual_pipeline_model_parallel_size=chunks,
                            num_layers_in_first_pipeline_stage=first,
                            num_layers_in_last_pipeline_stage=last,
                            fsdp_shard_degree=None,
                            sequence_parallel="auto",
                        )
                        layout = layout_of(replace(config, parallel=parallel), num_learners)
                        if not any(problem for own in hf_configs for problem in layout_problems(own, layout)):
                            yield parallel


def _ends(num_layers: int, stages: int, chunks: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage where the layers are too few for equal chunks: these have less, by a chunk at most."""
    a_chunk = -(-num_layers // (stages * chunks))
    missing = a_chunk * chunks * stages - num_layers
    first, last = (a_chunk * chunks - (missing + own) // 2 for own in (0, 1))
    return (first, last) if missing and last >= max(a_chunk * (chunks - 1), 1) else (None, None)


def _fitting(plan: RunPlan, config: Config, parallel: Parallel, num_learners: int) -> list[RunPlan]:
    """Variants of a plan that fit, for all ZeRO stages; less recomputation is tried only while more of it fits."""
    shape, hardware = plan.shape, plan.hardware
    modules = ("core_attn", "moe" if shape.experts else "mlp")
    fitting = []
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
                hardware,
                num_learners=num_learners,
                teachers=plan.teachers,
            )
            for zero in (ZERO_STAGES if config.adapter.lora is None else ZERO_STAGES[:1])
        ]
        plans = [plan for plan in plans if plan.worst.total <= hardware.gpu.memory_bytes]
        if not plans:
            break
        fitting.extend(plans)
    return fitting


def _preference(plan: RunPlan) -> tuple[float, ...]:
    """Sort key of layouts that fit: step time; among equally fast ones, memory to spare, then fewer model pieces, then
    Megatron's own distributed optimizer (ZeRO-1).
    """
    layout = plan.layout
    return (
        int(math.log(plan.pace_s) / math.log1p(EQUALLY_FAST)),
        plan.worst.total > (1 - SPARE) * plan.hardware.gpu.memory_bytes,
        layout.tensor * layout.pipeline * layout.context * layout.virtual_pipeline,
        layout.zero_stage != 1,
        plan.pace_s,
    )


def _why(plan: RunPlan) -> str:
    """The largest causes of the learners' time, with their shares."""
    seconds = dict(plan.learners.training)
    for cause, added in plan.learners.logprobs.items():
        seconds[cause] = seconds.get(cause, 0.0) + added
    total = sum(seconds.values())
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:3]
    return ", ".join(
        f"{CAUSES[cause]} {seconds[cause] / total:.0%}" for cause in largest if seconds[cause] > 0.005 * total
    )
