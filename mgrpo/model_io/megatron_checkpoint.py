"""A model's weights as Megatron-LM and Megatron-Bridge keep them, in Megatron-core's own format `torch_dist`.

    config.json, tokenizer, ...          copied, see `hf_folder.carry`
    latest_checkpointed_iteration.txt    "release": weights without the state of a training run
    release/                             the checkpoint, see `torch_dist`

It is the same for every layout. A training run's `iter_*` folders are also read, for their weights only.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgrpo.checkpoint.folder import LocalFolder
from mgrpo.checkpoint.shard import FILE_BYTES
from mgrpo.layout import Layout
from mgrpo.model_io.hf_folder import Header, Tell, dtype_name, header_bytes, row_blocks
from mgrpo.model_io.megatron_folder import parameter_dtypes
from mgrpo.model_io.megatron_view import MegatronView
from mgrpo.model_io.torch_dist import CHUNK_BYTES, DTYPES, TorchDistFolder, write_torch_dist
from mgrpo.models.hf_files.surplus import some
from mgrpo.models.hf_files.weight_files import TRACKER, torch_dist_folder
from mgrpo.models.megatron_names import (
    EMBEDDING,
    OTHER_STATE,
    VOCABULARY,
    Slab,
    is_homogeneous,
    possible_names,
    router_settings,
    stored_names,
)
from mgrpo.models.placement.boxes import Box, LocalParameter, Piece, Shape
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors, is_draft, local_parameters
from mgrpo.policy.weights import Read, parameter_rows

RELEASE = "release"


class MegatronCheckpoint:
    """The weights of a checkpoint, as boxes of HF tensors.

    Args:
        path: the folder of a checkpoint, or that of a run's checkpoints, of which the newest is read.
        shape: the model it must hold.
    Raises:
        ValueError: it does not hold this model, or not only, or is damaged.
    """

    def __init__(self, path: str | Path, shape: ModelShape) -> None:
        folder = torch_dist_folder(path)
        if folder is None:
            raise ValueError(f"{path} is not a checkpoint in Megatron-core's format torch_dist")
        self.path, self.shape, self._stored = folder, shape, TorchDistFolder(folder)
        self._prefix = self._find_prefix()
        self._view = MegatronView(shape)
        self._kept = self._view.kept
        self._parameters = _whole_parameters(self._kept)
        self._slabs = {name: self._find(name, parameter.shape) for name, parameter in self._parameters.items()}
        self.left_out = self._find_left_out()
        """Tensors of layers that are not built, which only guess further tokens."""
        self._places: dict[str, list[tuple[Piece, str]]] = {name: [] for name in hf_tensors(self._kept)}
        self._dtypes: dict[str, torch.dtype] = {}
        for name, parameter in self._parameters.items():
            dtype = self._stored.tensor(self._slabs[name][0].tensor).dtype
            for piece in parameter.pieces:
                self._places[piece.box.name].append((piece, name))
                self._dtypes[piece.box.name] = dtype
        self.dtypes = self._view.dtypes(self._dtypes, self._read_kept)
        self._read = self._view.reader(self._read_kept, self.dtypes)

    @torch.no_grad()
    def read(self, box: Box) -> torch.Tensor:
        """The values of a box of a Hugging Face tensor."""
        return self._read(box)

    def _read_kept(self, box: Box) -> torch.Tensor:
        """The same of a tensor as Megatron-core keeps it, put together from the parameters that hold it."""
        out = torch.empty(box.shape, dtype=self._dtypes[box.name])
        for piece, name in self._places[box.name]:
            common = box.intersect(piece.box)
            if common is not None:
                region = piece.within(common)
                place = Box("", tuple(own.start for own in region), tuple(own.stop - own.start for own in region))
                for rows, values in self._rows(name, place):
                    target = out[common.within(box)][rows]
                    target.copy_(values.view(target.shape))
        return out

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """All weights."""
        for name, full in hf_tensors(self.shape).items():
            for box in row_blocks(name, (self.dtypes[name], full)):
                yield box, self.read(box)

    def check_sums(self) -> None:
        """Compare all weights with their checksums; ValueError when some have changed since they were written."""
        self._stored.check_sums(sorted({slab.tensor for slabs in self._slabs.values() for slab in slabs}))

    def _rows(self, name: str, rows: Box) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of a parameter from each slab that has some, each with its place among the requested rows."""
        first, last = rows.start[0], rows.start[0] + rows.shape[0]
        for slab in self._slabs[name]:
            start, stop = max(first, slab.first_row), min(last, slab.first_row + slab.shape[0])
            if start < stop:
                size = (stop - start, *rows.shape[1:])
                box = slab.box((start - slab.first_row, *rows.start[1:]), size)
                yield slice(start - first, stop - first), self._stored.read(box).view(size)

    def _find_prefix(self) -> str:
        """NeMo's prefix of every name."""
        found = [name for name in self._stored.names if name.endswith(EMBEDDING) and not OTHER_STATE.match(name)]
        if len(found) != 1:
            raise ValueError(f"{self.path} holds {len(found)} tensors {EMBEDDING}; expected those of one model")
        return found[0].removesuffix(EMBEDDING)

    def _find(self, name: str, shape: Shape) -> list[Slab]:
        """The slabs in which a parameter is stored."""
        forms = {tuple(map(self._prefixed, form)): None for form in possible_names(self._kept, name, shape)}
        found = [form for form in forms if all(slab.tensor in self._stored.names for slab in form)]
        if not found:
            names = " or ".join(dict.fromkeys(form[0].tensor for form in forms))
            raise ValueError(f"{self.path} lacks {names}, which its model's config.json implies")
        first, *others = found
        for other in others:
            if self._bytes(first) != self._bytes(other):
                raise ValueError(
                    f"{self.path} holds {first[0].tensor} and {other[0].tensor}, which is the same parameter twice"
                )
        return [self._checked(slab, name) for slab in first]

    def _prefixed(self, slab: Slab) -> Slab:
        return replace(slab, tensor=self._prefix + slab.tensor)

    def _bytes(self, form: tuple[Slab, ...]) -> list[tuple[Shape, str, int]]:
        """The places of all chunks of these tensors."""
        chunks = [chunk for slab in form for chunk in self._stored.tensor(slab.tensor).chunks]
        return [(chunk.box.start, chunk.file, chunk.offset) for chunk in chunks]

    def _checked(self, slab: Slab, name: str) -> Slab:
        """The slab, with as many rows as are stored; ValueError unless the tensor has the right shape."""
        found, whole = self._stored.tensor(slab.tensor).shape, slab.whole
        if name in VOCABULARY and found[1:] == whole[1:] and found[0] >= self.shape.vocab:
            return replace(slab, shape=found)
        if found != whole:
            raise ValueError(
                f"{self.path}: {slab.tensor} has shape {list(found)}, the model's config.json implies {list(whole)}; "
                "give the model's own folder: --hf DIR"
            )
        return slab

    def _find_left_out(self) -> list[str]:
        """Tensors of layers that are not built; ValueError if there are others that the model does not have."""
        known = {
            slab.tensor
            for name, parameter in self._parameters.items()
            for form in possible_names(self._kept, name, parameter.shape)
            for slab in map(self._prefixed, form)
        }
        more = sorted(name for name in self._stored.names if name not in known and not OTHER_STATE.match(name))
        left_out = [name for name in more if is_draft(name.removeprefix(self._prefix), self.shape)]
        if surplus := [name for name in more if name not in left_out]:
            raise ValueError(
                f"{self.path} holds {some(surplus)}, which a {self.shape.family} model with this config.json does not have "
                "and a conversion would lose; give the model's own folder: --hf DIR"
            )
        return left_out


