"""A checkpoint's folder in Megatron-core's format, for the tests: its index is changed as they need it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mgrpo.model_io.convert import megatron_to_hf

LAYERS = "decoder.layers."
FC2 = f"{LAYERS}mlp.linear_fc2.weight"


def edit(folder: Path, how: Callable[[Metadata], object]) -> None:
    """Change the index of a checkpoint."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    how(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """Give tensors other names."""

    def change_names(index: Metadata) -> None:
        index.state_dict_metadata = {new(name): own for name, own in index.state_dict_metadata.items()}
        index.storage_data = {
            MetadataIndex(new(key.fqn), key.offset): place for key, place in index.storage_data.items()
        }

    edit(folder, change_names)


def place_of(index: Metadata, name: str) -> _StorageInfo:
    """Where the first chunk of a tensor is."""
    return next(place for key, place in index.storage_data.items() if key.fqn == name)


def export(checkpoint: Path, out: Path) -> Callable[[], None]:
    return lambda: megatron_to_hf(checkpoint, out)
