"""Bytes that a learner rank holds throughout a run (parameters, gradients, optimizer states), of its logits, and of saved files.

Counted are Megatron's allocations for the whole run, by the rule table that also loads the weights. Activations, engines
and the sum are the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from mgrpo.layout import VOCAB_MULTIPLE, Layout
from mgrpo.models.adapters import LoraShape, adapter_places, adapter_tensors
from mgrpo.models.placement.mlp_rows import is_frozen
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors, local_parameters, trained_tensors

FP32_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_CHUNK = 16_384
"""Most columns per chunk where logits do not fit: 0.5 GiB in bf16 for 16,384 tokens, and still wide GEMMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that one rank holds throughout a run."""

    parameters: int
    gradients: int
    """The fp32 buffer that micro-batches add to and data-parallel ranks reduce."""
    optimizer: int
    """This rank's share: two moments and an fp32 master copy, which fp32 weights do not need up to ZeRO-1."""
    reference: int
    """The reference model's parameters, and an fp32 copy of them where the reference is updated."""
    teachers: int = 0
    """Parameters of the teachers that learners hold, and an fp32 copy of those of an average of the policy."""
    unsharded: int = 0
    """ZeRO-3: whole weights of the layer in use, of the next one, and of all parameters outside layers."""
    host: int = 0
    """Host memory: offloaded moments with their master copy and gradient, all fp32."""

    @property
    def total(self) -> int:
        """Everything that stays on the device."""
        return self.parameters + self.gradients + self.optimizer + self.reference + self.teachers + self.unsharded