def write_checkpoint(
    read: Read,
    shape: ModelShape,
    dtypes: Mapping[str, torch.dtype],
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
    tell: Tell = lambda num_bytes: None,
) -> None:
    """Write all weights to `folder`, with one chunk in memory at a time.

    Args:
        read: gives boxes of HF tensors.
        dtypes: type of each HF tensor, in which it is kept.
    Raises:
        ValueError: tensors that make up one of Megatron's are of different types, or of a type that it does not have; or a model that
            Megatron-core does not have.
    """
    if shape.out_bias and not shape.experts:
        raise ValueError(
            "attention_out_bias=true: Megatron-core's attention has no bias of its output without biases of the MLPs; use "
            "--format safetensors"
        )
    view = MegatronView(shape)
    kept = _kept_dtypes(view, dtypes)
    read = view.kept_reader(read)
    tensors: dict[str, Header] = {}
    copies: dict[str, list[str]] = {}
    objects: dict[str, None] = {}
    chunks = []
    for name, parameter in _whole_parameters(view.kept).items():
        own, *others = stored_names(view.kept, name, parameter.shape)
        for slab in own:
            tensors[slab.tensor] = kept[name], slab.whole
            for rows in row_blocks("", (kept[name], slab.shape), CHUNK_BYTES):
                box = slab.box(rows.start, rows.shape)
                start = (slab.first_row + rows.start[0], *rows.start[1:])
                chunks.append(
                    (box, partial(_values, parameter, Box("", start, rows.shape), kept[name], read, box, tell))
                )
        copies[own[0].tensor] = [form[0].tensor for form in others]
        if name.startswith("decoder."):
            objects |= {known: None for form in (own, *others) for slab in form for known in slab.extra_state}
    write_torch_dist(
        folder / RELEASE,
        tensors,
        chunks,
        copies=copies,
        objects=objects,
        common={
            "checkpoint_version": 3.0,
            "iteration": 0,
            "args": Namespace(**_arguments(shape)),
            "content_metadata": {
                "singleton_local_shards": False,
                "non_homogeneous_layers": not is_homogeneous(shape),
                "chained_optim_avoid_prefix": True,
            },
        },
        file_bytes=file_bytes,
    )
    LocalFolder(folder).replace(TRACKER, RELEASE.encode())


