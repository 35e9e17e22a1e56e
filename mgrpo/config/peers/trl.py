"""Names of TRL that are more than another name for a setting: arguments of from_pretrained and of schedules, cuts of the sampling."""

from __future__ import annotations

import typing

from mgrpo.config.fields import settings, shown
from mgrpo.config.resolution import PRESET, Resolution
from mgrpo.config.schema import MOST_KEPT

DTYPES = ("dtype", "torch_dtype")
WITHOUT_EFFECT = (
    "attn_implementation",
    "use_cache",
    "device_map",
    "low_cpu_mem_usage",
    "trust_remote_code",
)
"""Arguments that describe how transformers computes, or ask for nothing with these values."""
NEUTRAL: dict[str, tuple[object, ...]] = {"trust_remote_code": (None, False)}


def apply(r: Resolution) -> None:
    """All of them."""
    model_arguments(r)
    schedule_arguments(r)
    cuts(r)


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
        elif name in WITHOUT_EFFECT and value in NEUTRAL.get(name, (value,)):
            if value not in NEUTRAL.get(name, (None,)):
                r.notes.append(
                    f"model_init_kwargs: {name} has no effect: models are Megatron's and vLLM's, not transformers'"
                )
        else:
            r.problems.append(
                f"model_init_kwargs: {name}={value} is refused: models are not loaded by from_pretrained; leave it out"
            )


def _put_dtype(r: Resolution, dtype: str) -> None:
    """Beside bf16 or fp16 the type of 16 bits is the one that is computed in; the optimizer keeps float32 anyway."""
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
    """TRL samples with top_p or min_p alone, which is unbounded; here the trainer computes with what was left to sample from."""
    given = [
        f"{name}={shown(r.value(name))}"
        for name, neutral in (("top_p", 1.0), ("min_p", 0.0))
        if r.value(name) != neutral
    ]
    if given and r.has_trl_names and not r.value("top_k") and r.rank("top_k") <= PRESET:
        r.derive(
            "top_k",
            MOST_KEPT,
            f"top_k is {MOST_KEPT}, which {' and '.join(given)} needs here, so that the trainer can compute with the tokens that were "
            "left to sample from; on GPUs it may be up to 2048",
        )
