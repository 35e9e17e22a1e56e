"""Whether a model can be cut as the layout asks, and sees as far as the run needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mgrpo.config.schema import Config
from mgrpo.layout import VOCAB_MULTIPLE


def model_problems(config: Config, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Whether the model can be cut as asked."""
    training = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "padded vocabulary")
    inference = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    yield from _split_problems(
        "tensor_model_parallel_size", config.parallel.tensor_model_parallel_size, _parts(hf_config, training)
    )
    yield from _split_problems(
        "vllm_tensor_parallel_size", config.engine.vllm_tensor_parallel_size, _parts(hf_config, inference)
    )
    yield from _split_problems(
        "pipeline_model_parallel_size",
        config.parallel.pipeline_model_parallel_size,
        _parts(hf_config, ("num_hidden_layers",)),
    )
    positions = size_of(hf_config, "max_position_embeddings")
    longest = config.data.max_prompt_token_length + config.rollout.response_length
    if positions and longest > positions:
        yield (
            f"max_prompt_token_length + response_length = {longest} is more than the model's "
            f"max_position_embeddings={positions}; shorten one of them"
        )


def _parts(hf_config: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Sizes that must split evenly, of those that the model's config names."""
    sizes = {name: size_of(hf_config, name) for name in names}
    if "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    if "padded vocabulary" in sizes:
        vocab = size_of(hf_config, "vocab_size")
        sizes["padded vocabulary"] = vocab and math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return {name: size for name, size in sizes.items() if size}


def _split_problems(field: str, value: int, parts: Mapping[str, int]) -> Iterator[str]:
    if not parts:
        return
    limit = parts.get("num_attention_heads") or parts.get("num_hidden_layers") or 64
    choices = [str(size) for size in range(1, limit + 1) if all(_splits(name, parts[name], size) for name in parts)]
    for name, size in parts.items():
        if not _splits(name, size, value):
            verb = "neither divides nor is a multiple of" if name == "num_key_value_heads" else "does not divide"
            yield f"{field}={value} {verb} {name}={size}; choose from {{{', '.join(choices)}}}"


def _splits(name: str, size: int, ranks: int) -> bool:
    """Key-value heads may also be copied: several ranks hold the same one."""
    return size % ranks == 0 or (name == "num_key_value_heads" and ranks % size == 0)


def size_of(hf_config: Mapping[str, Any] | None, name: str) -> int | None:
    """A size that the model's config names; None where it does not."""
    value = (hf_config or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
