"""Random Hugging Face models of the supported families, small enough for a test and irregular enough to reveal errors."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

VOCAB = 125
"""A multiple of no padding, so that the vocabulary is always padded."""

MOE = {"head_dim": 32, "num_experts_per_tok": 2}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5, "final_logit_softcapping": 1.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0}
# vLLM's latent attention on a CPU has this rank and this rotated part alone.
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 512, "qk_nope_head_dim": 20, "qk_rope_head_dim": 64, "v_head_dim": 28}
DEEPSEEK = {
    **LATENT,
    **SIGMOID_EXPERTS,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Class and settings that exercise the family's features: windows and original positions are shorter than samples.
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),  # not hidden / heads
    "qwen3_moe": (
        "Qwen3Moe",
        {**MOE, "num_experts": 4, "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            **SIGMOID_EXPERTS,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **SIGMOID_EXPERTS}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "kimi_k2": ("DeepseekV3", {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **MOE,
            **HYBRID,
            "num_experts": 4,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_text": ("Qwen3_5", HYBRID),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        {**MOE, **HYBRID, "num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48},
    ),
    "seed_oss": ("SeedOss", {"head_dim": 32}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 0.9, "beta_slow": 0.1},
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 1.0}),
    "gemma3_text": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
}


def save_tiny(
    folder: Path,
    family: str,
    *,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    **settings: Any,
) -> Path:
    """Write a random model to a folder below `folder`; every parameter is random, including norms and biases.

    Args:
        settings: further fields of the family's transformers config.
    """
    import transformers

    name, family_settings = FAMILIES[family]
    special = family_settings | settings
    if "layer_types" in special:
        special["layer_types"] = (special["layer_types"] * layers)[:layers]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in special else kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-2,  # large enough that a norm with another one shows
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(len(family) + layers)
    config_name = f"{name}TextConfig" if family.endswith("_text") else f"{name}Config"
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config_name)(**shape | special))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.1)
            # Norms of Gemma and of hybrids multiply by 1 + weight, except those of delta nets.
            is_zero_centred = (
                family.startswith(("gemma", "qwen3_next", "qwen3_5")) and "linear_attn" not in parameter_name
            )
            if "norm" in parameter_name and not is_zero_centred:
                parameter.add_(1.0)
            if "conv1d" in parameter_name:  # values that are almost 0 would be normalised with their rounding errors
                parameter.mul_(5.0)
            if family == "gpt_oss" and parameter_name.endswith("gate_up_proj"):  # so that some are clamped
                parameter.mul_(8.0)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    mark = f"-{zlib.crc32(repr(sorted(settings.items())).encode()):08x}" if settings else ""
    target = folder / f"{family}-{layers}-{heads}-{kv_heads}-{tied}{mark}"
    model.save_pretrained(target)
    config = target / "config.json"
    # Transformers has DeepSeek's class for Kimi.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))
    return target


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The oracle: transformers' own model; its kernels of experts do not know float64."""
    import transformers

    settings = json.loads((Path(folder) / "config.json").read_text())
    model = getattr(transformers, settings["architectures"][0])
    config = model.config_class.from_dict(settings | {"model_type": model.config_class.model_type})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return model.from_pretrained(folder, config=config, dtype=dtype, **eager).eval()


def saved_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient under the name of its weight in a checkpoint; transformers keeps all experts in one tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: parameter.grad for name, parameter in model.named_parameters()})