@dataclass(frozen=True, slots=True)
class Elements:
    """Numbers of weights on one rank. Experts are counted separately because other ranks share them."""

    dense: int
    experts: int
    frozen: int = 0
    """Parameters that stay as loaded, in float32."""

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.dense + other.dense, self.experts + other.experts, self.frozen + other.frozen)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.frozen

    def nbytes(self, dtype_bytes: int) -> int:
        """Bytes of all of them."""
        return (self.dense + self.experts) * dtype_bytes + self.frozen * FP32_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Weights that a rank would hold with a single pipeline stage, part by part; vocabulary padding included."""

    layers: tuple[Elements, ...]
    embedding: int
    head: int
    """0 in a tied model, where it is the embedding."""
    norm: int
    """The final norm."""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(layer.total for layer in self.layers) + self.embedding + self.head + self.norm


@lru_cache(maxsize=256)
def one_of_each_kind(shape: ModelShape) -> tuple[ModelShape, tuple[int, ...]]:
    """A model with one layer for all whose weights have the same shapes, and for each layer of `shape` its number there.

    An MoE model may have 100,000 tensors, in two or three kinds of layers.
    """
    kinds = [(shape.has_experts(layer), shape.has_attention(layer)) for layer in range(shape.num_layers)]
    distinct = list(dict.fromkeys(kinds))
    return shape.with_layers([kinds.index(kind) for kind in distinct]), tuple(map(distinct.index, kinds))


@lru_cache(maxsize=256)
def holdings(shape: ModelShape, *, tensor: int, expert: int) -> Holdings:
    """Counted by the rule table; equal on all ranks of a stage."""
    one_stage = Layout(world_size=tensor * expert, tensor=tensor, expert=expert)
    small, numbers = one_of_each_kind(shape)
    layers = [Elements(0, 0)] * small.num_layers
    rest = {"embedding": 0, "output_layer": 0, "decoder": 0}
    for name, parameter in local_parameters(small, one_stage, 0).items():
        size = math.prod(parameter.shape)
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            if any(is_frozen(piece.box.name) for piece in parameter.pieces):
                layers[layer] += Elements(0, 0, size)
            else:
                layers[layer] += Elements(0, size) if ".experts." in name else Elements(size, 0)
        else:
            rest[name.partition(".")[0]] += size
    layers = [layers[number] for number in numbers]
    return Holdings(layers=tuple(layers), embedding=rest["embedding"], head=rest["output_layer"], norm=rest["decoder"])


def stage_layers(layout: Layout, num_layers: int, stage: int) -> list[int]:
    """Layers of all chunks of a pipeline stage."""
    chunks = range(layout.virtual_pipeline)
    return list(chain.from_iterable(layout.chunk_layers(num_layers, stage, chunk) for chunk in chunks))


def stage_elements(shape: ModelShape, layout: Layout, *, stage: int) -> Elements:
    """Weights that one rank of a pipeline stage holds; the last stage of a tied model has a copy of the embedding."""
    held = holdings(shape, tensor=layout.tensor, expert=layout.expert)
    found = sum((held.layers[layer] for layer in stage_layers(layout, shape.num_layers, stage)), Elements(0, 0))
    ends = held.embedding if stage == 0 else 0
    if stage == layout.pipeline - 1:
        is_copy = shape.tied and layout.pipeline > 1
        ends += held.norm + (held.embedding if is_copy else held.head)
    return found + Elements(ends, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterHoldings:
    """Adapters that a rank would hold with a single pipeline stage, layer by layer."""

    layers: tuple[Elements, ...]
    adapted: tuple[Elements, ...]
    """Weights that have an adapter."""
    largest: tuple[int, ...]
    """Elements of the largest of these."""


@lru_cache(maxsize=256)
def adapter_holdings(shape: ModelShape, lora: LoraShape, *, tensor: int, expert: int) -> AdapterHoldings:
    """Counted by the rule table, as `holdings`."""
    one_stage = Layout(world_size=tensor * expert, tensor=tensor, expert=expert)
    layers, adapted = ([Elements(0, 0)] * shape.num_layers for _ in range(2))
    largest = [0] * shape.num_layers
    for name, parameter in local_parameters(shape, one_stage, 0).items():
        places = adapter_places(name, parameter, lora)
        if places is None:
            continue
        layer, is_expert = int(name.split(".")[2]), ".experts." in name
        for counts, size in (
            (layers, sum(math.prod(place.shape) for place in places)),
            (adapted, math.prod(parameter.shape)),
        ):
            counts[layer] += Elements(0, size) if is_expert else Elements(size, 0)
        largest[layer] = max(largest[layer], math.prod(parameter.shape))
    return AdapterHoldings(layers=tuple(layers), adapted=tuple(adapted), largest=tuple(largest))


def adapter_elements(shape: ModelShape, layout: Layout, lora: LoraShape, *, stage: int) -> Elements:
    """Weights of adapters that one rank of a pipeline stage holds."""
    held = adapter_holdings(shape, lora, tensor=layout.tensor, expert=layout.expert)
    return sum((held.layers[layer] for layer in stage_layers(layout, shape.num_layers, stage)), Elements(0, 0))


def merged_bytes(shape: ModelShape, layout: Layout, lora: LoraShape | None, *, stage: int, dtype_bytes: int) -> int:
    """The largest weight merged with its adapter: made in float32, then rounded; one at a time is there."""
    if lora is None or not lora.is_merged:
        return 0
    held = adapter_holdings(shape, lora, tensor=layout.tensor, expert=layout.expert)
    largest = max(held.largest[layer] for layer in stage_layers(layout, shape.num_layers, stage))
    return largest * (FP32_BYTES + dtype_bytes * (dtype_bytes != FP32_BYTES))


def num_parameters(shape: ModelShape, layout: Layout, *, stage: int) -> int:
    """Elements that one rank of a pipeline stage holds, vocabulary padding included; equal on the stage's ranks."""
    return stage_elements(shape, layout, stage=stage).total


