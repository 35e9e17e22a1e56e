"""Whether a model can be trained as configured: whether it splits over the ranks, and reads as far as the run needs."""

from __future__ import annotations

from collections.abc import Iterator

from mgrpo.config.derived import layout_of
from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import choose_from
from mgrpo.models.cuts import engine_problems, head_sizes, layout_problems, num_experts, size_of
from mgrpo.models.family import HfConfig
from mgrpo.models.memory import DTYPE_BYTES


def model_problems(config: Config, hf_config: HfConfig) -> Iterator[str]:
    """Everything about the model that keeps it from running as configured, one sentence each."""
    parallel = config.parallel
    yield from engine_problems(hf_config, config.engine.vllm_tensor_parallel_size)
    # The number of ranks plays no part in how the model splits.
    yield from layout_problems(hf_config, layout_of(config, world_size=1))
    yield from _exchange_problems(parallel, hf_config)
    yield from _expert_problems(config, hf_config)
    if num_experts(hf_config) and parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel is False:
        yield (
            f"sequence_parallel=false with tensor_model_parallel_size={parallel.tensor_model_parallel_size} cannot "
            "train a mixture of experts; use true or auto"
        )
    copies = config.provenance.expected.get("vllm_data_parallel_size", 1)
    if num_experts(hf_config) and copies > 1:
        yield (
            f"vllm_data_parallel_size={copies} with a mixture of experts would share the experts among copies of the engine, "
            "which must then pause in the same step for every weight sync: not supported; use vllm_num_engines or "
            "vllm_tensor_parallel_size"
        )
    cap = hf_config.get("final_logit_softcapping")
    if cap and isinstance(parallel.logits_chunk, int) and parallel.logits_chunk > 0:
        yield (
            f"logits_chunk={parallel.logits_chunk} cannot be combined with the model's final_logit_softcapping={cap}; "
            "use 0 or auto"
        )
    family = str(hf_config.get("model_type", ""))
    if config.model.model_dtype == "float16" and family.startswith("gemma"):
        yield (
            f"model_dtype=float16 with model_type={family}: activations of Gemma models exceed 65504, the largest number of "
            "float16, and vLLM refuses it as well; use bfloat16"
        )
    positions = size_of(hf_config, "max_position_embeddings")
    longest = config.max_model_length
    if positions and longest > positions:
        yield (
            f"{longest_sequence(config)} = {longest} is more than the model's "
            f"max_position_embeddings={positions}; shorten one of them"
        )


def _expert_problems(config: Config, hf_config: HfConfig) -> Iterator[str]:
    """Experts' matrices are multiplied together, by kernels that take rows of a multiple of 16 bytes."""
    if not num_experts(hf_config):
        return
    width = "moe_intermediate_size" if size_of(hf_config, "moe_intermediate_size") else "intermediate_size"
    dtype = config.model.model_dtype
    multiple = 16 // DTYPE_BYTES[dtype]
    for name, ranks in (("hidden_size", 1), (width, layout_of(config, world_size=1).expert_tensor)):
        size = size_of(hf_config, name)
        if size and size % ranks == 0 and size // ranks % multiple:
            share = f" / tensor_model_parallel_size={ranks} = {size // ranks}" if ranks > 1 else ""
            remedy = (
                "; use fewer tensor ranks, or distribute experts with expert_model_parallel_size" if ranks > 1 else ""
            )
            yield f"{name}={size}{share} must be a multiple of {multiple} with experts in model_dtype={dtype}{remedy}"


def _exchange_problems(parallel: Parallel, hf_config: HfConfig) -> Iterator[str]:
    """Ulysses distributes the heads of a tensor rank over the context ranks."""
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if parallel.cp_comm_type != "a2a" or size == 1:
        return
    heads = head_sizes(hf_config)
    own = {name: max(number // tensor, 1) for name, number in heads.items()}
    choices = [n for n in range(1, min(own.values(), default=1) + 1) if all(m % n == 0 for m in own.values())]
    for name, number in own.items():
        if number % size:
            yield (
                f"context_parallel_size={size} does not divide the {number} of {name}={heads[name]} that each tensor "
                f"rank holds, as cp_comm_type=a2a needs; {choose_from(choices)}, or use all_gather"
            )


def longest_sequence(config: Config) -> str:
    """The settings that `max_model_length` is the sum of."""
    rollout = config.rollout
    is_evaluations = (rollout.eval_response_length or 0) > rollout.response_length
    return f"max_prompt_token_length + {'eval_response_length' if is_evaluations else 'response_length'}"
