"""The model's own draft heads (MTP) in an engine that was started without the model's files: read once, and not trained.

They share the model's embedding and LM head, which a weight sync writes in place; the sync leaves their other weights unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.weight_files import head_files, read_header
from mgrpo.models.placement.boxes import Shape
from mgrpo.sync.vllm_plugin.live_weights import LiveBoxes, check_experts, check_in_place, check_written, loaded_boxes


class DraftingWorker:
    """A base class of vLLM's workers for speculative decoding with draft heads (`worker_extension_cls`)."""

    def read_heads(self) -> int:
        """Read this worker's part of the heads from the model's folder, on each worker; returns the bytes written.

        Raises:
            RuntimeError: the files lack a weight of the heads, or vLLM computes with copies of them.
        """
        worker: Any = self
        runner = worker.model_runner
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if drafter is None:
            raise RuntimeError("vLLM has no heads that draft; this version of vLLM is not supported")
        return read_heads(drafter.model, worker.get_model(), Path(worker.model_config.model))


def head_tensors(folder: Path) -> dict[str, tuple[Path, Shape]]:
    """File and shape of every tensor of a model's heads in its folder."""
    files = head_files(folder, shape_of(read_hf_config(folder)))
    headers = {path: read_header(path) for path in set(files.values())}
    return {name: (path, headers[path][name].shape) for name, path in files.items()}


@torch.no_grad()
def read_heads(heads: torch.nn.Module, model: torch.nn.Module, folder: Path) -> int:
    """See `DraftingWorker.read_heads`; weights that `heads` share with `model` are left to the weight sync."""
    tensors = head_tensors(folder)
    check_experts(heads, has_experts=any(".experts." in name for name in tensors))
    check_in_place(heads)
    boxes, zeros = loaded_boxes(heads, {name: shape for name, (_, shape) in tensors.items()})
    shared = [*model.parameters()]
    own = _apart(boxes, shared)
    check_written(heads, [*(view for _, view in own), *zeros, *shared])
    by_file = defaultdict(list)
    for box, view in own:
        by_file[tensors[box.name][0]].append((box, view))
    for path, parts in by_file.items():
        with safe_open(path, framework="pt") as file:
            for box, view in parts:
                place = tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))
                view.copy_(file.get_slice(box.name)[place])
    for view in zeros:
        view.zero_()
    return sum(view.nbytes for _, view in own)


def _apart(boxes: LiveBoxes, shared: Iterable[torch.Tensor]) -> LiveBoxes:
    """Boxes whose memory is not that of `shared`: checkpoints repeat the embedding and the LM head in their heads."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in shared}
    return [(box, view) for box, view in boxes if view.untyped_storage().data_ptr() not in taken]
