"""Rules of the adapter section: what adapters cannot be combined with yet, and what is probably not intended."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mgrpo.config.adapter import ALL_LINEAR, Adapter
from mgrpo.config.fields import settings, shown
from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config
from mgrpo.models.adapters import LINEAR_LAYERS
from mgrpo.models.cuts import size_of
from mgrpo.models.family import HfConfig, is_hub_name, shape_of
from mgrpo.models.peft import peft_problems, target_names

FIELDS = tuple(name for name in Adapter.__dataclass_fields__ if name != "use_peft")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LARGE = 2048
"""Hidden size from which a model counts as large, as for the warning about its learning rate."""
LARGE_RATE = 1e-6
"""Usual learning rate of a large model, all of whose weights are trained."""


def _without_use(config: Config) -> Iterator[str]:
    own, default = config.adapter, Adapter()
    given = [name for name in FIELDS if getattr(own, name) != getattr(default, name)]
    if given and not own.use_peft:
        words = ", ".join(f"{name}={shown(getattr(own, name))}" for name in given)
        yield f"{words} needs use_peft=true, without which all weights are trained; set it, or leave {given[0]} out"


def _sharding(config: Config) -> Iterator[str]:
    stage = config.parallel.zero_stage
    if config.adapter.use_peft and stage > 1:
        yield (
            f"use_peft=true cannot be combined with zero_stage={stage}, as Megatron-FSDP asks for gradients of all weights; use "
            "zero_stage=1 (states of adapters are small), and tensor_model_parallel_size or pipeline_model_parallel_size "
            "to share the model's own weights"
        )


def _reference(config: Config) -> Iterator[str]:
    every = config.algorithm.ref_policy_update_freq
    if config.adapter.use_peft and every is not None:
        yield (
            f"use_peft=true cannot be combined with ref_policy_update_freq={every}: the reference is the model without its "
            "adapters and stays as it is; leave ref_policy_update_freq out"
        )


def _layers(config: Config) -> Iterator[str]:
    if config.adapter.use_peft and config.parallel.transformer_impl == "transformer_engine":
        yield "use_peft=true has adapters on Megatron's own layers only, got transformer_impl=transformer_engine; use local or auto"


def _optimizer(config: Config) -> Iterator[str]:
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if config.adapter.use_peft and getattr(config.parallel, name):
            yield f"{name}=true cannot be combined with use_peft=true, whose optimizer states are small; leave {name} out"


def _targets(config: Config) -> Iterator[str]:
    names = config.adapter.lora_target_modules
    if not names:
        yield f"lora_target_modules is empty; name matrices, or give {ALL_LINEAR}"
    elif ALL_LINEAR in names and len(names) > 1:
        others = " ".join(name for name in names if name != ALL_LINEAR)
        yield f"lora_target_modules={' '.join(names)} says {ALL_LINEAR} and names matrices as well; leave out {others}, or {ALL_LINEAR}"


ADAPTER_RULES: tuple[Rule, ...] = (
    (("use_peft", *FIELDS), _without_use),
    (("use_peft", "zero_stage"), _sharding),
    (("use_peft", "ref_policy_update_freq"), _reference),
    (("use_peft", "transformer_impl"), _layers),
    (("use_peft", "optimizer_cpu_offload", "use_precision_aware_optimizer"), _optimizer),
    (("lora_target_modules",), _targets),
)
"""Each rule with the fields that must be sound before it is checked."""


def adapter_model_problems(config: Config, hf_config: HfConfig) -> Iterator[str]:
    """Whether the model has the matrices that adapters are asked for, and the folder to start from fits both."""
    lora = config.adapter.lora
    try:
        shape = shape_of(hf_config)
    except ValueError:  # a model that cannot be trained, which is reported where it is built
        return
    if lora is None:
        return
    names = target_names(shape)
    unknown = [name for name in lora.targets if name not in names]
    for name in unknown:
        reason = "" if name in LINEAR_LAYERS else " (embeddings, head, norms and routers have no adapter)"
        yield f"lora_target_modules: {name} must be of this model's {', '.join(names)}, or {ALL_LINEAR}{reason}"
    if unknown:
        return
    if lora.rank > shape.hidden:
        yield (
            f"lora_r={lora.rank} is more than the model's hidden_size={shape.hidden}, the highest rank that a matrix can have; "
            "8 to 64 is usual"
        )
    path = config.provenance.folder("lora_adapter_path", config.adapter.lora_adapter_path)
    if path is not None and (os.path.isdir(path) or not is_hub_name(path)):
        for problem in peft_problems(path, shape, lora):
            yield f"lora_adapter_path={problem}"


def adapter_warnings(config: Config, hf_config: HfConfig | None) -> Iterator[str]:
    """What is probably not intended."""
    if not config.adapter.use_peft:
        return
    if set(config.adapter.lora_target_modules) <= set(ATTENTION):
        yield (
            f"lora_target_modules={' '.join(config.adapter.lora_target_modules)} leaves the MLP without adapters, which learns less "
            "even at an equal number of weights (LoRA Without Regret, Thinking Machines 2025); all-linear is the default"
        )
    usual, rate = usual_rate(config, hf_config), config.optimizer.learning_rate
    if rate < 5 * usual:
        yield (
            f"learning_rate={rate:g} is low for adapters: the best one is about 10 times that of training all weights, "
            f"{10 * usual:g} here (LoRA Without Regret, Thinking Machines 2025)"
        )


def usual_rate(config: Config, hf_config: HfConfig | None) -> float:
    """A usual learning rate where all weights are trained: the preset's, and a small one for large models."""
    default = settings()["learning_rate"].default
    preset = config.provenance.defaults.get("learning_rate", default)
    assert isinstance(preset, float)
    return min(preset, LARGE_RATE) if (size_of(hf_config, "hidden_size") or 0) >= LARGE else preset
