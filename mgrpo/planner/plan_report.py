"""The plan as text (the verdict first, then memory, time, traffic and other layouts) and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mgrpo.config.derived import infer_layout_of, num_exports, num_states
from mgrpo.models.memory import export_bytes
from mgrpo.planner.activations import stage_activations
from mgrpo.planner.engines.step_pace import BOUNDS, Pace
from mgrpo.planner.failures import failures, start_sentence, state_bytes
from mgrpo.planner.gpu_memory import StageMemory
from mgrpo.planner.hardware import GIB
from mgrpo.planner.learners.links import bytes_s
from mgrpo.planner.plan import RunPlan
from mgrpo.planner.suggest import RECOMPUTE, Recompute, Suggestion, steps_ahead
from mgrpo.planner.traffic import AXES, span_of

SHOWN_STAGES = 4
PHASES = {
    "generate": "generation",
    "teach": "teachers",
    "logprobs": "logprob passes",
    "train": "training",
    "sync": "weight sync",
    "turns": "taking turns",
}
CAUSES = {
    "generate": {
        "prefill": "computing prompts",
        "weights": "decoding: weights",
        "cache": "decoding: keys and values",
        "exchange": "decoding: all-reduces",
        "kernels": "decoding: short kernels",
        "overhead": "decoding: outside the model",
    },
    "teach": {"compute": "reading completions"},
    "sync": {"weights": "sending weights"},
    "turns": {"copies": "copies to host memory and back"},
    "train": {
        "compute": "matrix products",
        "memory": "norms, gates, routing, loss",
        "gradients": "adding gradients, once a pack",
        "recompute": "products and norms, repeated (recompute)",
        "host": "the host, starting kernels",
        "offload": "copies of activations that nothing covers",
        "bubble": "pipeline bubble",
        "tensor": "tensor-parallel collectives",
        "context": "context-parallel exchange",
        "expert": "expert all-to-all",
        "pipeline": "messages between stages",
        "adapters": "merging adapters into the weights",
        "data": "gradient and parameter collectives",
        "optimizer": "optimizer update",
    },
}
CAUSES["logprobs"] = CAUSES["train"]
ADVICE = {
    ("generate", "prefill"): "more engines, or vllm_enable_prefix_caching",
    ("generate", "weights"): "more sequences at once, or engines with more workers",
    ("generate", "cache"): "more engines",
    ("generate", "exchange"): "engines with fewer workers",
    ("generate", "kernels"): "more sequences at once",
    ("generate", "overhead"): "more sequences at once, or more of them per step",
    ("teach", "compute"): "more teacher_num_engines, or more learners where they hold the teachers",
    ("sync", "weights"): "a faster network, or fewer engines with more workers",
    ("turns", "copies"): "more learners, or GPUs of their own for the engines",
    ("train", "compute"): "more learners",
    ("logprobs", "compute"): "more learners, or beta 0",
    ("train", "recompute"): "a layout that keeps activations",
    ("train", "host"): "a longer pack_length",
    ("train", "bubble"): "fewer stages, or virtual_pipeline_model_parallel_size",
}
"""Remedies for a slow phase, by its largest cause; for other causes, another layout."""


def show(plan: RunPlan, suggestions: Sequence[Suggestion], splits: Sequence[Suggestion]) -> None:
    """Print the whole plan."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(verdict(plan), style="bold green" if plan.fits else "bold red")
    tables = [_layouts(plan, suggestions)] if suggestions else []
    tables += [_splits(plan, splits)] if splits else []
    if plan.split.idle >= 0:
        for line in _summary(plan):
            console.print(line)
        shared = [_sharing(plan)] if plan.sharing else []
        tables = [_memory(plan), _engine(plan), *shared, _time(plan), _traffic(plan), *tables]
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    console.print(
        "Sizes are counted. Lengths, efficiencies and reserves are assumptions, times are estimates, and nothing was "
        "measured; see docs/planning.md."
    )


def verdict(plan: RunPlan) -> str:
    """Verdict on the run's fit: one line, or one line per shortage."""
    shortages = list(plan.shortages())
    if shortages:
        return "\n".join(f"does not fit: {sentence}" for sentence in shortages)
    memory, engine = plan.hardware.gpu.memory_bytes, plan.engine
    fullest = max(plan.sharing, key=lambda phase: phase.total, default=None)
    where = (
        f"while the run is at {PHASES[fullest.phase]}"
        if fullest
        else f"on the worst learner (stage {plan.worst.stage})"
    )
    return (
        f"fits: {_gib((fullest or plan.worst).total)} of {memory / GIB:.0f} GiB {where}; "
        f"an engine caches {counted(engine.longest_sequences, 'sequence')} of {engine.longest} tokens at a time"
    )


