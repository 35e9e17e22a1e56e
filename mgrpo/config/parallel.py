"""The parallel section: how learner ranks share the model, and what each keeps and computes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import (
    MEGATRON,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    SHARE,
    Needs,
    Rule,
)
from mgrpo.config.provenance import Provenance
from mgrpo.layout import Layout
from mgrpo.models.cuts import num_experts, size_of
from mgrpo.models.hf_config import HfConfig

RECOMPUTABLE = ("core_attn", "mlp", "moe")
DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Numbers of ranks for which every release of DeepEP has settings of its kernels (`Buffer.get_dispatch_config`)."""

CONTEXT_RANKS = Needs("context_parallel_size above 1", lambda context_parallel_size: context_parallel_size > 1)
OFFLOAD = Needs("optimizer_cpu_offload=true", lambda optimizer_cpu_offload: optimizer_cpu_offload)
PRECISION_AWARE = Needs(
    "use_precision_aware_optimizer=true", lambda use_precision_aware_optimizer: use_precision_aware_optimizer
)
FP8 = Needs("fp8 other than none", lambda fp8: fp8 != "none")
SELECTIVE = Needs("recompute_granularity=selective", lambda recompute_granularity: recompute_granularity == "selective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    num_learners_per_node: Annotated[tuple[int, ...], OPEN_INSTRUCT] = ()
    """Learner ranks on each node, checked against those that torchrun started; empty: not checked."""
    tensor_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Pipeline stages that the layers are divided into."""
    context_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Ranks that share each sequence."""
    cp_comm_type: Annotated[Literal["all_gather", "a2a"], MEGATRON, CONTEXT_RANKS] = "all_gather"
    """How context-parallel ranks attend to each other's tokens: all_gather gathers keys and values, a2a exchanges sequence for
    heads (Ulysses) and needs a multiple of context_parallel_size heads per tensor rank."""
    expert_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Ranks of a pipeline stage that share the experts of a mixture-of-experts model."""
    moe_token_dispatcher_type: Annotated[Literal["alltoall", "deepep", "hybridep"], MEGATRON] = "alltoall"
    """How tokens reach the ranks of their experts: alltoall sends a copy for each expert; deepep and hybridep send one to each rank,
    or node, in bfloat16 between GPUs, by the package DeepEP (deep_ep) or its branch HybridEP. They have not run on GPUs here."""
    virtual_pipeline_model_parallel_size: Annotated[int, ONE_OR_MORE, MEGATRON] = 1
    """Chunks of layers per stage, interleaved: smaller bubbles, more communication."""
    num_layers_in_first_pipeline_stage: Annotated[int | None, ONE_OR_MORE, MEGATRON] = None
    """Layers in the first stage; none: as many as in the others."""
    num_layers_in_last_pipeline_stage: Annotated[int | None, ONE_OR_MORE, MEGATRON] = None
    """Layers in the last stage; none: as many as in the others."""
    sequence_parallel: Annotated[bool | Literal["auto"], MEGATRON] = "auto"
    """Megatron's sequence parallelism: split activations between layers across the tensor ranks; auto: if there are several."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """State that is sharded over the data-parallel ranks, as in DeepSpeed: 0 nothing, 1 the optimizer's states (Megatron's
    distributed optimizer), 2 also gradients, 3 also parameters (both Megatron-FSDP)."""
    fsdp_shard_degree: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """With zero_stage=3: consecutive ranks that shard each parameter, replicated over the others (HSDP); none: all ranks."""
    optimizer_cpu_offload: Annotated[bool, MEGATRON] = False
    """Keep the optimizer's states in host memory and update them there; needs zero_stage=1."""
    optimizer_offload_fraction: Annotated[float, SHARE, MEGATRON, OFFLOAD] = 1.0
    """Share of the optimizer's states that is offloaded."""
    use_precision_aware_optimizer: Annotated[bool, MEGATRON] = False
    """Keep Adam's moments in exp_avg_dtype and exp_avg_sq_dtype; needs Transformer Engine."""
    exp_avg_dtype: Annotated[Literal["float32", "float16", "bfloat16"], MEGATRON, PRECISION_AWARE] = "float32"
    """Type of Adam's first moment with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: Annotated[Literal["float32", "float16", "bfloat16"], MEGATRON, PRECISION_AWARE] = "float32"
    """Type of Adam's second moment with use_precision_aware_optimizer."""
    transformer_impl: Annotated[Literal["auto", "local", "transformer_engine"], MEGATRON] = "auto"
    """Source of a layer's matrix products and norms: Megatron's own (local) or Transformer Engine's, which need CUDA;
    auto: Transformer Engine's where it is installed and learners have GPUs. Weights and checkpoints do not depend on it."""
    fused_layers: bool | Literal["auto"] = "auto"
    """Compute norms, SwiGLU and rotary embeddings by the Triton kernels of Liger (liger-kernel); auto: where it is installed
    and learners have GPUs; false: by torch's own and compiled ones. It has not run on GPUs here."""
    fp8: Annotated[Literal["none", "hybrid", "e4m3"], MEGATRON] = "none"
    """8-bit matrix products of attention's projections, MLPs and experts, by Transformer Engine: hybrid rounds weights and activations
    to e4m3 and gradients to e5m2, e4m3 all of them. Attention itself, routers and the LM head keep model_dtype. It has not run on
    GPUs here."""
    fp8_recipe: Annotated[Literal["tensorwise", "blockwise", "mxfp8"], MEGATRON, FP8] = "tensorwise"
    """Numbers that share a scale with fp8: a tensor, blocks of 128 (Hopper or newer), or 32 (Blackwell). All are of the present values."""
    tp_comm_overlap: Annotated[bool, MEGATRON] = False
    """Send between tensor-parallel ranks, by Transformer Engine's userbuffers, while a product is computed. They have one size, so every
    pack is padded to pack_length. Needs sequence parallelism, and tensor ranks within a node; it has not run on GPUs here."""
    recompute_granularity: Annotated[Literal["none", "selective", "full"], MEGATRON] = "none"
    """Activations that the backward pass recomputes: none, those of recompute_modules (selective), or whole layers (full)."""
    recompute_modules: Annotated[tuple[str, ...], MEGATRON, SELECTIVE] = ("core_attn", "mlp")
    """Modules to recompute with recompute_granularity=selective: core_attn, mlp, moe."""
    activation_offloading: bool = False
    """Activations wait for the backward pass in page-locked host memory, except those of a chunk's last layer: copied while the
    next layer computes, and back before they are needed. It has not run on GPUs here."""
    routing_replay: Literal["auto", "none", "learner", "rollout"] = "auto"
    """Experts of a token in training: rollout: those that the engine chose when it sampled (R3); learner: those that were chosen when
    the policy scored the batch before its first update; none: the router's choice in each pass; auto: rollout for mixtures of experts
    if engines say what they chose, else none."""
    pack_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 512
    """Maximum tokens of a pack, the unit of a micro-batch."""
    logits_chunk: Annotated[int | Literal["auto"], NOT_NEGATIVE] = "auto"
    """Columns of the LM head to compute at a time; 0: all at once; auto: 0 if the logits fit into memory, else 16384."""
    shared_prompt_packing: bool | Literal["auto"] = "auto"
    """Pack a group as one prompt with branches instead of repeating the prompt; auto: where that is less work. On GPUs
    documents with branches take FlexAttention in place of flash attention. Not with context_parallel_size above 1."""

    @property
    def tokens_multiple_of(self) -> int:
        """Tokens of a rank's share of a pack are a multiple of this: 8-bit products want whole blocks, buffers of one size whole packs."""
        block = 1 if self.fp8 == "none" else self.fp8_multiple
        if not self.tp_comm_overlap:
            return block
        shares = self.context_parallel_size * self.tensor_model_parallel_size
        return -(-self.pack_length // (shares * block)) * block

    @property
    def fp8_multiple(self) -> int:
        """Rows and widths of an 8-bit product are a multiple of this."""
        return 32 if self.fp8_recipe == "mxfp8" else 16

    @property
    def replays_routing(self) -> bool:
        """Whether routers are told which experts to choose."""
        return self.routing_replay in ("learner", "rollout")

    def recomputes(self, module: str) -> bool:
        """Whether the backward pass computes this part of a layer again.

        Args:
            module: as in `recompute_modules`; any other name for a part that only full recomputation repeats.
        """
        return _recomputes(module, self.recompute_granularity, self.recompute_modules)


def _recomputes(module: str, granularity: str, modules: tuple[str, ...]) -> bool:
    return granularity == "full" or (granularity == "selective" and module in modules)


def _pack_length(
    pack_length: int, max_prompt_token_length: int, response_length: int, provenance: Provenance
) -> Iterator[str]:
    longest = max_prompt_token_length + response_length
    if pack_length < longest:
        yield (
            f"pack_length={pack_length} cannot hold max_prompt_token_length {max_prompt_token_length} "
            f"+ response_length {response_length}; use at least {longest}{provenance.not_given(pack_length=pack_length, max_prompt_token_length=max_prompt_token_length)}"
        )


def _recompute_modules(recompute_modules: tuple[str, ...], recompute_granularity: str) -> Iterator[str]:
    for module in recompute_modules:
        if module not in RECOMPUTABLE:
            near = difflib.get_close_matches(module, RECOMPUTABLE, n=1)
            advice = f"did you mean {near[0]}?" if near else "name some of these"
            yield f"recompute_modules={module} must be of {', '.join(RECOMPUTABLE)}; {advice}"
    if recompute_granularity == "selective" and not recompute_modules:
        yield f"recompute_granularity=selective recomputes nothing without recompute_modules; name some of {', '.join(RECOMPUTABLE)}"


def _optimizer_memory(
    zero_stage: int,
    optimizer_cpu_offload: bool,
    use_precision_aware_optimizer: bool,
    checkpoint_state_freq: int,
    save_every_minutes: float | None,
    model_dtype: str,
) -> Iterator[str]:
    if optimizer_cpu_offload and zero_stage != 1:
        yield (
            f"optimizer_cpu_offload=true needs zero_stage=1 (Megatron's distributed optimizer), got {zero_stage}; "
            f"use zero_stage=1, or zero_stage={zero_stage} without it"
        )
    for name, is_on in (
        ("use_precision_aware_optimizer", use_precision_aware_optimizer),
        ("optimizer_cpu_offload", optimizer_cpu_offload),
    ):
        if is_on and (checkpoint_state_freq > 0 or save_every_minutes):
            frequency = (
                f"checkpoint_state_freq={checkpoint_state_freq}"
                if checkpoint_state_freq > 0
                else f"save_every_minutes={save_every_minutes}"
            )
            yield (
                f"{name}=true cannot be combined with {frequency}: its state cannot be resumed "
                "yet; turn one of them off"
            )
    if not use_precision_aware_optimizer:
        return
    if zero_stage == 0:
        yield "use_precision_aware_optimizer=true needs a zero_stage of at least 1, got 0"
    if model_dtype == "float16":
        yield (
            "use_precision_aware_optimizer=true cannot be combined with model_dtype=float16, whose scaled gradients it keeps "
            "where the loss scale does not reach them; use bfloat16, or leave it out"
        )
    if optimizer_cpu_offload:
        yield (
            "use_precision_aware_optimizer=true cannot be combined with optimizer_cpu_offload=true, whose optimizer keeps "
            "float32 moments on host and device; leave one of them out"
        )


def _fp8(fp8: str, transformer_impl: str, model_dtype: str, zero_stage: int, use_peft: bool) -> Iterator[str]:
    if fp8 != "none":
        yield from _engine_products(f"fp8={fp8}", "fp8=none", transformer_impl, model_dtype, zero_stage, use_peft)


def _engine_products(
    name: str, without: str, transformer_impl: str, model_dtype: str, zero_stage: int, use_peft: bool
) -> Iterator[str]:
    """What a setting of Transformer Engine's products cannot be combined with; `without` is how to do without it."""
    if transformer_impl == "local":
        yield f"{name} is in Transformer Engine's products, got transformer_impl=local; use transformer_engine or auto, or {without}"
    if model_dtype != "bfloat16":
        yield f"{name} needs bfloat16, got model_dtype={model_dtype}; use bfloat16, or {without}"
    if zero_stage > 1:
        yield f"{name} needs zero_stage 0 or 1, got {zero_stage}, whose parameters Megatron-FSDP moves; use 1, or {without}"
    if use_peft:
        yield f"{name} needs Transformer Engine's layers, and use_peft=true has Megatron's own; use {without}"


def _offloaded_8_bits(activation_offloading: bool, recompute_granularity: str, fp8: str) -> Iterator[str]:
    if activation_offloading and fp8 != "none" and recompute_granularity != "full":
        yield (
            f"activation_offloading=true with fp8={fp8} needs recompute_granularity=full, got {recompute_granularity}, which "
            "saves 8-bit copies of weights; use full, or fp8=none"
        )


def _overlap(
    tp_comm_overlap: bool,
    tensor_model_parallel_size: int,
    sequence_parallel: bool | str,
    transformer_impl: str,
    model_dtype: str,
    zero_stage: int,
    use_peft: bool,
    fp8: str,
    fp8_recipe: str,
    num_learners_per_node: tuple[int, ...],
    teacher_model_name_or_path: tuple[str, ...],
    teacher_mode: str,
) -> Iterator[str]:
    if not tp_comm_overlap:
        return
    tensor, name = tensor_model_parallel_size, "tp_comm_overlap=true"
    if tensor == 1:
        yield f"{name} has nothing to overlap with tensor_model_parallel_size=1; use more, or false"
    elif sequence_parallel is False:
        yield f"{name} gathers and scatters a sequence, got sequence_parallel=false; use auto or true"
    yield from _engine_products(name, "false", transformer_impl, model_dtype, zero_stage, use_peft)
    if fp8 != "none" and fp8_recipe == "blockwise":
        yield f"{name} cannot send blocks of fp8_recipe=blockwise; use tensorwise or mxfp8, or false"
    if any(count % tensor for count in num_learners_per_node):
        yield (
            f"{name} sends within a node, but tensor_model_parallel_size={tensor} does not divide every entry of "
            f"num_learners_per_node={' '.join(map(str, num_learners_per_node))}; use a divisor of them, or false"
        )
    if teacher_model_name_or_path and teacher_mode == "learner":
        yield f"{name} has buffers of the policy's width, got teacher_mode=learner; put teachers on engines, or use false"


def _shared_prompts(shared_prompt_packing: bool | str, context_parallel_size: int) -> Iterator[str]:
    if shared_prompt_packing is True and context_parallel_size > 1:
        yield (
            "shared_prompt_packing=true cannot be combined with context_parallel_size="
            f"{context_parallel_size}, whose ranks share each document; use auto or false"
        )


def _layout(layout: Layout) -> Iterator[str]:
    yield from layout.problems()


def _one_copy(layout: Layout, moe_token_dispatcher_type: str, model_dtype: str) -> Iterator[str]:
    if moe_token_dispatcher_type == "alltoall":
        return
    ranks, name = layout.expert * layout.expert_tensor, f"moe_token_dispatcher_type={moe_token_dispatcher_type}"
    if ranks == 1:
        yield (
            f"{name} sends tokens between ranks, but expert_model_parallel_size=1 keeps all experts on "
            "each of them; use alltoall, which then sends nothing"
        )
    elif moe_token_dispatcher_type == "deepep" and ranks not in DEEPEP_RANKS:
        yield (
            f"{name} has no kernels for {ranks} ranks that share experts; use an "
            f"expert_model_parallel_size that makes them one of {', '.join(map(str, DEEPEP_RANKS))}, or alltoall"
        )
    if model_dtype != "bfloat16":
        yield f"{name} sends bfloat16 only, got model_dtype={model_dtype}; use bfloat16, or alltoall"


def _learners(layout: Layout, num_learners_per_node: tuple[int, ...]) -> Iterator[str]:
    counts, world_size = num_learners_per_node, layout.world_size
    if any(count < 1 for count in counts):
        yield f"num_learners_per_node={' '.join(map(str, counts))} must be numbers above 0"
    elif counts and sum(counts) != world_size:
        yield (
            f"num_learners_per_node={' '.join(map(str, counts))} asks for {sum(counts)} learner ranks, but {world_size} "
            f"{'was' if world_size == 1 else 'were'} started; start each node with its number of ranks: "
            f"mgrpo launch --learner-nodes {len(counts)} --nproc-per-node {counts[0]}, or leave it out"
        )


RULES: tuple[Rule, ...] = (
    _pack_length,
    _recompute_modules,
    _optimizer_memory,
    _fp8,
    _offloaded_8_bits,
    _overlap,
    _shared_prompts,
)
LAYOUT: tuple[Rule, ...] = (_layout, _one_copy)
LEARNERS: tuple[Rule, ...] = (_learners,)


def _idle_ranks(layout: Layout, batch_size: int, num_mini_batches: int) -> Iterator[str]:
    if batch_size < layout.data * num_mini_batches:
        yield (
            f"{batch_size} completions per step in num_mini_batches={num_mini_batches} parts "
            f"leave some of {layout.data} data-parallel ranks without work"
        )
    elif layout.pipeline > 1 and batch_size < layout.data * num_mini_batches * layout.pipeline:
        interleaved = "interleaved stages take that many at a time, so some are empty"
        yield (
            f"{batch_size} completions per step make fewer micro-batches than pipeline_model_parallel_size="
            f"{layout.pipeline} on each of {layout.data} data-parallel ranks; "
            f"{interleaved if layout.virtual_pipeline > 1 else 'so stages are idle part of the time'}"
        )


def _rounded_pack(layout: Layout, pack_length: int) -> Iterator[str]:
    if pack_length % layout.pack_multiple_of:
        yield (
            f"pack_length={pack_length} is rounded up to {layout.round_up(pack_length)}, a multiple of "
            f"{layout.pack_multiple_of}: every context-parallel and, under sequence parallelism, tensor-parallel rank takes "
            "an equal share of a pack"
        )


def _nothing_to_shard(layout: Layout) -> Iterator[str]:
    if layout.sharding != layout.zero_stage:
        yield (
            f"zero_stage={layout.zero_stage} has only one data- and context-parallel rank, so there is nothing to shard; it runs "
            f"as zero_stage={layout.sharding}, which takes the same memory"
        )


def _single_layers(layout: Layout, hf_config: HfConfig | None, activation_offloading: bool) -> Iterator[str]:
    num_layers = size_of(hf_config, "num_hidden_layers") if hf_config else None
    if activation_offloading and num_layers and max(layout.chunk_sizes(num_layers)) == 1:
        yield (
            "activation_offloading=true has no effect on chunks of one layer, the last of which stays on the GPU; use fewer "
            "pipeline stages or virtual_pipeline_model_parallel_size=1"
        )


def _split_matrices(layout: Layout, num_learners_per_node: tuple[int, ...]) -> Iterator[str]:
    if any(count % layout.tensor for count in num_learners_per_node):
        yield (
            f"tensor_model_parallel_size={layout.tensor} does not divide every entry of num_learners_per_node="
            f"{' '.join(map(str, num_learners_per_node))}: some matrices are split across nodes, which is slow"
        )


def _no_experts(
    hf_config: HfConfig | None,
    routing_replay: str,
    moe_token_dispatcher_type: str,
    recompute_granularity: str,
    recompute_modules: tuple[str, ...],
) -> Iterator[str]:
    if hf_config is None or num_experts(hf_config):
        return
    if moe_token_dispatcher_type != "alltoall":
        yield f"moe_token_dispatcher_type={moe_token_dispatcher_type} has no effect on a model without experts"
    if routing_replay in ("learner", "rollout"):
        yield f"routing_replay={routing_replay} has no effect on a model without experts"
    if recompute_granularity == "selective" and "moe" in recompute_modules:
        yield "recompute_modules: moe has no effect on a model without experts"


def _nothing_to_replay(
    hf_config: HfConfig | None, routing_replay: str, num_epochs: int, num_mini_batches: int, use_vllm_logprobs: bool
) -> Iterator[str]:
    if routing_replay != "learner" or not num_experts(hf_config):
        return
    if num_epochs * num_mini_batches == 1:
        yield (
            "routing_replay=learner has no effect without a second optimizer step on the same batch (num_epochs, num_mini_batches)"
        )
    elif use_vllm_logprobs:
        yield (
            "routing_replay=learner has no effect with use_vllm_logprobs=true, because the policy does not score the batch; "
            "routing_replay=rollout replays the experts of the engine"
        )


LAYOUT_WARNINGS: tuple[Rule, ...] = (_idle_ranks, _rounded_pack, _nothing_to_shard, _single_layers, _split_matrices)
EXPERT_WARNINGS: tuple[Rule, ...] = (_no_experts, _nothing_to_replay)
