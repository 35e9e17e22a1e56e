"""Whether a model can be cut as the layout asks, and sees as far as the run needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import VOCAB_MULTIPLE

HfConfig = Mapping[str, Any]


def model_problems(config: Config, hf_config: HfConfig) -> Iterator[str]:
    """Whether the model can be cut as asked."""
    parallel = config.parallel
    yield from _split_problems(
        "tensor_model_parallel_size",
        parallel.tensor_model_parallel_size,
        _parts(
            hf_config,
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_size",
            *_widths(hf_config, experts_are_whole=parallel.expert_model_parallel_size > 1),
            "padded vocabulary",
        ),
        copies_key_values=not _normalises_all_heads(hf_config),
    )
    yield from _split_problems(
        "vllm_tensor_parallel_size",
        config.engine.vllm_tensor_parallel_size,
        _parts(hf_config, "num_attention_heads", "num_key_value_heads", *_widths(hf_config)),
    )
    layers = size_of(hf_config, "num_hidden_layers")
    if layers:
        yield from _stage_problems(parallel, layers)
    yield from _exchange_problems(parallel, hf_config)
    yield from _expert_problems(parallel, hf_config)
    cap = hf_config.get("final_logit_softcapping")
    if cap and isinstance(parallel.logits_chunk, int) and parallel.logits_chunk > 0:
        yield (
            f"logits_chunk={parallel.logits_chunk} cannot be combined with the model's final_logit_softcapping={cap}; "
            "use 0 or auto"
        )
    positions = size_of(hf_config, "max_position_embeddings")
    longest = config.max_model_length
    if positions and longest > positions:
        yield (
            f"{longest_sequence(config)} = {longest} is more than the model's "
            f"max_position_embeddings={positions}; shorten one of them"
        )


def _widths(hf_config: HfConfig, *, experts_are_whole: bool = False) -> Iterator[str]:
    """Intermediate sizes that tensor ranks share."""
    if not num_experts(hf_config):
        yield "intermediate_size"
        return
    own = "moe_intermediate_size" if size_of(hf_config, "moe_intermediate_size") else "intermediate_size"
    if not experts_are_whole:
        yield own
    has_dense_layers = hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1
    if has_dense_layers and own != "intermediate_size":
        yield "intermediate_size"


def _normalises_all_heads(hf_config: HfConfig) -> bool:
    """Whether a norm spans all key heads, so that no two ranks may hold the same one."""
    return hf_config.get("model_type") in ("olmo2", "olmo3")


def _parts(hf_config: HfConfig, *names: str) -> dict[str, int]:
    """Sizes that must split evenly, of those that the model's config names."""
    sizes = {name: size_of(hf_config, name) for name in names}
    if "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    if "padded vocabulary" in sizes:
        vocab = size_of(hf_config, "vocab_size")
        sizes["padded vocabulary"] = vocab and math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return {name: size for name, size in sizes.items() if size}


def _split_problems(
    field: str, value: int, parts: Mapping[str, int], *, copies_key_values: bool = True
) -> Iterator[str]:
    """About ranks that each take an equal share of all `parts`, or a copy of a key-value head that others have, too."""

    def splits(name: str, ranks: int) -> bool:
        size = parts[name]
        return size % ranks == 0 or (is_copied(name) and ranks % size == 0)

    def is_copied(name: str) -> bool:
        return name == "num_key_value_heads" and copies_key_values

    limit = parts.get("num_attention_heads") or 64
    choices = [size for size in range(1, limit + 1) if all(splits(name, size) for name in parts)]
    for name, size in parts.items():
        if not splits(name, value):
            verb = "neither divides nor is a multiple of" if is_copied(name) else "does not divide"
            yield f"{field}={value} {verb} {name}={size}; {_choose(choices)}"


