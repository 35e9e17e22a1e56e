"""Reasons why a model cannot be split along the axes of a layout, one sentence each.

Sizes are read from config.json by name, and a missing one is not checked: engines also serve models that `family` does
not build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mgrpo.layout import VOCAB_MULTIPLE, InferLayout, Layout, choose_from, divisors
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import HfConfig


def layout_problems(hf: HfConfig, layout: Layout) -> Iterator[str]:
    """Reasons why the model cannot be split over the ranks of a layout that has no `problems()` itself."""
    whole_experts = layout.expert > 1
    names = ("hidden_size", *_widths(hf, experts_are_whole=whole_experts), "padded vocabulary")
    yield from _split_problems(
        "tensor_model_parallel_size", layout.tensor, head_sizes(hf) | _sizes(hf, *names), copies_heads=_copies_heads(hf)
    )
    layers = size_of(hf, "num_hidden_layers")
    if layers:
        yield from layout.stage_problems(layers)
    experts = num_experts(hf)
    if not experts and layout.expert > 1:
        yield (
            f"expert_model_parallel_size={layout.expert} needs a mixture-of-experts model, this one has no experts; "
            "use 1"
        )
    elif experts and experts % layout.expert:
        yield (
            f"expert_model_parallel_size={layout.expert} does not divide the model's {experts} experts; "
            f"{choose_from(divisors(experts))}"
        )


def engine_problems(hf: HfConfig, layout: InferLayout) -> Iterator[str]:
    """Reasons why the model cannot be split over the workers of an engine."""
    workers, experts = layout.workers, num_experts(hf)
    widths = _widths(hf, experts_are_whole=layout.expert_parallel)
    yield from _split_problems("vllm_tensor_parallel_size", layout.tensor, head_sizes(hf) | _sizes(hf, *widths))
    if not layout.expert_parallel:
        return
    if not experts:
        yield "vllm_enable_expert_parallel=true needs a mixture-of-experts model, this one has no experts; leave it out"
    elif not 1 < workers <= experts:
        yield (
            f"vllm_enable_expert_parallel=true shares out the model's {experts} experts among the workers of an engine, but "
            f"{_sizes_of(layout)}; "
            + ("leave it out, or use at least 2 workers" if workers == 1 else f"use at most {experts} workers")
        )
    elif experts % workers and hf.get("model_type") == "gpt_oss":
        yield (
            f"vllm_enable_expert_parallel=true with {_sizes_of(layout)}: vLLM's gpt-oss needs equal shares of the "
            f"{experts} experts; {choose_from(divisors(experts)[1:])}"
        )


def _sizes_of(layout: InferLayout) -> str:
    """The sizes that make up the workers of an engine."""
    tensor = f"vllm_tensor_parallel_size={layout.tensor}"
    return tensor if layout.data == 1 else f"{tensor} x vllm_data_parallel_size={layout.data} = {layout.workers}"


def head_sizes(hf: HfConfig) -> dict[str, int]:
    """Numbers of heads by their names in config.json.

    With latent attention each has its own key and value; a key head of a delta net comes with its value heads.
    """
    if size_of(hf, "kv_lora_rank"):
        return _sizes(hf, "num_attention_heads")
    sizes = _sizes(hf, "num_attention_heads", "num_key_value_heads", "linear_num_key_heads")
    if "num_attention_heads" in sizes:
        sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return sizes


def num_experts(hf: HfConfig | None) -> int | None:
    """Experts of a layer; None for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((size for name in names if (size := size_of(hf, name))), None)


def size_of(hf: HfConfig | None, name: str) -> int | None:
    """A size above 0 in config.json; None if it is absent or no such number."""
    value = (hf or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _sizes(hf: HfConfig, *names: str) -> dict[str, int]:
    """The sizes of these names that config.json has."""
    sizes = {name: size_of(hf, name) for name in names}
    if "padded vocabulary" in sizes:
        vocab = size_of(hf, "vocab_size")
        sizes["padded vocabulary"] = vocab and -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return {name: size for name, size in sizes.items() if size}


def _widths(hf: HfConfig, *, experts_are_whole: bool = False) -> Iterator[str]:
    """Intermediate sizes that tensor ranks split."""
    if not num_experts(hf):
        yield "intermediate_size"
        return
    own = "moe_intermediate_size" if size_of(hf, "moe_intermediate_size") else "intermediate_size"
    if not experts_are_whole or size_of(hf, "n_shared_experts"):
        # Tensor ranks split a shared expert also where they hold whole experts.
        yield own
    has_dense_layers = (
        hf.get("mlp_only_layers")
        or hf.get("decoder_sparse_step", 1) != 1
        or size_of(hf, "first_k_dense_replace")
        or "dense" in (hf.get("mlp_layer_types") or ())
    )
    if has_dense_layers and own != "intermediate_size":
        yield "intermediate_size"


def _copies_heads(hf: HfConfig) -> bool:
    """True if several ranks may hold the same key-value head; a norm over all heads would count it once per rank."""
    try:
        return shape_of(hf).qk_norm != "whole"
    except ValueError:  # a model that cannot be trained, which is reported where it is built
        return True


def _split_problems(field: str, ranks: int, sizes: Mapping[str, int], *, copies_heads: bool = True) -> Iterator[str]:
    """Ranks take equal shares of all `sizes`, or a copy of a key-value head where there are more ranks than heads."""

    def is_copied(name: str) -> bool:
        return name == "num_key_value_heads" and copies_heads

    def splits(name: str, ranks: int) -> bool:
        return sizes[name] % ranks == 0 or (is_copied(name) and ranks % sizes[name] == 0)

    limit = sizes.get("num_attention_heads", 64)
    choices = [count for count in range(1, limit + 1) if all(splits(name, count) for name in sizes)]
    for name, size in sizes.items():
        if not splits(name, ranks):
            verb = "neither divides nor is a multiple of" if is_copied(name) else "does not divide"
            yield f"{field}={ranks} {verb} {name}={size}; {choose_from(choices)}"
