"""Whether learners and engines can hold a model as configured: whether it splits over the ranks, and reads as far as the run needs.

A model whose config.json lacks a size is not judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from mgrpo.config.annotations import Rule
from mgrpo.config.derived import infer_layout_of, layout_of
from mgrpo.config.provenance import Provenance
from mgrpo.config.schema import Config
from mgrpo.layout import choose_from
from mgrpo.models.cuts import engine_problems, head_sizes, layout_problems, num_experts, size_of
from mgrpo.models.hf_config import HfConfig
from mgrpo.models.memory import DTYPE_BYTES
from mgrpo.models.rope import table_positions


def _engine_splits(config: Config, hf_config: HfConfig) -> Iterator[str]:
    yield from engine_problems(hf_config, infer_layout_of(config.engine))


def _splits(config: Config, hf_config: HfConfig) -> Iterator[str]:
    # The number of ranks plays no part in how the model splits.
    yield from layout_problems(hf_config, layout_of(config, world_size=1))


def _exchange(
    hf_config: HfConfig, cp_comm_type: str, context_parallel_size: int, tensor_model_parallel_size: int
) -> Iterator[str]:
    """Ulysses distributes the heads of a tensor rank over the context ranks, delta nets do so in any case."""
    size, tensor = context_parallel_size, tensor_model_parallel_size
    if size == 1:
        return
    heads = head_sizes(hf_config)
    if cp_comm_type != "a2a":
        heads = {name: number for name, number in heads.items() if name == "linear_num_key_heads"}
    own = {name: max(number // tensor, 1) for name, number in heads.items()}
    choices = [n for n in range(1, min(own.values(), default=1) + 1) if all(m % n == 0 for m in own.values())]
    for name, number in own.items():
        if number % size:
            is_delta = name == "linear_num_key_heads"
            yield (
                f"context_parallel_size={size} does not divide the {number} of {name}={heads[name]} that each tensor "
                f"rank holds, as {'gated delta nets need' if is_delta else 'cp_comm_type=a2a needs'}; "
                f"{choose_from(choices)}{'' if is_delta else ', or use all_gather'}"
            )


def _expert_matrices(config: Config, hf_config: HfConfig) -> Iterator[str]:
    """Experts' matrices are multiplied together, by kernels that take rows of a multiple of 16 bytes."""
    if not num_experts(hf_config):
        return
    dtype = config.model.model_dtype
    multiple = 16 // DTYPE_BYTES[dtype]
    for name, ranks in (
        ("hidden_size", 1),
        (_expert_width(hf_config), layout_of(config, world_size=1).expert_tensor),
    ):
        size = size_of(hf_config, name)
        if size and size % ranks == 0 and size // ranks % multiple:
            share = f" / tensor_model_parallel_size={ranks} = {size // ranks}" if ranks > 1 else ""
            remedy = (
                "; use fewer tensor ranks, or distribute experts with expert_model_parallel_size" if ranks > 1 else ""
            )
            yield f"{name}={size}{share} must be a multiple of {multiple} with experts in model_dtype={dtype}{remedy}"


def _expert_width(hf_config: HfConfig) -> str:
    return "moe_intermediate_size" if size_of(hf_config, "moe_intermediate_size") else "intermediate_size"


def _widths_in_8_bits(config: Config, hf_config: HfConfig) -> Iterator[str]:
    """The sums of a product and of its gradients run over whole blocks, on every rank."""
    if config.parallel.fp8 == "none":
        return
    layout, multiple = layout_of(config, world_size=1), config.parallel.fp8_multiple
    widths = [("hidden_size", 1)]
    if not num_experts(hf_config) or hf_config.get("first_k_dense_replace") or hf_config.get("mlp_only_layers"):
        widths.append(("intermediate_size", layout.tensor))
    if num_experts(hf_config):
        widths.append((_expert_width(hf_config), layout.expert_tensor))
    for name, ranks in widths:
        size = size_of(hf_config, name)
        if size and size % ranks == 0 and size // ranks % multiple:
            share = f" / tensor_model_parallel_size={ranks} = {size // ranks}" if ranks > 1 else ""
            fewer = "fewer tensor ranks, or " if ranks > 1 else ""
            another = "another recipe, or " if size // ranks % 16 == 0 else ""
            yield (
                f"{name}={size}{share} must be a multiple of {multiple} with fp8_recipe={config.parallel.fp8_recipe}; use "
                f"{fewer}{another}fp8=none"
            )


