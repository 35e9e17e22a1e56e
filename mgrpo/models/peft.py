"""Adapters as peft stores them: a folder of adapter_config.json and adapter_model.safetensors, and reasons why one cannot be used.

Of the tensors only the header is read. Pure: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mgrpo.models.adapters import LINEAR_LAYERS, LoraShape, adapter_tensors
from mgrpo.models.hf_files.surplus import some
from mgrpo.models.hf_files.weight_files import FLOATS, read_header
from mgrpo.models.placement.boxes import Shape
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"
"""Folder of the adapters in an export of a policy that has them."""
PREFIX = "base_model.model."
"""The beginning of every tensor's name: peft's wrapper around the model, and the model in it."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the model's own weights as they are."""
_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA's magnitudes are neither trained here nor loaded by vLLM",
    "lora_bias": "biases are not trained",
    "modules_to_save": "whole modules are not trained beside adapters",
    "fan_in_fan_out": "matrices are stored as [outputs, inputs]",
    "rank_pattern": "all adapters have one rank",
    "alpha_pattern": "all adapters have one alpha",
    "layers_to_transform": "adapters are on all layers",
    "target_parameters": "experts have adapters of their own, expert by expert",
    "trainable_token_indices": "embeddings are not trained",
    "layer_replication": "the model's layers are as in its checkpoint",
    "use_qalora": "A is of the whole input",
    "use_bdlora": "A and B have no blocks",
    "alora_invocation_tokens": "adapters are on for every token",
    "kasa_config": "B A is scaled by numbers alone, and the model's own weights stay as they are",
}
"""Fields of adapter_config.json that must be empty or false, and why."""


def target_names(model: ModelShape) -> tuple[str, ...]:
    """Short names of the model's matrices that can have an adapter, in the order of `LINEAR_LAYERS`."""
    present = {name.split(".")[-2] for name in hf_tensors(model)}
    return tuple(name for name in LINEAR_LAYERS if name in present)


def peft_config(model: ModelShape, lora: LoraShape, *, base: str) -> dict[str, object]:
    """The content of adapter_config.json for `lora` on the model in `base`."""
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets or target_names(model)),
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def stored_tensors(folder: str | Path) -> dict[str, tuple[str, Shape]]:
    """Type and shape of every tensor of a peft folder, by its name without `PREFIX`; ValueError where it is not whole."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}; only safetensors are read (pickles are never loaded)")
    return {name.removeprefix(PREFIX): (tensor.dtype, tensor.shape) for name, tensor in read_header(path).items()}


def stored_lora(folder: str | Path) -> LoraShape:
    """Rank, alpha and targets of a peft folder.

    Raises:
        ValueError: it cannot be read, or is not of adapters that can be trained here.
    """
    config = _read_config(folder)
    if problems := list(_config_problems(folder, config)):
        raise ValueError("; ".join(problems))
    matrices = {name.split(".")[-3] for name in stored_tensors(folder) if name.count(".") > 2}
    return LoraShape(
        rank=config["r"],
        alpha=config["lora_alpha"],
        use_rslora=bool(config.get("use_rslora")),
        targets=tuple(sorted(matrices, key=_order)),
    )


def peft_problems(folder: str | Path, model: ModelShape, lora: LoraShape) -> Iterator[str]:
    """Reasons why training of `lora` cannot start from this peft folder, one sentence each; all begin with the folder."""
    try:
        stored, tensors = stored_lora(folder), stored_tensors(folder)
    except ValueError as err:
        yield str(err)
        return
    differs = False
    for field, own, wanted in (
        ("lora_r", stored.rank, lora.rank),
        ("lora_alpha", stored.alpha, lora.alpha),
        ("use_rslora", stored.use_rslora, lora.use_rslora),
        ("lora_target_modules", set(stored.targets), set(lora.targets or target_names(model))),
    ):
        if own != wanted:
            differs = True
            yield f"{folder} has {field}={_words(own)}, but {_words(wanted)} is asked for; leave {field} out, or start afresh"
    if differs:
        return
    expected = adapter_tensors(model, lora)
    if missing := [name for name in expected if name not in tensors]:
        yield f"{folder} lacks {some(missing)}; all layers of the model have an adapter here"
    if extra := sorted(tensors.keys() - expected.keys()):
        yield f"{folder} holds {some(extra)}, which belongs to no adapter of this model"
    for name, shape in expected.items():
        dtype, found = tensors.get(name, (FLOATS[0], shape))
        if found != shape:
            yield f"{folder}: {name} has shape {list(found)}, this model needs {list(shape)}; is it an adapter of another model?"
            return
        if dtype not in FLOATS:
            yield f"{folder}: {name} has type {dtype}, expected one of {', '.join(FLOATS)}"
            return


def _read_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}; give the folder of an adapter in peft's format")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as err:
        raise ValueError(f"{folder} has an {CONFIG} that cannot be read: {err}") from err
    if not isinstance(config, dict):
        raise ValueError(f"{folder} has an {CONFIG} that holds {type(config).__name__}; expected an object")
    return config


def _config_problems(folder: str | Path, config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("peft_type") != "LORA":
        yield f"{folder} has peft_type={config.get('peft_type')!r}, expected 'LORA'"
        return
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield f"{folder} has r={rank!r}; expected a whole number above 0"
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not alpha > 0 or alpha % 1:
        yield f"{folder} has lora_alpha={alpha!r}; expected a whole number above 0"
    for field, reason in _UNSUPPORTED.items():
        if config.get(field):
            yield f"{folder} has {field}={json.dumps(config[field])}: {reason}"
    if config.get("bias", "none") != "none":
        yield f"{folder} has bias={config['bias']!r}: biases are not trained"
    initialised = config.get("init_lora_weights", True)
    if initialised not in _KEEPS_BASE:
        yield (
            f"{folder} has init_lora_weights={initialised!r}, which changed the model's own weights, so that the adapter does not "
            "belong to the original model; save it with peft's path_initial_model_for_weight_conversion"
        )


def _order(name: str) -> tuple[int, str]:
    return (LINEAR_LAYERS.index(name) if name in LINEAR_LAYERS else len(LINEAR_LAYERS), name)


def _words(value: object) -> str:
    return (
        " ".join(sorted(value, key=_order))
        if isinstance(value, set)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
    )