def _stage_problems(parallel: Parallel, layers: int) -> Iterator[str]:
    """Whether stages, and their chunks, are equally long but for the two that may be given."""
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    ends = {
        name: getattr(parallel, name)
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if getattr(parallel, name) is not None
    }
    if ends and stages > 1:
        yield from _end_problems(ends, stages, layers)
    elif layers % stages:
        choices = [size for size in range(1, layers + 1) if layers % size == 0]
        yield f"pipeline_model_parallel_size={stages} does not divide num_hidden_layers={layers}; {_choose(choices)}"
    elif layers // stages % chunks:
        choices = [size for size in range(1, layers // stages + 1) if layers // stages % size == 0]
        yield (
            f"virtual_pipeline_model_parallel_size={chunks} does not divide the {layers // stages} layers of a stage "
            f"(num_hidden_layers={layers} / pipeline_model_parallel_size={stages}); {_choose(choices)}"
        )


def _end_problems(ends: Mapping[str, int], stages: int, layers: int) -> Iterator[str]:
    middle = stages - len(ends)

    def fits(length: int) -> bool:
        """Whether the stages in the middle can share what this first of `ends` and the other leave."""
        rest = layers - length - sum(list(ends.values())[1:])
        return rest == 0 if middle == 0 else rest >= middle and rest % middle == 0

    name, length = next(iter(ends.items()))
    if not fits(length):
        choices = sorted((n for n in range(1, layers) if fits(n)), key=lambda n: abs(n - length))[:4]
        rest = layers - sum(ends.values())
        yield (
            f"{' + '.join(f'{key}={value}' for key, value in ends.items())} leaves {rest} of num_hidden_layers={layers} to "
            f"the other {middle} stages, which need equal shares; "
            + (f"for {name} {_choose(sorted(choices))}" if choices else "use fewer stages")
        )


def _exchange_problems(parallel: Parallel, hf_config: HfConfig) -> Iterator[str]:
    """Ulysses hands the heads of a tensor rank out to context ranks."""
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if parallel.cp_comm_type != "a2a" or size == 1:
        return
    heads = _parts(hf_config, "num_attention_heads", "num_key_value_heads")
    own = {name: max(number // tensor, 1) for name, number in heads.items()}
    choices = [n for n in range(1, min(own.values(), default=1) + 1) if all(m % n == 0 for m in own.values())]
    for name, number in own.items():
        if number % size:
            yield (
                f"context_parallel_size={size} does not divide the {number} of {name}={heads[name]} that each tensor rank "
                f"holds, as cp_comm_type=a2a needs; {_choose(choices)}, or use all_gather"
            )


def _expert_problems(parallel: Parallel, hf_config: HfConfig) -> Iterator[str]:
    size, experts = parallel.expert_model_parallel_size, num_experts(hf_config)
    if not experts:
        if size > 1:
            yield f"expert_model_parallel_size={size} needs a mixture-of-experts model, this one has no experts; use 1"
        return
    if experts % size:
        choices = [n for n in range(1, experts + 1) if experts % n == 0]
        yield f"expert_model_parallel_size={size} does not divide the model's {experts} experts; {_choose(choices)}"
    if parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel is False:
        yield (
            f"sequence_parallel=false with tensor_model_parallel_size={parallel.tensor_model_parallel_size} cannot train a "
            "mixture of experts; use true or auto"
        )


def _choose(choices: Iterable[int]) -> str:
    return f"choose from {{{', '.join(map(str, choices))}}}"


def longest_sequence(config: Config) -> str:
    """The settings that `max_model_length` is the sum of."""
    rollout = config.rollout
    is_evaluations = (rollout.eval_response_length or 0) > rollout.response_length
    return f"max_prompt_token_length + {'eval_response_length' if is_evaluations else 'response_length'}"


def num_experts(hf_config: HfConfig | None) -> int | None:
    """Experts of a layer; None for a dense model."""
    return size_of(hf_config, "num_local_experts") or size_of(hf_config, "num_experts")


def size_of(hf_config: HfConfig | None, name: str) -> int | None:
    """A size that the model's config names; None where it does not."""
    value = (hf_config or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