def checkpoint_bytes(shape: ModelShape, dtypes: Mapping[str, torch.dtype]) -> int:
    """Size of all weights that `write_checkpoint` writes."""
    view = MegatronView(shape)
    kept = _kept_dtypes(view, dtypes)
    return sum(header_bytes((kept[name], own.shape)) for name, own in _whole_parameters(view.kept).items())


def _kept_dtypes(view: MegatronView, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """The type of each Megatron parameter, from those of HF tensors."""
    parameters = _whole_parameters(view.kept)
    kept = parameter_dtypes({"": parameters}, view.kept_dtypes(dtypes))
    of_tensor: dict[str, str] = {}
    for name, dtype in kept.items():
        if dtype not in DTYPES:
            raise ValueError(
                f"Megatron's {name} would have type {dtype_name(dtype)}; in format torch_dist expected one of "
                f"{', '.join(map(dtype_name, DTYPES))}"
            )
        tensor = stored_names(view.kept, name, parameters[name].shape)[0][0].tensor
        other = of_tensor.setdefault(tensor, name)
        if kept[other] != dtype:
            raise ValueError(
                f"Megatron's {other} would have type {dtype_name(kept[other])} and {name} {dtype_name(dtype)}, but both "
                f"are parts of {tensor}, which has one type; give them the same"
            )
    return kept


def _whole_parameters(shape: ModelShape) -> dict[str, LocalParameter]:
    """Every Megatron parameter, not cut."""
    return local_parameters(shape, Layout(world_size=1), 0)


def _values(
    parameter: LocalParameter, rows: Box, dtype: torch.dtype, read: Read, stored: Box, tell: Tell
) -> torch.Tensor:
    values = parameter_rows(parameter, rows, dtype, read)
    tell(values.nbytes)
    return values.view(stored.shape)


def _arguments(shape: ModelShape) -> dict[str, Any]:
    """Arguments of Megatron-LM that it compares with its own, or that `--use-checkpoint-args` takes over."""
    clamp = shape.experts.clamp if shape.experts else None
    arguments: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": True,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "add_bias_linear": shape.out_bias,
        "add_qkv_bias": shape.qkv_bias,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": shape.zero_centred_norms,
        "untie_embeddings_and_output_weights": not shape.tied,
        "swiglu": shape.activation == "silu" and clamp is None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
    }
    if latent := shape.latent:
        arguments |= {
            "multi_latent_attention": True,
            "group_query_attention": False,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.v_dim,
        }
    if shape.experts:
        arguments |= {
            "num_experts": shape.experts.count,
            **router_settings(shape.experts),
            "moe_router_enable_expert_bias": shape.experts.choice_bias,
            "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        }
    if clamp is not None:
        arguments |= {"quick_geglu": True, "activation_func_clamp_value": clamp, "glu_linear_offset": 1.0}
    if shape.sinks:
        arguments["softmax_type"] = "learnable"
    if delta := shape.delta:
        arguments |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(not shape.has_attention(layer)) for layer in range(shape.num_layers)],
            "linear_conv_kernel_dim": delta.conv,
            "linear_key_head_dim": delta.key_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
            "attention_output_gate": shape.gated_attention,
        }
    return arguments
