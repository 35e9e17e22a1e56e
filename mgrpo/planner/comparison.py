"""A rehearsed step beside the same step on paper, line by line, as tables and as JSON. No torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from mgrpo.models.memory import stage_layers
from mgrpo.planner.hardware import GIB
from mgrpo.planner.learners.engine_layers import engine_flops
from mgrpo.planner.plan import RunPlan
from mgrpo.planner.roles import document_lengths
from mgrpo.planner.traffic import Passed, Traffic, backward_traffic, data_traffic, forward_traffic
from mgrpo.planner.work import Workload, layer_flops, passes_of, stage_flops

NOTED = 0.005
"""Relative differences from here on are explained."""

AXES = {
    "tensor": ("tensor",),
    "context": ("context",),
    "expert": ("expert", "expert tensor"),
    "pipeline": ("pipeline", "world", "embedding"),
    "data": ("data", "shards", "replicas", "expert data"),
}
"""The axes of the plan, and whose process groups belong to each."""
KEPT = ("parameters", "gradients", "optimizer", "reference", "teachers", "transformer_engine")
"""Kinds of memory that stay from step to step."""
STEP = ("data", "score", "forward", "backward", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure, rehearsed and planned."""

    section: str
    name: str
    rehearsed: float
    planned: float
    why: str = ""
    """The explanation of a difference."""

    @property
    def difference(self) -> float | None:
        """Relative to the plan; None where nothing was planned."""
        return (self.rehearsed - self.planned) / self.planned if self.planned else None


def compare(plan: RunPlan, found: dict[str, Any]) -> list[Line]:
    """All lines of one rank that was rehearsed without an error."""
    return [*_memory(plan, found), *_sent(plan, found), *_flops(plan, found)]


def _memory(plan: RunPlan, found: dict[str, Any]) -> Iterator[Line]:
    stage, at_peak = plan.stages[found["stage"]], Counter(found["at_peak"])
    states = stage.states
    for kind, planned in (
        ("parameters", states.parameters),
        ("gradients", states.gradients),
        ("optimizer", states.optimizer),
        ("reference", states.reference),
        ("teachers", states.teachers),
        ("transformer_engine", stage.transformer_engine),
    ):
        if planned or at_peak[kind]:
            yield Line(
                section="memory", name=kind, rehearsed=at_peak[kind], planned=planned, why="rounding to 512 bytes"
            )
    packs = found["packs"] * plan.config.algorithm.num_mini_batches
    if planned := stage.activations.offloaded * packs:
        yield Line(
            section="memory",
            name="activations copied to the host",
            rehearsed=found["offloaded"],
            planned=planned,
            why="a layer's input is often an output of the layer before it",
        )
    yield Line(
        section="memory",
        name="whole weights, passes",
        rehearsed=found["peak"] - sum(at_peak[kind] for kind in KEPT),
        planned=states.unsharded + stage.passes,
        why="the plan has a pack of responses only",
    )
    yield Line(
        section="memory",
        name="peak",
        rehearsed=found["peak"],
        planned=stage.peak,
        why="without fragmentation, the weight sync, and what CUDA and NCCL reserve",
    )
    if found["restored"]:
        yield Line(
            section="memory",
            name="peak of a restore",
            rehearsed=found["restored"]["peak"],
            planned=stage.start,
            why="ZeRO-3 gathers no layer before the first step",
        )


def _sent(plan: RunPlan, found: dict[str, Any]) -> Iterator[Line]:
    sent = Counter[str]()
    for axis, phase, _, _, size in found["sent"]:
        if phase in STEP:
            sent[axis] += size
    planned = planned_traffic(plan, found)
    for axis, groups in AXES.items():
        rehearsed, on_paper = sum(sent.pop(group, 0) for group in groups), getattr(planned, axis)
        if rehearsed or on_paper:
            yield Line(section="sent", name=axis, rehearsed=rehearsed, planned=on_paper, why=_why_sent(axis))
    if others := sum(sent.values()):
        yield Line(
            section="sent", name="others", rehearsed=others, planned=0, why="sums over all ranks, of single numbers"
        )


def _why_sent(axis: str) -> str:
    return {
        "tensor": "log-probabilities, gradients of norms; with context ranks, how many responses each has",
        "context": "log-probabilities of all responses",
        "expert": "routing probabilities",
        "data": "padding; before the first update ZeRO-2 and 3 also gather all weights",
    }.get(axis, "")


def _rehearsed_work(plan: RunPlan, found: dict[str, Any]) -> Workload:
    """The batch of one rank's context group in the rehearsed step."""
    prompt, response = document_lengths(plan.config, plan.layout)
    packs = found["packs"] * plan.config.algorithm.num_mini_batches
    return replace(plan.work, prompts=packs, sequences=2 * packs, prompt_tokens=prompt, response_tokens=response)


def planned_traffic(plan: RunPlan, found: dict[str, Any]) -> Traffic:
    """The rank's traffic in the rehearsed step, as planned."""
    config, layout, stage = plan.config, plan.layout, found["stage"]
    settings, passes = config.parallel, passes_of(config)
    tokens = found["packs"] * config.algorithm.num_mini_batches * layout.round_up(settings.pack_length)
    work = _rehearsed_work(plan, found)
    responses = work.sequences * work.response_tokens
    passed = Passed(
        tokens=tokens,
        responses=responses,
        dtype_bytes=plan.dtype_bytes,
        fp32_logits=plan.config.model.cast_lm_head_to_fp32,
    )
    forward = forward_traffic(plan.shape, layout, settings, passed, stage=stage)
    training = forward + backward_traffic(
        plan.shape, layout, settings, passed, stage=stage, logits_chunk=plan.logits_chunk
    )
    update = data_traffic(
        plan.shape,
        layout,
        stage=stage,
        dtype_bytes=plan.dtype_bytes,
        num_micro_batches=found["packs"],
        lora=config.adapter.lora,
    )
    scoring = forward * (passes.reference + passes.old)
    return training * passes.train + scoring + update * passes.optimizer_steps