def _summary(plan: RunPlan) -> Iterator[str]:
    hardware, engines, split = plan.hardware, plan.config.engine, plan.split
    if plan.generation:
        phase, cause = plan.bottleneck
        share = "" if plan.ahead else f" ({plan.phases[phase] / plan.step_s:.0%})"
        yield (
            f"about {plan.pace_s:.{0 if plan.pace_s >= 10 else 1}f} s per step; bottleneck: {PHASES[phase]}{share}, mostly {CAUSES[phase][cause]}; "
            f"remedy: {ADVICE.get((phase, cause), 'another layout')}"
        )
        if plan.ahead:
            yield _pace(plan, plan.ahead)
        if found := steps_ahead(plan):
            yield found.sentence
        if plan.fits and plan.public:
            yield f"{plan.tokens_s_gpu:,.0f} tokens a second and GPU; best published, with other lengths and batches: {plan.public.sentence}"
    yield (
        f"{plan.config.model.model_name_or_path}: {_billions(plan.model_bytes / plan.dtype_bytes)} weights, "
        f"{plan.config.model.model_dtype}; {counted(plan.work.sequences, 'completion')} per step, assumed mean "
        f"{plan.work.prompt_tokens:.0f} + {plan.work.response_tokens:.0f} tokens"
    )
    yield (
        f"{hardware.nodes} x {hardware.gpus_per_node} {hardware.gpu.name}: {counted(split.learners, 'learner')}, {split.engines} "
        f"{'shared with' if engines.shares_gpus else 'for'} {counted(engines.vllm_num_engines, 'engine')} of "
        f"{_workers(plan)}{f', {split.teachers} for teachers' if split.teachers else ''}, {max(split.idle, 0)} idle"
    )
    yield (
        f"learners: {_layout_text(plan)}; packs of {plan.config.parallel.pack_length} tokens, "
        f"{counted(plan.learners.num_micro_batches, 'micro-batch')} per rank"
        + (f", LM head {plan.logits_chunk} columns at a time" if plan.logits_chunk else "")
    )
    if plan.generation and plan.config.has_length:
        yield whole_run(plan)
        yield start_sentence(plan)
        if sentence := failures(plan):
            yield sentence
    yield (
        f"operations per step: {plan.training_flops:.2e} in training and logprob passes "
        f"(MFU {plan.learner_utilisation:.0%}), {plan.generation_flops:.2e} in generation"
    )


def _pace(plan: RunPlan, ahead: Pace) -> str:
    """Bound of a run that generates ahead, and the age of its tokens."""
    rollout = plan.config.rollout
    oldest = rollout.async_steps if rollout.max_staleness is None else rollout.max_staleness
    return (
        f"generation beside training, up to {counted(oldest, 'step')} old, {ahead.running:.0f} sequences an engine at a time; "
        f"the pace is that of {BOUNDS[ahead.bound]}"
    )


def whole_run(plan: RunPlan) -> str:
    """Hours of all steps, and the sizes of exports and training states."""
    config, lora = plan.config, plan.config.adapter.lora
    export = export_bytes(plan.shape, dtype_bytes=plan.dtype_bytes, lora=lora)
    steps, states = config.num_training_steps, num_states(config)
    return (
        f"whole run: {counted(steps, 'step')}, {_duration(steps * plan.pace_s)} without evaluations; "
        f"{counted(num_exports(config), 'export')} of {_decimal(export)}; a training state {_decimal(state_bytes(plan))}, "
        + (
            f"{states} on disk at most"
            if states
            else "written only when the run is stopped (checkpoint_state_freq, save_every_minutes)"
        )
    )


def _decimal(num_bytes: int) -> str:
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
    unit, name = next((row for row in units if num_bytes >= row[0]), units[-1])
    return f"{num_bytes / unit:.{0 if num_bytes >= 10 * unit else 1}f} {name}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "under a minute"
    size, unit = (seconds / 3600, "hours") if seconds >= 3600 else (seconds / 60, "minutes")
    return f"about {size:.{0 if size >= 10 else 1}f} {unit}"


