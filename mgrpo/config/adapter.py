"""The adapter section: low-rank adapters (LoRA) in place of training all weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import ONE_OR_MORE, OPEN_INSTRUCT, TRL, Rule, shown
from mgrpo.config.optimizer import LARGE
from mgrpo.config.provenance import Provenance
from mgrpo.models.adapters import LINEAR_LAYERS, LoraShape, are_apart
from mgrpo.models.cuts import size_of
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import HfConfig, is_hub_name
from mgrpo.models.peft import peft_problems, target_names
from mgrpo.models.placement.mlp_rows import EXPERT_MATRICES

ALL_LINEAR = "all-linear"
"""Every linear layer of attention, MLP and experts, as peft calls them."""
PLAIN_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION = (*PLAIN_ATTENTION, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM has room; a lower one takes as much as the next of these."""
LATENT_LAYERS = frozenset(("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
"""vLLM folds the last into queries and outputs when it loads the model, and has one matrix for the others."""
EXPERT_LAYERS = frozenset(name for names in EXPERT_MATRICES.values() for name in names)
LARGE_RATE = 1e-6
"""Usual learning rate of a large model, all of whose weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    use_peft: Annotated[bool, OPEN_INSTRUCT, TRL] = False
    """Train low-rank adapters (LoRA) and leave the model's own weights as they are; see docs/lora.md."""
    lora_r: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 16
    """Rank of the adapters; in reinforcement learning small ones, even 1, learn as much."""
    lora_alpha: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 32
    """An adapter adds lora_alpha / lora_r x B A to its matrix."""
    lora_target_modules: Annotated[tuple[str, ...], OPEN_INSTRUCT, TRL] = (ALL_LINEAR,)
    """Matrices with an adapter, by their last names in the checkpoint, such as q_proj gate_proj; all-linear: all of attention,
    MLP and experts, without embeddings, head and routers."""
    use_rslora: Annotated[bool, TRL] = False
    """Divide lora_alpha by the square root of lora_r instead (rank-stabilised LoRA)."""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """What engines are sent. merged: the model with the adapters added to its weights; adapter: A and B alone, which vLLM adds in each
    product to the model that it has loaded itself: about a hundredth of the bytes, and slower generation. Learners compute as engines do."""
    lora_adapter_path: str | None = None
    """Folder of an adapter in peft's format to start from, or its name on the Hub; its rank, alpha and modules apply where none are given."""

    @property
    def lora(self) -> LoraShape | None:
        """The adapters of the run; None where all weights are trained."""
        if not self.use_peft:
            return None
        targets = () if ALL_LINEAR in self.lora_target_modules else self.lora_target_modules
        return LoraShape(
            rank=self.lora_r,
            alpha=self.lora_alpha,
            use_rslora=self.use_rslora,
            targets=targets,
            is_merged=self.lora_sync == "merged",
        )


def _without_use(
    use_peft: bool,
    lora_r: int,
    lora_alpha: int,
    lora_target_modules: tuple[str, ...],
    use_rslora: bool,
    lora_sync: str,
    lora_adapter_path: str | None,
) -> Iterator[str]:
    values = {
        "lora_r": lora_r,
        "lora_alpha": lora_alpha,
        "lora_target_modules": lora_target_modules,
        "use_rslora": use_rslora,
        "lora_sync": lora_sync,
        "lora_adapter_path": lora_adapter_path,
    }
    given = {name: value for name, value in values.items() if value != getattr(Adapter(), name)}
    if given and not use_peft:
        words = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        yield f"{words} needs use_peft=true, without which all weights are trained; set it, or leave {next(iter(given))} out"


def _sharding(use_peft: bool, zero_stage: int) -> Iterator[str]:
    if use_peft and zero_stage > 1:
        yield (
            f"use_peft=true cannot be combined with zero_stage={zero_stage}, as Megatron-FSDP asks for gradients of all weights; use "
            "zero_stage=1 (states of adapters are small), and tensor_model_parallel_size or pipeline_model_parallel_size "
            "to share the model's own weights"
        )


def _reference(use_peft: bool, ref_policy_update_freq: int | None) -> Iterator[str]:
    if use_peft and ref_policy_update_freq is not None:
        yield (
            f"use_peft=true cannot be combined with ref_policy_update_freq={ref_policy_update_freq}: the reference is the model "
            "without its adapters and stays as it is; leave ref_policy_update_freq out"
        )


def _layers(use_peft: bool, transformer_impl: str) -> Iterator[str]:
    if use_peft and transformer_impl == "transformer_engine":
        yield "use_peft=true has adapters on Megatron's own layers only, got transformer_impl=transformer_engine; use local or auto"


def _optimizer(use_peft: bool, optimizer_cpu_offload: bool, use_precision_aware_optimizer: bool) -> Iterator[str]:
    for name, is_on in (
        ("optimizer_cpu_offload", optimizer_cpu_offload),
        ("use_precision_aware_optimizer", use_precision_aware_optimizer),
    ):
        if use_peft and is_on:
            yield f"{name}=true cannot be combined with use_peft=true, whose optimizer states are small; leave {name} out"


def _engines(lora: LoraShape | None, vllm_mode: str, takes_turns: bool) -> Iterator[str]:
    """Engines that can have adapters beside the model."""
    if not are_apart(lora):
        return
    if vllm_mode == "server":
        yield "lora_sync=adapter needs engines that the run starts, got vllm_mode=server; use ray or colocate, or lora_sync=merged"
    if takes_turns:
        yield (
            "lora_sync=adapter cannot be combined with vllm_enable_sleep_mode=true: an engine that gives up its memory gets back what "
            "is sent, and that is not the model; leave one of them out"
        )
    if lora.rank > ADAPTER_RANKS[-1]:
        yield f"lora_r={lora.rank} is more than {ADAPTER_RANKS[-1]}, the highest rank that vLLM serves; lower it, or use lora_sync=merged"


def _targets(lora_target_modules: tuple[str, ...]) -> Iterator[str]:
    names = lora_target_modules
    if not names:
        yield f"lora_target_modules is empty; name matrices, or give {ALL_LINEAR}"
    elif ALL_LINEAR in names and len(names) > 1:
        others = " ".join(name for name in names if name != ALL_LINEAR)
        yield f"lora_target_modules={' '.join(names)} says {ALL_LINEAR} and names matrices as well; leave out {others}, or {ALL_LINEAR}"


def _matrices(
    lora: LoraShape | None, lora_adapter_path: str | None, provenance: Provenance, hf_config: HfConfig
) -> Iterator[str]:
    """The model has the matrices that adapters are asked for, and the folder to start from fits both."""
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
        if shape.experts and shape.experts.names == "gpt_oss" and name in EXPERT_LAYERS:
            reason = " (experts that share one tensor of the checkpoint have no adapter)"
        yield f"lora_target_modules: {name} must be of this model's {', '.join(names)}, or {ALL_LINEAR}{reason}"
    if unknown:
        return
    if lora.rank > shape.hidden:
        yield (
            f"lora_r={lora.rank} is more than the model's hidden_size={shape.hidden}, the highest rank that a matrix can have; "
            "8 to 64 is usual"
        )
    adapted = lora.targets or names
    kinds = {"experts": EXPERT_LAYERS if shape.experts else (), "latent vectors": LATENT_LAYERS}
    unserved = {what: [name for name in adapted if name in layers] for what, layers in kinds.items()}
    if are_apart(lora) and any(unserved.values()):
        found = " and of ".join(f"{what} ({', '.join(own)})" for what, own in unserved.items() if own)
        others = [name for name in adapted if not any(name in own for own in unserved.values())]
        yield (
            f"lora_sync=adapter does not serve adapters of {found}; name others in lora_target_modules, such as "
            f"{' '.join(others) or 'o_proj'}, or use lora_sync=merged"
        )
    path = provenance.folder("lora_adapter_path", lora_adapter_path)
    if path is not None and (os.path.isdir(path) or not is_hub_name(path)):
        for problem in peft_problems(path, shape, lora):
            yield f"lora_adapter_path={problem}"


RULES: tuple[Rule, ...] = (_without_use, _sharding, _reference, _layers, _optimizer, _engines, _targets)
MODEL: tuple[Rule, ...] = (_matrices,)


def _attention_alone(use_peft: bool, lora_target_modules: tuple[str, ...]) -> Iterator[str]:
    if use_peft and set(lora_target_modules) <= set(ATTENTION):
        yield (
            f"lora_target_modules={' '.join(lora_target_modules)} leaves the MLP without adapters, which learns less "
            "even at an equal number of weights (LoRA Without Regret, Thinking Machines 2025); all-linear is the default"
        )


def _experts_without(use_peft: bool, lora_target_modules: tuple[str, ...], hf_config: HfConfig | None) -> Iterator[str]:
    if use_peft and ALL_LINEAR in lora_target_modules and (hf_config or {}).get("model_type") == "gpt_oss":
        yield (
            f"lora_target_modules={ALL_LINEAR} is attention alone in this model ({', '.join(PLAIN_ATTENTION)}): experts that share one "
            "tensor of the checkpoint have no adapter"
        )


def _low_rate(use_peft: bool, learning_rate: float, preset_rate: float, hf_config: HfConfig | None) -> Iterator[str]:
    is_large = (size_of(hf_config, "hidden_size") or 0) >= LARGE
    usual = min(preset_rate, LARGE_RATE) if is_large else preset_rate
    if use_peft and learning_rate < 5 * usual:
        yield (
            f"learning_rate={learning_rate:g} is low for adapters: the best one is about 10 times that of training all weights, "
            f"{10 * usual:g} here (LoRA Without Regret, Thinking Machines 2025)"
        )


WARNINGS: tuple[Rule, ...] = (_attention_alone, _experts_without, _low_rate)
