"""Adapters as a folder that peft and vLLM load: written tensor by tensor, read box by box."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from mgrpo.checkpoint.folder import LocalFolder
from mgrpo.checkpoint.mapped import MappedFiles
from mgrpo.checkpoint.shard import write_tensors
from mgrpo.models.adapters import LoraShape, adapter_tensors
from mgrpo.models.hf_files.checksums import write_sums
from mgrpo.models.peft import CONFIG, PREFIX, WEIGHTS, peft_config, peft_problems
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.policy.weights import Read


def write_peft(
    folder: Path, values: Callable[[str], Iterable[torch.Tensor]], model: ModelShape, lora: LoraShape, *, base: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into `folder`, which is made, with their checksums.

    Args:
        values: gives each of `adapter_tensors` in blocks of rows, float32, in their order.
        base: name of the model that the adapters belong to, for programs that load them.
    """
    headers = {PREFIX + name: (torch.float32, shape) for name, shape in adapter_tensors(model, lora).items()}
    folder.mkdir(parents=True, exist_ok=True)
    with LocalFolder(folder).create(WEIGHTS) as stream:
        read = lambda name: values(name.removeprefix(PREFIX))  # noqa: E731
        written = write_tensors(stream, headers, read, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(peft_config(model, lora, base=base), indent=2) + "\n")
    write_sums(folder, {WEIGHTS: written.sha256})


def peft_reader(folder: str | Path, model: ModelShape, lora: LoraShape) -> Read:
    """A function that reads single boxes of the adapters in a peft folder.

    Raises:
        ValueError: it holds other adapters than `lora`, or none that can be trained here.
    """
    if problems := list(peft_problems(folder, model, lora)):
        raise ValueError("; ".join(problems))
    files, path = MappedFiles(), Path(folder) / WEIGHTS
    stored = {name.removeprefix(PREFIX): name for name in files.names(path)}

    def read(box: Box) -> torch.Tensor:
        return files.read(
            path, stored[box.name], tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        )

    return read