def state_bytes(
    shape: ModelShape,
    layout: Layout,
    *,
    stage: int,
    dtype_bytes: int,
    has_reference: bool = False,
    reference_moves: bool = False,
    moment_bytes: int = 2 * FP32_BYTES,
    offload_fraction: float = 0.0,
    lora: LoraShape | None = None,
    teachers: Sequence[ModelShape] = (),
    averages: bool = False,
) -> StateBytes:
    """One rank of a pipeline stage under `layout.zero_stage` (ZeRO, arXiv:1910.02054).

    Optimizer states are shared from stage 1 on, gradients from stage 2, parameters in stage 3: those of experts among
    the ranks that hold the same experts, all others among the data x context ranks.

    Args:
        reference_moves: the reference is updated, which takes an fp32 copy.
        moment_bytes: of Adam's two moments, per weight.
        offload_fraction: share of the weights that the host updates. Megatron keeps their fp32 masters on the device as
            well.
        lora: only adapters are trained, in float32, which is their own master; the model's own weights stay as they are,
            and without adapters are the reference.
        teachers: models that learners hold besides the policy, whole like the reference.
        averages: one of the teachers is an average of the policy.
    """
    held = stage_elements(shape, layout, stage=stage)
    taught = sum(stage_elements(teacher, layout, stage=stage).nbytes(dtype_bytes) for teacher in teachers)
    taught += held.nbytes(dtype_bytes) + held.total * FP32_BYTES if averages else 0
    if lora is not None:
        own = adapter_elements(shape, layout, lora, stage=stage)
        return StateBytes(
            parameters=held.nbytes(dtype_bytes) + own.total * FP32_BYTES,
            gradients=own.total * FP32_BYTES,
            optimizer=_share(own, layout, is_shared=layout.sharding >= 1) * moment_bytes,
            reference=0,
            teachers=taught,
        )

    def share(is_shared: bool) -> int:
        return _share(held, layout, is_shared=is_shared)

    stepped = share(layout.sharding >= 1)
    # Megatron-FSDP also keeps an fp32 master copy of fp32 weights.
    has_master = dtype_bytes != FP32_BYTES or layout.sharding >= 2
    on_host = int(stepped * offload_fraction)
    return StateBytes(
        parameters=share(layout.sharding == 3) * dtype_bytes + held.frozen * FP32_BYTES,
        gradients=share(layout.sharding >= 2) * FP32_BYTES,
        optimizer=stepped * FP32_BYTES * has_master + (stepped - on_host) * moment_bytes,
        reference=held.nbytes(dtype_bytes) + held.total * FP32_BYTES * reference_moves if has_reference else 0,
        teachers=taught,
        unsharded=_unsharded_bytes(shape, layout, stage=stage, dtype_bytes=dtype_bytes),
        host=on_host * 4 * FP32_BYTES,
    )


