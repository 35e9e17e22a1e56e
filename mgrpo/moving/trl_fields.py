"""Names of TRL that are more than another name for a setting: its corrections, arguments of from_pretrained and of schedules, cuts of
the sampling, and the length of a run in optimizer steps.
"""

from __future__ import annotations

import typing

from mgrpo.config.annotations import TRL
from mgrpo.config.fields import settings, shown
from mgrpo.config.resolution import PRESET, Resolution
from mgrpo.config.schema import MOST_KEPT
from mgrpo.moving import open_instruct_fields as open_instruct
from mgrpo.moving.foreign_names import table

DTYPES = ("dtype", "torch_dtype")
WITHOUT_EFFECT = (
    "attn_implementation",
    "use_cache",
    "device_map",
    "low_cpu_mem_usage",
    "trust_remote_code",
)
"""Arguments for transformers' loading and computing."""
OF_TRL_ALONE = ("environment_factory", "rollout_func", "max_tool_calling_iterations", "num_train_epochs")
"""Settings that a configuration of Open Instruct does not have."""


def has_trl_defaults(r: Resolution) -> bool:
    """True if settings that are not given have TRL's defaults."""
    return r.preset.startswith("trl")


def has_trl_names(r: Resolution) -> bool:
    """True if a name that Open Instruct and TRL use differently has TRL's meaning."""
    has_name = any(table()[name].trainer == TRL.value for name in r.peers)
    return has_trl_defaults(r) or has_name or r.rank(*OF_TRL_ALONE) > PRESET


def corrections(r: Resolution) -> None:
    """The four modes of the correction for the engine's probabilities."""
    prefix = "vllm_importance_sampling_"
    names = [prefix + ending for ending in ("correction", "mode", "clip_max", "clip_min", "cap")]
    given = [name for name in names if name in r.peers]
    if not given:
        return
    if not r.peer(names[0], True):
        r.put("use_rho_correction", False, names[0])
        return
    old, new = r.peer(f"{prefix}cap"), r.peer(f"{prefix}clip_max")
    if old is not None and new is not None and old != new:
        r.problems.append(
            f"{prefix}cap={old:g} and {prefix}clip_max={new:g} are the same setting; give only {prefix}clip_max"
        )
        return
    default = None if f"{prefix}clip_max" in given else 3.0
    _put_bounds(r, given, mode=r.peer(f"{prefix}mode", "sequence_mask"), low=r.peer(f"{prefix}clip_min"), high=new or old or default)  # fmt: skip


def _put_bounds(r: Resolution, given: list[str], *, mode: str, low: float | None, high: float | None) -> None:
    prefix = "vllm_importance_sampling_"
    if low is not None and high is not None and low >= high:
        r.problems.append(f"{prefix}clip_min={low:g} must be below {prefix}clip_max={high:g}")
        return
    unit, action = mode.split("_")
    if action == "truncate" and low is None and high is None:
        r.problems.append(f"{prefix}mode={mode} needs a bound: --{prefix}clip_max 3.0")
        return
    level = "token" if unit == "token" else "sequence_sum"
    r.put("use_rho_correction", True, *given)
    r.put("rho_level", level, *given)
    r.put("rho_mask_level", level, *given)
    for target, wanted in (("clamp", "truncate"), ("mask", "mask")):
        r.put(f"rho_{target}_lower_bound", (low or 0.0) if action == wanted else 0.0, *given)
        r.put(f"rho_{target}_upper_bound", (high or 0.0) if action == wanted else 0.0, *given)


