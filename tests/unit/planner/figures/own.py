"""Steps of mgrpo's own learner on one H100, as benchmarks/training-cuda.json has them, and their plans."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mgrpo.models.family import shape_of
from mgrpo.moving import from_values
from mgrpo.planner.hardware import GIB, GPUS, Assumptions, Hardware
from mgrpo.planner.plan import plan_run
from tests.unit.planner.figures.published import Compared, of
from tools.gpu_check_models import COMMON, FAMILIES, SIZES, WORK, Kind, work_settings

MEASURED = Path(__file__).parents[4] / "benchmarks" / "training-cuda.json"
FITTED = "experts"
"""The mode from which an assumption was derived: its speed says nothing of a plan."""
MODES: dict[str, tuple[Kind, dict[str, object], str]] = {
    "bf16": ("dense", {}, "its timed steps may still warm up; on one GPU the same program as the next row"),
    "zero_stage 3": ("dense", {"zero_stage": 3}, ""),
    "recompute full": ("dense", {"recompute_granularity": "full"}, ""),
    "shared prompts": ("dense", {"shared_prompt_packing": True}, "attention to a shared prompt is another kernel"),
    "experts": ("experts", {}, "not in the mean: `host_experts_ms` is from this row"),
    "softcap": ("softcap", {}, "FlexAttention, and four norms a layer; the host needs longer than for other layers"),
    "fp32": ("dense", {"model_dtype": "float32"}, "attention without flash"),
}


def judged(own: Iterable[Compared]) -> list[Compared]:
    """Speeds from which nothing in a plan was derived."""
    return [row for row in of("tok_s_gpu", own) if row.row != FITTED]


def compare_own() -> list[Compared]:
    """Speed, and memory at its peak without what CUDA reserves and the allocator wastes."""
    measured = {mode["mode"]: mode for mode in json.loads(MEASURED.read_text())["modes"]}
    found, work = [], WORK["large"]
    for name, (kind, settings, note) in MODES.items():
        mode = measured[name]
        sequences = work.prompts * work.samples
        share = mode["tokens"] / sequences / (work.prompt_tokens + work.response_tokens)
        if settings.get("shared_prompt_packing"):
            # The same samples as the others', whose prompts count once.
            share = measured["bf16"]["tokens"] / sequences / (work.prompt_tokens + work.response_tokens)
        packs = -(-mode["tokens"] // work.pack_length)
        filled = mode["tokens"] / packs / work.pack_length * (1 + 1e-3)
        config = from_values(
            work_settings(work) | {"total_episodes": sequences, "transformer_impl": "local"} | settings
        )
        assumed = Assumptions(prompt_share=share, response_share=share, pack_fill=filled)
        hardware = Hardware(gpu=GPUS["H100"], nodes=1, gpus_per_node=1, assumed=assumed)
        plan = plan_run(config, shape_of(COMMON | FAMILIES[kind] | SIZES["large"][kind]), hardware, num_learners=1)
        figures = {
            "tok_s_gpu": (mode["tokens_per_s"], mode["tokens"] / plan.learners.total),
            "mem_gib": (mode["peak_gib"], plan.worst.peak / GIB),
        }
        found += [
            Compared(row=name, source="mgrpo", figure=figure, reported=reported, planned=planned, note=note)
            for figure, (reported, planned) in figures.items()
        ]
    return found