def _flops(plan: RunPlan, found: dict[str, Any]) -> Iterator[Line]:
    counted = Counter[str]()
    for phase, kind, flops in found["flops"]:
        # Teachers have other shapes and are planned separately.
        if phase != "teach":
            counted[kind] += flops
    products, attention = _planned_flops(plan, found)
    yield Line(
        section="operations",
        name="matrix products",
        rehearsed=counted["products"] + counted["products in 8 bits"],
        planned=products,
        why="context ranks have different numbers of responses",
    )
    if plan.config.parallel.fp8 != "none":
        yield Line(
            section="operations",
            name="of these in 8 bits",
            rehearsed=counted["products in 8 bits"],
            planned=_planned_in_8_bits(plan, found),
            why="padding of the rows of each expert",
        )
    yield Line(
        section="operations",
        name="attention",
        rehearsed=counted["attention"],
        planned=attention,
        why="whole rectangles are counted, the plan counts what a token sees",
    )


def _planned_flops(plan: RunPlan, found: dict[str, Any]) -> tuple[float, float]:
    """Operations of the rank in the rehearsed step: matrix products, attention."""
    layout, stage = plan.layout, found["stage"]
    settings, passes = plan.config.parallel, passes_of(plan.config)
    work = _rehearsed_work(plan, found)
    per_stage = stage_flops(plan.shape, layout, work, settings, stage=stage, logits_chunk=plan.logits_chunk)
    layers = layer_flops(plan.shape, work)
    held = [layer for layer in stage_layers(layout, plan.shape.num_layers, stage) if plan.shape.has_attention(layer)]
    core = sum(layers[layer].core.total for layer in held)
    ranks = layout.tensor * layout.context
    attention = core * (passes.in_forward + passes.train * settings.recomputes("core_attn")) / ranks
    whole = (per_stage.forward.total * passes.in_forward + per_stage.repeated.total * passes.train) / ranks
    return whole - attention, attention


def _planned_in_8_bits(plan: RunPlan, found: dict[str, Any]) -> float:
    settings, passes = plan.config.parallel, passes_of(plan.config)
    tokens = found["packs"] * plan.config.algorithm.num_mini_batches * plan.layout.round_up(settings.pack_length)
    forward, repeated = engine_flops(plan.shape, plan.layout, settings, stage=found["stage"], tokens=tokens)
    return forward * passes.in_forward + repeated * passes.train


def show(plan: RunPlan, found: Sequence[dict[str, Any]]) -> None:
    """Print the results of a rehearsal, rank by rank."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    for rank in found:
        console.print()
        if "error" in rank:
            console.print(f"rank {rank['rank']}: the step fails: {rank['error']}", style="bold red", markup=False)
            for where in rank["at"]:
                console.print(f"  {where}", markup=False)
            continue
        console.print(
            f"rank {rank['rank']}, stage {rank['stage']}: the step runs, {rank['packs']} packs an update; "
            f"{rank['operations']} operations in {rank['seconds']} s",
            style="bold green",
        )
        console.print(*rank["remarks"], sep="\n", markup=False)
        console.print(_figures(compare(plan, rank)))
        console.print(_waits(rank))


def _figures(lines: Sequence[Line]) -> Table:
    table = Table()
    for column in ("", "", "rehearsed", "planned", "difference", "because"):
        table.add_column(column, justify="right" if column in ("rehearsed", "planned", "difference") else "left")
    section = None
    for line in lines:
        if section not in (None, line.section):
            table.add_section()
        show_as, unit = (_exponent, "") if line.section == "operations" else (_gib, ", GiB")
        title = f"{line.section}{unit}" if line.section != section else ""
        section = line.section
        difference = "" if line.difference is None else f"{line.difference:+.1%}"
        why = line.why if line.difference is None or abs(line.difference) >= NOTED else ""
        table.add_row(title, line.name, show_as(line.rehearsed), show_as(line.planned), difference, why)
    return table


def _waits(rank: dict[str, Any]) -> Table:
    table = Table(title="the host waits for the device", title_justify="left")
    for column in ("times", "in", "for", "at"):
        table.add_column(column, justify="right" if column == "times" else "left")
    for phase, what, where, count in rank["waits"]:
        if phase != "build":
            table.add_row(str(count), phase, what, where)
    uploads = sum(count for phase, *_, count in rank["uploads"] if phase not in ("build", "restore"))
    table.caption = f"and {uploads} times for a copy from memory that is not pinned, besides those of a restore"
    return table


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}"


def _exponent(count: float) -> str:
    return f"{count:.3e}"


def as_json(plan: RunPlan, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rehearsed ranks, each with its lines beside the plan, in bytes and operations."""
    return [
        rank | ({} if "error" in rank else {"compared": [dataclasses.asdict(line) for line in compare(plan, rank)]})
        for rank in found
    ]
