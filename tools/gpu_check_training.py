"""Trains models made on the spot in every mode that one GPU has, one mode after another. Started by tools/gpu_check.py.

    python tools/gpu_check_training.py --device cuda --out FILE --folder FOLDER [--profile FILE] [MODE ...]

The learner is that of a run, on packs of made-up samples; there are no engines. A mode may be named several times: its
second run is `MODE (2)`. Before a mode a line with its name is written to FILE, after it one with its figures: what starts
this program sees where it has died. It ends after the first mode that fails, because a device that has failed may answer the
next one wrongly.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from mgrpo.config import Config  # noqa: E402
from mgrpo.moving import from_values  # noqa: E402
from mgrpo.run.ranks.process import prepare_environment  # noqa: E402

prepare_environment(Config())

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_check_models import GIB, SIZES, WORK, Kind, Work, size_for, work_settings, write_model  # noqa: E402
from gpu_check_report import covered, kernel_table, numbered, time_shares  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

from mgrpo import packing  # noqa: E402
from mgrpo.config.derived import layout_of  # noqa: E402
from mgrpo.config.fused_kernels import kernel_line  # noqa: E402
from mgrpo.models.family import shape_of  # noqa: E402
from mgrpo.models.hf_config import read_hf_config  # noqa: E402
from mgrpo.models.shape import ModelShape  # noqa: E402
from mgrpo.parallel import backend  # noqa: E402
from mgrpo.planner.hardware import Assumptions, Gpu, Hardware  # noqa: E402
from mgrpo.planner.plan import RunPlan, plan_run  # noqa: E402
from mgrpo.run.report.throughput import Throughput  # noqa: E402
from mgrpo.types import PackLengths, TrainSample  # noqa: E402

if TYPE_CHECKING:
    from mgrpo.run.train.learner import Learner


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train on one GPU."""

    model: Kind = "dense"
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    """Optimizer steps' worth of batches; the first is not timed."""
    equals: str | None = "fp32"
    """The mode whose first step has the same loss and gradient norm, but for rounding."""
    uses_fla: bool = True
    """Use flash-linear-attention's kernels for gated delta nets where they are installed."""


MODES: dict[str, Mode] = {
    "bf16": Mode(),
    "fp32": Mode(settings={"model_dtype": "float32"}, steps=2, equals=None),
    # Its first steps may overflow.
    "fp16": Mode(settings={"model_dtype": "float16"}, equals=None),
    "local layers": Mode(settings={"transformer_impl": "local"}),
    "recompute selective": Mode(settings={"recompute_granularity": "selective"}),
    "recompute full": Mode(settings={"recompute_granularity": "full"}),
    "logits_chunk": Mode(settings={"logits_chunk": 128}),
    "reference": Mode(settings={"beta": 0.05}),
    "reference that moves": Mode(settings={"beta": 0.05, "ref_policy_update_freq": 1}),
    "shared prompts": Mode(settings={"shared_prompt_packing": True}),
    "zero_stage 0": Mode(settings={"zero_stage": 0}),
    "zero_stage 2": Mode(settings={"zero_stage": 2}),
    "zero_stage 3": Mode(settings={"zero_stage": 3}),
    "optimizer_cpu_offload": Mode(settings={"optimizer_cpu_offload": True}, steps=2),
    "entropy": Mode(settings={"entropy_coef": 0.01}, equals=None),
    "mini-batches": Mode(
        settings={"num_mini_batches": 2, "use_vllm_logprobs": False, "top_entropy_quantile": 0.5}, equals=None
    ),
    "experts": Mode(model="experts", equals="experts fp32"),
    "experts fp32": Mode(model="experts", settings={"model_dtype": "float32"}, steps=2, equals=None),
    "experts, routing replay": Mode(
        model="experts",
        settings={"routing_replay": "learner", "num_mini_batches": 2, "use_vllm_logprobs": False},
        equals=None,
    ),
    "softcap": Mode(model="softcap", equals="softcap fp32"),
    "softcap fp32": Mode(model="softcap", settings={"model_dtype": "float32"}, steps=2, equals=None),
    "gpt-oss": Mode(model="gpt-oss", equals="gpt-oss fp32"),
    "gpt-oss fp32": Mode(model="gpt-oss", settings={"model_dtype": "float32"}, steps=2, equals=None),
    "DeepSeek-V3": Mode(model="DeepSeek-V3", equals="DeepSeek-V3 fp32"),
    "DeepSeek-V3 fp32": Mode(model="DeepSeek-V3", settings={"model_dtype": "float32"}, steps=2, equals=None),
    "Qwen3-Next": Mode(model="Qwen3-Next", equals="Qwen3-Next fp32"),
    "Qwen3-Next without fla": Mode(model="Qwen3-Next", uses_fla=False, equals="Qwen3-Next fp32"),
    "Qwen3-Next fp32": Mode(model="Qwen3-Next", settings={"model_dtype": "float32"}, steps=2, equals=None),
    "GLM-4.5": Mode(model="GLM-4.5", equals="GLM-4.5 fp32"),
    "GLM-4.5 fp32": Mode(model="GLM-4.5", settings={"model_dtype": "float32"}, steps=2, equals=None),
    "activation_offloading": Mode(settings={"activation_offloading": True}),
    "fused_layers off": Mode(settings={"fused_layers": False}),
    "fused_layers": Mode(settings={"fused_layers": "auto"}),
}