def _expert_ranks(hf_config: HfConfig, tensor_model_parallel_size: int, sequence_parallel: bool | str) -> Iterator[str]:
    if num_experts(hf_config) and tensor_model_parallel_size > 1 and sequence_parallel is False:
        yield (
            f"sequence_parallel=false with tensor_model_parallel_size={tensor_model_parallel_size} cannot "
            "train a mixture of experts; use true or auto"
        )


def _engine_copies(hf_config: HfConfig, provenance: Provenance) -> Iterator[str]:
    copies = provenance.expected.get("vllm_data_parallel_size", 1)
    if num_experts(hf_config) and copies > 1:
        yield (
            f"vllm_data_parallel_size={copies} with a mixture of experts is for copies that share out the experts; use "
            "vllm_enable_expert_parallel=true with it, or vllm_num_engines for copies of the whole model"
        )


def _capped_logits(hf_config: HfConfig, logits_chunk: int | str) -> Iterator[str]:
    cap = hf_config.get("final_logit_softcapping")
    if cap and isinstance(logits_chunk, int) and logits_chunk > 0:
        yield (
            f"logits_chunk={logits_chunk} cannot be combined with the model's final_logit_softcapping={cap}; use 0 or auto"
        )


def _float16(hf_config: HfConfig, model_dtype: str) -> Iterator[str]:
    family = str(hf_config.get("model_type", ""))
    if model_dtype == "float16" and family.startswith("gemma"):
        yield (
            f"model_dtype=float16 with model_type={family}: activations of Gemma models exceed 65504, the largest number of "
            "float16, and vLLM refuses it as well; use bfloat16"
        )


def _positions(config: Config, hf_config: HfConfig, provenance: Provenance) -> Iterator[str]:
    positions = size_of(hf_config, "max_position_embeddings")
    longest, table = config.max_model_length, table_positions(hf_config)
    if table and longest > table and not (positions and longest > positions):
        yield (
            f"{longest_sequence(config)} = {longest} is more than the {table} positions for which the model's yarn scaling (factor x "
            f"original_max_position_embeddings) gives an engine angles; shorten one of them{provenance.not_given(**_lengths(config))}"
        )
    if positions and longest > positions:
        yield (
            f"{longest_sequence(config)} = {longest} is more than the model's "
            f"max_position_embeddings={positions}; shorten one of them{provenance.not_given(**_lengths(config))}"
        )


def longest_sequence(config: Config) -> str:
    """The settings that `max_model_length` is the sum of."""
    return " + ".join(_lengths(config))


def _lengths(config: Config) -> dict[str, object]:
    rollout, prompts = config.rollout, {"max_prompt_token_length": config.data.max_prompt_token_length}
    if (rollout.eval_response_length or 0) > rollout.response_length:
        return {**prompts, "eval_response_length": rollout.eval_response_length}
    return {**prompts, "response_length": rollout.response_length}


LEARNER_RULES: tuple[Rule, ...] = (
    _splits,
    _exchange,
    _expert_matrices,
    _widths_in_8_bits,
    _expert_ranks,
    _capped_logits,
    _float16,
)
"""Of every model that learners hold: the policy, and a teacher beside it."""
MODEL_RULES: tuple[Rule, ...] = (_engine_splits, *LEARNER_RULES, _engine_copies, _positions)
"""Of the policy, which engines hold as well."""