def _share(held: Elements, layout: Layout, *, is_shared: bool) -> int:
    """A rank's part of the weights that it trains, where its data-parallel ranks share them."""
    if not is_shared:
        return held.dense + held.experts
    return -(-held.dense // layout.num_shards) - (-held.experts // layout.expert_data)


def _unsharded_bytes(shape: ModelShape, layout: Layout, *, stage: int, dtype_bytes: int) -> int:
    """Two layers, and embedding, final norm and head, which Megatron-FSDP does not free."""
    if layout.sharding < 3:
        return 0
    layers, outside = _largest_layer(shape, layout, stage), _outside(shape, layout, stage)
    return (2 * layers + outside) * dtype_bytes


def _largest_layer(shape: ModelShape, layout: Layout, stage: int) -> int:
    held = holdings(shape, tensor=layout.tensor, expert=layout.expert).layers
    return max(held[layer].total for layer in stage_layers(layout, shape.num_layers, stage))


def _outside(shape: ModelShape, layout: Layout, stage: int) -> int:
    """Weights of a stage that are in none of its layers."""
    held = holdings(shape, tensor=layout.tensor, expert=layout.expert).layers
    layers = sum(held[layer].total for layer in stage_layers(layout, shape.num_layers, stage))
    return stage_elements(shape, layout, stage=stage).total - layers


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGradients:
    """Gradients of a backward pass that ZeRO-2 and 3 have not yet scattered, in bytes of one rank."""

    layer: int
    """fp32, of one layer; there may be two, the one in work and the one before it."""
    head: int
    """fp32, of the LM head and the final norm."""


def whole_gradients(shape: ModelShape, layout: Layout, *, stage: int) -> WholeGradients:
    """None of them up to ZeRO-1, whose gradients are always whole."""
    if layout.sharding < 2:
        return WholeGradients(layer=0, head=0)
    held = holdings(shape, tensor=layout.tensor, expert=layout.expert)
    head = held.norm + (held.embedding if shape.tied else held.head) if stage == layout.pipeline - 1 else 0
    return WholeGradients(layer=FP32_BYTES * _largest_layer(shape, layout, stage), head=FP32_BYTES * head)


def logits_bytes(tokens: int, *, shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """Logits of `tokens` rows on one rank of the last stage; their gradient overwrites them.

    Args:
        dtype_bytes: of a logit.
    """
    return tokens * (padded_vocab(shape) // layout.tensor) * dtype_bytes


def padded_vocab(shape: ModelShape) -> int:
    """Columns of the LM head over all tensor ranks."""
    return -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def choose_logits_chunk(
    setting: int | Literal["auto"],
    *,
    shape: ModelShape,
    layout: Layout,
    dtype_bytes: int,
    pack_length: int,
    has_reference: bool,
    device_bytes: int,
    lora: LoraShape | None = None,
    fp32_logits: bool = False,
    teachers: Sequence[ModelShape] = (),
    averages: bool = False,
) -> int:
    """Columns of the LM head to compute at a time; 0 computes all at once.

    A number is taken as given. "auto" is 0 for a model that caps its logits, because the chunked head cannot, and where
    the logits of a rank's share of a pack fit into half of the device memory that the last stage's states leave free;
    else `LOGITS_CHUNK` or a quarter of the shard. This is an estimate. A pack has fewer response rows than tokens, so
    the logits are overestimated. Activations are not counted: they have the other half, which long packs without
    recomputation can exceed in either case.

    Args:
        dtype_bytes: of the model's weights, and of its logits unless they are in fp32.
        pack_length: most tokens in a pack.
        has_reference: a reference model is on the same device.
        device_bytes: memory of the device; the same number on all ranks, because a tensor-parallel group must agree.
        teachers, averages: as in `state_bytes`.
    """
    if setting != "auto":
        return setting
    if shape.logit_softcap is not None:
        return 0
    states = state_bytes(
        shape,
        layout,
        stage=layout.pipeline - 1,
        dtype_bytes=dtype_bytes,
        has_reference=has_reference,
        lora=lora,
        teachers=teachers,
        averages=averages,
    )
    rows = -(-pack_length // layout.context)
    logit_bytes = FP32_BYTES if fp32_logits else dtype_bytes
    logits = logits_bytes(rows, shape=shape, layout=layout, dtype_bytes=logit_bytes)
    if 2 * logits <= device_bytes - states.total:
        return 0
    # Fewer than four chunks save little.
    return min(LOGITS_CHUNK, -(-padded_vocab(shape) // layout.tensor // 4))


def export_bytes(shape: ModelShape, *, dtype_bytes: int, lora: LoraShape | None) -> int:
    """An export in Hugging Face format; of adapters, the merged weights and the adapters themselves."""
    return num_weights(shape) * dtype_bytes + (num_trained(shape, lora) * FP32_BYTES if lora else 0)


def training_state_bytes(
    shape: ModelShape, *, reference_moves: bool, lora: LoraShape | None, averages: bool = False
) -> int:
    """Everything that a run resumes from: masters and moments in fp32, and the weights of a reference or a teacher that moves."""
    return num_trained(shape, lora) * FP32_BYTES * (3 + reference_moves + averages)


def num_weights(shape: ModelShape) -> int:
    """Weights of the whole model, as its checkpoint in Hugging Face format holds them."""
    return sum(map(math.prod, hf_tensors(shape).values()))


def num_trained(shape: ModelShape, lora: LoraShape | None) -> int:
    """Weights that the run changes: those of the adapters, or all."""
    return sum(map(math.prod, (adapter_tensors(shape, lora) if lora else trained_tensors(shape)).values()))