def config_of(mode: Mode, folder: Path, work: Work, *, steps: int) -> Config:
    """The run's configuration; losses compare with the engine's logprobs, so that they depend on the model."""
    return from_values(
        {
            "model_name_or_path": str(folder / mode.model),
            "model_dtype": "bfloat16",
            "lr_scheduler_type": "constant",
            **work_settings(work),
            "total_episodes": steps * work.prompts * work.samples,
            **mode.settings,
        }
    )


def made_up_samples(work: Work, vocab: int) -> list[TrainSample]:
    """One batch: random tokens, lengths between half and all of the longest, logprobs near those of a random model."""
    random = np.random.default_rng(1)

    def tokens(longest: int) -> np.ndarray:
        return random.integers(3, vocab, random.integers(longest // 2, longest + 1)).astype(np.int32)

    samples = []
    for group in range(work.prompts):
        prompt = tokens(work.prompt_tokens)
        for _ in range(work.samples):
            response = tokens(work.response_tokens)
            samples.append(
                TrainSample(
                    prompt_tokens=prompt,
                    tokens=response,
                    loss_mask=np.ones(len(response), dtype=bool),
                    rollout_logprobs=random.normal(-math.log(vocab), 0.1, len(response)).astype(np.float32),
                    advantage=float(random.normal()),
                    group=group,
                )
            )
    return samples


def packed(samples: list[TrainSample], config: Config) -> tuple[dict[str, np.ndarray], np.ndarray, PackLengths]:
    """The batch as index and slice, and the lengths in its packs."""
    layout = layout_of(config, 1)
    padding = {"multiple_of": layout.pack_multiple_of, "document_multiple_of": layout.document_multiple_of}
    plan = packing.plan_step(
        samples,
        pack_length=layout.round_up(config.parallel.pack_length),
        dp=1,
        num_mini_batches=config.algorithm.num_mini_batches,
        share_prompts=config.parallel.shared_prompt_packing,
        **padding,
    )
    index, (own,) = packing.to_slices(samples, plan, **padding)
    return index, own.filled(), packing.pack_lengths(samples, [pack for (row,) in plan for pack in row], **padding)


def plan_of(config: Config, shape: ModelShape, samples: list[TrainSample]) -> RunPlan:
    """The plan of this training's memory by `mgrpo plan`, with the samples' mean lengths and the device's own memory."""
    prompt = sum(len(sample.prompt_tokens) for sample in samples) / len(samples)
    response = sum(len(sample.tokens) for sample in samples) / len(samples)
    assumed = Assumptions(
        prompt_share=prompt / config.data.max_prompt_token_length,
        response_share=response / config.rollout.response_length,
        reserved_gib=0.0,
    )
    # Its times are not looked at.
    gpu = Gpu(
        name="own",
        tflops=1,
        fp32_tflops=1,
        memory_gib=backend.device_bytes() / GIB,
        hbm_gb_s=1,
        nvlink_gb_s=1,
        pcie_gb_s=1,
    )
    return plan_run(config, shape, Hardware(gpu=gpu, nodes=1, gpus_per_node=2, assumed=assumed), num_learners=1)


@contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone, and its group on the host."""
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=5)
    try:
        yield dist.new_group(backend="gloo")
    finally:
        backend.leave_process_groups()


def train(
    name: str, mode: Mode, folder: Path, work: Work, device: torch.device, profile: Path | None
) -> dict[str, Any]:
    """Figures of one mode.

    Args:
        name: title of its part of the profile.
        profile: file for the costliest kernels of one more step, which is not timed.
    Raises:
        ValueError: a loss or gradient is not finite, or a step changed nothing.
    """
    config = config_of(mode, folder, work, steps=mode.steps + (profile is not None))
    shape = shape_of(read_hf_config(config.model_path))
    samples = made_up_samples(work, shape.vocab)
    index, own, lengths = packed(samples, config)
    before = reset_memory(device)
    figures: dict[str, Any] = {}
    # Delta nets ask for the kernel in every forward pass.
    plain = nullcontext() if mode.uses_fla else patch.object(backend, "delta_rule_kernel", lambda dtype: None)
    with one_rank() as host_group, plain:
        from mgrpo.run.train.learner import Learner

        learner = Learner(config, shape=shape, layout=layout_of(config, 1), host_group=host_group)
        steps = [one_step(learner, index, own, step, device) for step in range(1, mode.steps + 1)]
        if profile:
            figures["profile"] = profiled(
                partial(one_step, learner, index, own, mode.steps + 1, device), name, profile, device
            )
        if shape.delta:
            kernel = backend.delta_rule_kernel(getattr(torch, config.model.model_dtype))
            figures["delta_rule"] = "torch" if kernel is None else "fla"
        del learner
    seconds = min(step["seconds"] for step in steps[1:])
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    rates = Throughput(config, shape, num_learners=1, device_name=device_name).metrics(lengths, seconds)
    return figures | {
        "kernels": kernel_line(config.parallel, has_cuda=device.type == "cuda"),
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "seconds": seconds,
        "tokens": lengths.tokens,
        "tokens_per_s": rates["time/learner_tokens_per_second_per_gpu"],
        # In float32 documents are padded to the longest, of which the plan knows nothing; the peak rate is that of bf16.
        "is_planned": config.model.model_dtype == "bfloat16",
        "mfu": rates.get("learner_mfu") if config.model.model_dtype == "bfloat16" else None,
        **memory_figures(plan_of(config, shape, samples), steps, before),
    }


def profiled(step: Callable[[], dict[str, Any]], name: str, file: Path, device: torch.device) -> dict[str, Any]:
    """Shares of a step's time by class of kernel; the costliest kernels are appended to `file`.

    On a CPU torch's operations stand for kernels, each without those that it calls.

    Args:
        step: trains once, as `one_step`.
    """
    on_cuda = device.type == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        wall_s = step()["seconds"]
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == kind and not event.is_user_annotation]
    for event in events:
        seconds[event.name] += (event.time_range.elapsed_us() if on_cuda else event.self_cpu_time_total) / 1e6
        calls[event.name] += 1
    if on_cuda:
        busy_s = covered((event.time_range.start, event.time_range.end) for event in events) / 1e6
    else:
        busy_s = sum(seconds.values())
    shares = time_shares(seconds, busy_s=busy_s, wall_s=wall_s)
    lines = [f"{name}: {wall_s * 1e3:.1f} ms, {busy_s * 1e3:.1f} ms with kernels, {sum(calls.values())} calls"]
    lines += [f"{share:8.1%}  {kind}" for kind, share in shares.items()]
    with file.open("a") as table:
        table.write("\n".join([*lines, *kernel_table(seconds, calls), ""]) + "\n")
    return {"wall_s": wall_s, "busy_s": busy_s, "shares": shares}


def one_step(
    learner: Learner, index: dict[str, np.ndarray], own: np.ndarray, step: int, device: torch.device
) -> dict[str, Any]:
    """Loss, gradient norm and seconds of a training step."""
    synchronize(device)
    start = time.perf_counter()
    learned = learner.learn(index, own, step=step)
    synchronize(device)
    seconds = time.perf_counter() - start
    loss, norms = learned.metrics["loss/total_avg"], [result.grad_norm for result in learned.results]
    if not (math.isfinite(loss) and all(map(math.isfinite, norms)) and learned.has_learned):
        raise ValueError(f"step {step}: loss {loss}, gradient norms {norms}; expected finite numbers and norms above 0")
    if learned.not_finite:
        raise ValueError(f"step {step}: weights are not finite: {', '.join(learned.not_finite[:3])}")
    memory = {name: learned.metrics.get(f"perf/max_memory_{name}_gb") for name in ("allocated", "reserved")}
    return {"loss": loss, "grad_norm": norms[0], "seconds": seconds, **memory}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_memory(device: torch.device) -> int:
    """Free what the last mode left and start a new peak; bytes that stay allocated."""
    gc.collect()
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def memory_figures(plan: RunPlan, steps: list[dict[str, Any]], before: int) -> dict[str, float | None]:
    """GiB: what the plan says is allocated at the peak, the same with its allowance for fragmentation, and what was.

    Args:
        before: bytes that were allocated before the learner was made.
    """
    stage = plan.stages[0]
    allowance = stage.total - stage.reserved
    has_figures = steps[0]["allocated"] is not None
    return {
        "planned_gib": (allowance - stage.fragmentation) / GIB,
        "allowed_gib": allowance / GIB,
        "peak_gib": max(step["allocated"] for step in steps) - before / GIB if has_figures else None,
        "reserved_gib": max(step["reserved"] for step in steps) if has_figures else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--list", action="store_true", help="print the modes and train nothing")
    parser.add_argument("--out", type=Path, help="file that a line of JSON is appended to for each mode")
    parser.add_argument("--folder", type=Path, required=True, help="where the models are, or are written")
    parser.add_argument(
        "--profile", type=Path, help="file that the costliest kernels of each mode's last step are appended to"
    )
    parser.add_argument("--size", choices=list(SIZES), help="of the models; default: what the device trains in seconds")
    parser.add_argument("modes", nargs="*", default=list(MODES), metavar="MODE")
    args = parser.parse_args()
    if args.list:
        print("\n".join(MODES))
        return
    device = torch.device(args.device)
    assert (device.type == "cuda") == backend.has_cuda(), "hide the GPUs (CUDA_VISIBLE_DEVICES=) to check the CPU"
    backend.install()
    size = args.size or size_for(device)

    def write(record: dict[str, Any]) -> None:
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")

    for name in numbered(args.modes):
        write({"mode": name})
        start = time.perf_counter()
        try:
            mode = MODES[name.partition(" (")[0]]
            if not (args.folder / mode.model).exists():
                write_model(args.folder / mode.model, mode.model, size, device)
            figures = train(name, mode, args.folder, WORK[size], device, args.profile)
        except Exception as err:
            traceback.print_exc()
            write({"mode": name, "status": "failed", "error": f"{type(err).__name__}: {err}", "size": size})
            os._exit(1)  # without the clean-up of a device that may not answer
        write(
            {
                "mode": name,
                "status": "passed",
                "wall_s": time.perf_counter() - start,
                "size": size,
                "equals": mode.equals,
                **figures,
            }
        )


if __name__ == "__main__":
    main()
