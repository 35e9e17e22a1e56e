"""What ranks do with Megatron-core's own checkpoints: save and load a GPTModel, whose experts are Megatron's own."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mgrpo.types import TrainSample
from tests.ranks import cases
from tests.ranks.megatrons_own import on_host, own_model


def megatrons_policy(model_dir: str, layout: dict[str, Any]) -> Any:
    """A policy with the weights of a Hugging Face folder, whose chunks Megatron can save: its experts are SequentialMLP's."""
    policy = cases.make_policy(model_dir, layout)
    if policy.shape.experts:
        grouped = [held(chunk) for chunk in policy.chunks]
        policy.chunks = with_megatrons_experts(policy)
        for chunk, values in zip(policy.chunks, grouped, strict=True):
            for name, parameter in held(chunk).items():
                before, found, after = name.partition("local_experts.")
                if not found:
                    parameter.data.copy_(values[name])
                else:
                    number, _, matrix = after.partition(".")
                    stacked = values[before + matrix]
                    parameter.data.copy_(stacked.view(-1, *parameter.shape)[int(number)])
    return policy


def held(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights, and what is never trained."""
    return {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}


def with_megatrons_experts(policy: Any) -> list[Any]:
    """New chunks for the policy's groups and shape."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mgrpo.policy.layers import architecture
    from mgrpo.policy.model import build

    assert policy.shape.experts is not None
    mlp = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=policy.shape.experts.count).submodules.mlp
    # As in `architecture`: megatron-core 0.19 has a partial.
    submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    with mock.patch.object(architecture, "GroupedExperts", submodules.experts):
        return build(
            policy.shape,
            policy.layout,
            policy.dtype,
            settings=policy.parallel,
            logits_chunk=0,
            fp32_logits=False,
            trains_entropy=False,
            scores_entropy=False,
        )


def sharded(policy: Any, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """The model's part of Megatron's state dict, under the names that Megatron-LM gives to chunks."""
    return {
        f"model{index}": chunk.sharded_state_dict(metadata=dict(metadata or {}))
        for index, chunk in enumerate(policy.chunks)
    }


def _write(state: dict[str, Any], folder: str, metadata: dict[str, Any] | None) -> None:
    """What Megatron-LM writes to an `iter_*` folder, with parts that are no weights. Every rank must call."""
    from megatron.core import dist_checkpointing

    state |= {"iteration": 10, "checkpoint_version": 3.0}
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    # Megatron's writer starts processes, which the pool's ranks may not.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        dist_checkpointing.save(state, folder, content_metadata=metadata)


def save(model_dir: str, layout: dict[str, Any], folder: str, metadata: dict[str, Any] | None = None) -> None:
    """The weights of a Hugging Face folder as Megatron-core's modules in our model save them."""
    _write(sharded(megatrons_policy(model_dir, layout), metadata), folder, metadata)


def load(model_dir: str, layout: dict[str, Any], folder: str, samples: list[TrainSample]) -> dict[str, Any]:
    """Logits of a GPTModel after Megatron has loaded the weights; before, there are none."""
    from megatron.core import dist_checkpointing

    policy = cases.make_policy(model_dir, layout)
    if policy.shape.experts:
        policy.chunks = with_megatrons_experts(policy)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    state = sharded(policy, dist_checkpointing.load_content_metadata(folder))
    loaded = dist_checkpointing.load(state, folder)
    for index, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    return cases.policy_logits(policy, samples)


def _in_new_groups(hf: dict[str, Any]) -> torch.nn.Module:
    from megatron.core import parallel_state

    cases.forget_groups()
    parallel_state.initialize_model_parallel()
    return own_model(hf)


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, torch.arange(ids.shape[1])[None], None)


def save_own(hf: dict[str, Any], folder: str, ids: torch.Tensor, metadata: dict[str, Any] | None) -> torch.Tensor:
    """Save a model that has nothing of ours, with random weights; its logits of `ids [rows, tokens]`."""
    with on_host():
        model = _in_new_groups(hf)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_plain_norm = "norm" in name and not model.config.layernorm_zero_centered_gamma
                parameter.normal_(mean=float(is_plain_norm), std=0.5 if "conv1d" in name else 0.1)
                if name.endswith("linear_fc1.weight") and model.config.activation_func_clamp_value is not None:
                    parameter.mul_(8.0)  # so that some are clamped
        _write({"model": model.sharded_state_dict(metadata=dict(metadata or {}))}, folder, metadata)
        return _logits(model, ids)


def load_own(hf: dict[str, Any], folder: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits of such a model after Megatron has loaded the weights; before, there are none."""
    from megatron.core import dist_checkpointing

    with on_host():
        model = _in_new_groups(hf)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        state = model.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata(folder))
        model.load_state_dict(dist_checkpointing.load({"model": state}, folder)["model"])
        return _logits(model, ids)