def model_arguments(r: Resolution) -> None:
    """The keys of model_init_kwargs."""
    for name, value in r.peer_object("model_init_kwargs").items():
        if name in DTYPES:
            dtype = str(value).removeprefix("torch.")
            if dtype in ("auto", "None"):
                r.notes.append(f"model_init_kwargs: {name}={dtype} has no effect: model_dtype decides")
            elif dtype in typing.get_args(settings()["model_dtype"].type):
                _put_dtype(r, dtype)
            else:
                r.problems.append(f"model_init_kwargs: {name}={dtype} does not exist here; see model_dtype")
        elif name == "revision":
            if value is not None:
                r.put("model_revision", str(value), "model_init_kwargs")
        elif name in WITHOUT_EFFECT:
            if value is not None and (name, value) != ("trust_remote_code", False):
                r.notes.append(
                    f"model_init_kwargs: {name} has no effect: models are Megatron's and vLLM's, not transformers'"
                )
        else:
            r.problems.append(
                f"model_init_kwargs: {name}={value} is refused: models are not loaded by from_pretrained; leave it out"
            )


def _put_dtype(r: Resolution, dtype: str) -> None:
    """Set model_dtype; with bf16 or fp16 the 16-bit type is the one of computation, as the optimizer keeps float32 anyway."""
    before = r.given.get("model_dtype")
    if before is not None and before.via in ("bf16", "fp16") and "float32" in (dtype, before.value):
        if dtype == "float32":
            return
        r.given.pop("model_dtype")
    r.put("model_dtype", dtype, "model_init_kwargs")


def schedule_arguments(r: Resolution) -> None:
    """The keys of lr_scheduler_kwargs."""
    for name, value in r.peer_object("lr_scheduler_kwargs").items():
        if name not in ("min_lr", "min_lr_rate") or not isinstance(value, (int, float)):
            r.problems.append(
                f"lr_scheduler_kwargs: {name}={value} is refused; give min_lr or min_lr_rate as a number, where a schedule that "
                "falls ends, and otherwise leave it out"
            )
        else:
            r.put("min_lr", value * (r.value("learning_rate") if name == "min_lr_rate" else 1), "lr_scheduler_kwargs")


def cuts(r: Resolution) -> None:
    """TRL samples with top_p or min_p alone, which is unbounded; here the trainer computes with the tokens left to sample from."""
    given = [
        f"{name}={shown(r.value(name))}"
        for name, neutral in (("top_p", 1.0), ("min_p", 0.0))
        if r.value(name) != neutral
    ]
    if given and has_trl_names(r) and not r.value("top_k") and r.rank("top_k") <= PRESET:
        r.derive(
            "top_k",
            MOST_KEPT,
            f"top_k is {MOST_KEPT}, which {' and '.join(given)} needs here, so that the trainer can compute with the tokens that were "
            "left to sample from; on GPUs it may be up to 2048",
        )


def max_steps(r: Resolution) -> None:
    """TRL counts optimizer steps; in Open Instruct the same name limits the calls of tools."""
    steps, has_tools = r.peer("max_steps"), bool(r.value("tools"))
    if steps is None:
        return
    if has_tools and has_trl_names(r) and not has_trl_defaults(r):
        r.problems.append(
            f"max_steps={steps} beside tools and names of TRL could be either: max_tool_calls={steps} limits the calls of a "
            f"completion (Open Instruct's meaning), total_episodes the run (TRL's: {steps} optimizer steps); give one of them"
        )
    elif has_trl_names(r):
        if steps > 0:
            batch_size = r.value("num_unique_prompts_rollout") * r.value("num_samples_per_prompt_rollout")
            r.put("total_episodes", training_steps(r, steps) * batch_size, "max_steps")
    else:
        open_instruct.max_steps(r)


def training_steps(r: Resolution, optimizer_steps: int) -> int:
    """Training steps with this many optimizer steps, rounded up; 0 and less, which turn something off, are kept."""
    if optimizer_steps <= 0:
        return optimizer_steps
    if optimizer_steps % r.optimizer_steps_per_step:
        r.notes.append(
            f"{optimizer_steps} optimizer steps are not a whole number of training steps of {r.optimizer_steps_per_step} each; "
            "rounded up"
        )
    return -(-optimizer_steps // r.optimizer_steps_per_step)