def counted(number: int, noun: str) -> str:
    """`1 engine`, `2 engines`, `12,000 engines`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _layout_text(plan: RunPlan) -> str:
    layout, settings = plan.layout, plan.config.parallel
    parts = [f"TP {layout.tensor}", f"PP {layout.pipeline}"]
    if layout.virtual_pipeline > 1:
        parts[-1] += f" (x {layout.virtual_pipeline} chunks)"
    parts += [f"CP {layout.context}"] if layout.context > 1 else []
    parts += [f"EP {layout.expert}"] if plan.shape.experts else []
    parts += [f"DP {layout.data}"]
    return f"{' x '.join(parts)}, ZeRO {layout.zero_stage}, recompute {settings.recompute_granularity}"


def _memory(plan: RunPlan) -> Table:
    """Memory of a learner GPU by part; a column per stage, or for the first, the worst and the last stage."""
    shown = {0, plan.worst.stage, len(plan.stages) - 1}
    stages = [stage for stage in plan.stages if len(plan.stages) <= SHOWN_STAGES or stage.stage in shown]
    table = Table(title="memory of a learner GPU, GiB", title_justify="left", title_style="bold")
    table.add_column("part")
    for stage in stages:
        is_worst = stage.stage == plan.worst.stage and len(plan.stages) > 1
        table.add_column(f"stage {stage.stage}{' (worst)' if is_worst else ''}", justify="right")
    for group in (_permanent, _temporary):
        for name, values in group(stages):
            if any(values):
                table.add_row(name, *map(_gib, values))
        table.add_section()
    table.add_row("peak", *(_gib(stage.total) for stage in stages), style="bold")
    table.add_section()
    settings = plan.config.parallel
    for recompute in RECOMPUTE:
        totals = (_activations(plan, stage.stage, recompute) for stage in stages)
        modules = f" {' '.join(settings.recompute_modules)}" if recompute == "selective" else ""
        used = " (used)" if recompute == settings.recompute_granularity else ""
        table.add_row(f"passes, recompute {recompute}{modules}{used}", *map(_gib, totals), style="dim")
    if any(on_host := [stage.states.host + stage.activations.on_host for stage in stages]):
        table.add_row("in host memory", *map(_gib, on_host), style="dim")
    return table


def _permanent(stages: Sequence[StageMemory]) -> Iterator[tuple[str, list[int]]]:
    yield "parameters", [stage.states.parameters for stage in stages]
    yield "gradients (fp32)", [stage.states.gradients for stage in stages]
    yield "optimizer", [stage.states.optimizer for stage in stages]
    yield "reference model", [stage.states.reference for stage in stages]
    yield "teachers", [stage.states.teachers for stage in stages]
    yield "whole weights (ZeRO 3)", [stage.states.unsharded for stage in stages]
    yield "Transformer Engine (8-bit copies, buffers)", [stage.transformer_engine for stage in stages]
    yield "CUDA, NCCL, libraries (assumed)", [stage.reserved for stage in stages]


def _temporary(stages: Sequence[StageMemory]) -> Iterator[tuple[str, list[int]]]:
    """The parts that never coexist: only the larger is part of the peak."""
    yield "larger of: training", [stage.training for stage in stages]
    yield "             activations", [stage.activations.kept for stage in stages]
    yield "             buffers", [stage.activations.buffers for stage in stages]
    yield "             larger of: LM head and loss", [stage.loss for stage in stages]
    yield "                        a layer's backward pass", [stage.layer for stage in stages]
    yield "                        with a merged weight (adapters)", [stage.merged for stage in stages]
    yield "             fragmentation (assumed)", [stage.fragmentation for stage in stages]
    yield "           weight sync (buckets)", [stage.sync for stage in stages]
    yield "           weights, when the model is built", [stage.built for stage in stages]


def _activations(plan: RunPlan, stage: int, recompute: Recompute) -> int:
    settings = dataclasses.replace(plan.config.parallel, recompute_granularity=recompute)
    return stage_activations(
        plan.shape,
        plan.layout,
        stage=stage,
        pack_length=settings.pack_length,
        dtype_bytes=plan.dtype_bytes,
        settings=settings,
        num_micro_batches=plan.learners.num_micro_batches,
        logits_chunk=plan.logits_chunk,
        fp32_logits=plan.config.model.cast_lm_head_to_fp32,
    ).total


def _engine(plan: RunPlan) -> Table:
    engine, settings = plan.engine, plan.config.engine
    table = Table(title="memory of an engine GPU, GiB", title_justify="left", title_style="bold")
    for column in ("weights", "workspace (assumed)", "KV cache", "per token", "sequences of maximum length"):
        table.add_column(column, justify="right")
    running = f"{engine.longest_sequences:,} (vllm_max_num_seqs {settings.vllm_max_num_seqs})"
    per_token = f"{engine.sequence.per_token / 1024:.0f} KiB"
    if engine.sequence.state:
        per_token += f", and {engine.sequence.state / 2**20:.0f} MiB per sequence"
    table.add_row(_gib(engine.weights), _gib(engine.workspace), _gib(max(engine.cache, 0)), per_token, running)
    return table


def _sharing(plan: RunPlan) -> Table:
    """Learner, engine and teachers on one GPU, phase by phase."""
    memory = plan.hardware.gpu.memory_bytes
    title = f"memory of a shared GPU, GiB of {memory / GIB:.0f}"
    table = Table(title=title, title_justify="left", title_style="bold")
    teach = ("teachers",) if plan.shared_teachers else ()
    for column in ("phase", "learner", "engine", *teach, "all", ""):
        table.add_column(column, justify="left" if column in ("phase", "") else "right")
    for phase in plan.sharing:
        verdict = "fits" if phase.total <= memory else "does not fit"
        sizes = (phase.learner, phase.engine, *([phase.teachers] if teach else []), phase.total)
        parts = (_gib(size) for size in sizes)
        table.add_row(PHASES[phase.phase], *parts, verdict)
    return table


def _time(plan: RunPlan) -> Table:
    table = Table(title="time of a step, s (estimate)", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("cause")
    table.add_column("s", justify="right")
    table.add_column("share", justify="right")
    for phase, seconds in plan.phases.items():
        if not seconds:
            continue
        table.add_row(PHASES[phase], "", f"{seconds:.1f}", f"{seconds / plan.step_s:.0%}", style="bold")
        for (cause_phase, cause), part in plan.causes.items():
            if cause_phase == phase and phase != "sync" and part >= 0.005 * plan.step_s:
                table.add_row("", CAUSES[phase][cause], f"{part:.1f}", f"{part / plan.step_s:.0%}")
    table.add_section()
    how = "generation beside training" if plan.ahead else "one phase after the other"
    table.add_row("step", how, f"{plan.pace_s:.1f}", "", style="bold")
    return table


def _traffic(plan: RunPlan) -> Table:
    table = Table(title="sent per step", title_justify="left", title_style="bold")
    for column in ("", "GB", "by", "link", "assumed GB/s"):
        table.add_column(column, justify="right" if column.endswith(("GB", "GB/s")) else "left")
    hardware = plan.hardware
    for axis in AXES:
        sent = getattr(plan.learners.traffic, axis)
        if not sent:
            continue
        link = "in the node" if span_of(plan.layout, axis) <= hardware.gpus_per_node else "network"
        rate = bytes_s(axis, plan.layout, plan.config.parallel, hardware, plan.shape.experts)
        table.add_row(axis, f"{sent / 1e9:.1f}", "each learner", link, f"{rate / 1e9:.0f}")
    engines = plan.config.engine.vllm_num_engines
    link = "in the node" if hardware.num_gpus <= hardware.gpus_per_node else "network"
    table.add_row(
        "weight sync",
        f"{plan.sync_bytes * engines / 1e9:.1f}",
        "all senders together",
        link,
        f"{hardware.link_bytes_s(hardware.num_gpus) / 1e9:.0f}",
    )
    return table


def _layouts(plan: RunPlan, suggestions: Sequence[Suggestion]) -> Table:
    num_learners = suggestions[0].plan.split.learners
    title = f"layouts of {num_learners} learners that fit, best first (ranked as docs/planning.md describes)"
    table = Table(title=title, title_justify="left", title_style="bold")
    names = (
        "",
        "TP",
        "PP",
        "chunks",
        "CP",
        "EP",
        "DP",
        "ZeRO",
        "recompute",
        "GiB",
        "step s",
        "learners s",
        "largest causes",
    )
    for name in names:
        table.add_column(name, justify="left" if name.startswith(("recompute", "largest")) else "right")
    for number, suggestion in enumerate(suggestions, start=1):
        table.add_row(str(number), *_layout_row(suggestion))
    if num_learners == plan.split.learners:
        table.add_section()
        table.add_row("now", *_layout_row(Suggestion.of(plan)), style="bold" if plan.fits else "bold red")
    return table


def _splits(plan: RunPlan, splits: Sequence[Suggestion]) -> Table:
    """The same GPUs divided otherwise; set with `vllm_num_engines` and, where it is given, `num_learners_per_node`."""
    title = f"other divisions of the {plan.hardware.num_gpus} GPUs between learners and engines, best first"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("learners", "engines", "workers", "layout", "generation s", "logprobs + training s", "step s"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for suggestion in splits:
        table.add_row(*_split_row(suggestion.plan))
    if plan.split.idle >= 0:
        table.add_section()
        table.add_row(*_split_row(plan), style="bold" if plan.fits else "bold red")
    return table


def _split_row(plan: RunPlan) -> tuple[str, ...]:
    engines, phases = plan.config.engine, plan.phases
    return (
        str(plan.split.learners),
        str(engines.vllm_num_engines),
        _workers(plan),
        _layout_text(plan),
        f"{phases['generate']:.1f}",
        f"{phases['logprobs'] + phases['train']:.1f}",
        f"{plan.pace_s:.1f}",
    )


def _workers(plan: RunPlan) -> str:
    """Workers of an engine: `4`, or `2 x 16` where it has 16 copies of its attention."""
    infer = infer_layout_of(plan.config.engine)
    return f"{infer.tensor} x {infer.data}" if infer.data > 1 else str(infer.tensor)


def _layout_row(suggestion: Suggestion) -> tuple[str, ...]:
    plan, layout = suggestion.plan, suggestion.plan.layout
    axes = (
        layout.tensor,
        layout.pipeline,
        layout.virtual_pipeline,
        layout.context,
        layout.expert,
        layout.data,
        layout.zero_stage,
    )
    return (
        *map(str, axes),
        plan.config.parallel.recompute_granularity,
        _gib(plan.worst.total),
        f"{plan.pace_s:.1f}",
        f"{plan.learners.total:.1f}",
        suggestion.why,
    )


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= 0.05 * GIB or not size else f"{size / GIB:.2f}"


def as_json(plan: RunPlan, suggestions: Sequence[Suggestion], splits: Sequence[Suggestion]) -> dict[str, Any]:
    """The whole plan in bytes, seconds and operations."""
    ahead = steps_ahead(plan)
    return {
        "fits": plan.fits,
        "problems": list(plan.shortages()),
        "model": plan.config.model.model_name_or_path,
        "hardware": dataclasses.asdict(plan.hardware),
        "gpus": dataclasses.asdict(plan.split),
        "workload": dataclasses.asdict(plan.work),
        "layout": dataclasses.asdict(plan.layout) | {"data": plan.layout.data},
        "logits_chunk": plan.logits_chunk,
        "learners": [
            dataclasses.asdict(stage) | {"total": stage.total, "peak": stage.peak, "passes": stage.passes}
            for stage in plan.stages
        ],
        "sharing": [dataclasses.asdict(phase) | {"total": phase.total} for phase in plan.sharing],
        "engine": dataclasses.asdict(plan.engine) | {"longest_sequences": plan.engine.longest_sequences},
        "flops": {"training": plan.training_flops, "generation": plan.generation_flops},
        "sent_bytes": dataclasses.asdict(plan.learners.traffic)
        | {"sync": plan.sync_bytes * plan.config.engine.vllm_num_engines},
        "seconds": {
            "step": plan.step_s,
            "pace": plan.pace_s,
            "tokens_s_gpu": plan.tokens_s_gpu,
            "phases": plan.phases,
            "causes": [{"phase": phase, "cause": cause, "s": s} for (phase, cause), s in plan.causes.items()],
        },
        "generation_beside_training": ahead.as_json() if ahead else None,
        "public": dataclasses.asdict(plan.public) if plan.public else None,
        "bottleneck": dict(zip(("phase", "cause"), plan.bottleneck, strict=True)),
        "layouts": [
            dataclasses.asdict(suggestion.plan.layout)
            | {
                "data": suggestion.plan.layout.data,
                "recompute_granularity": suggestion.plan.config.parallel.recompute_granularity,
                "bytes": suggestion.plan.worst.total,
                "step_s": suggestion.plan.pace_s,
                "why": suggestion.why,
            }
            for suggestion in suggestions
        ],
        "splits": [
            {"learners": split.plan.split.learners, "engines": split.plan.config.engine.vllm_num_engines}
            | {"layout": _layout_text(split.plan), "step_s": split.plan.pace_s}
            for split in splits
        ],
    }
