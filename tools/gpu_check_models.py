"""Models with random weights, written as Hugging Face folders: tools/gpu_check.py downloads nothing.

They are as large as a single GPU trains comfortably, or tiny: a CPU shows that the modes work, not how fast they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from mgrpo.models.family import shape_of
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors

Kind = Literal["dense", "experts", "softcap", "gpt-oss", "DeepSeek-V3", "Qwen3-Next", "GLM-4.5"]
Size = Literal["large", "small", "tiny"]

GIB = 1 << 30
LARGE_BYTES = 60 * GIB
"""Device memory from which the large models are used: a billion weights take 18 bytes each while they are trained."""

COMMON: dict[str, Any] = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
SIGMOID_EXPERTS: dict[str, Any] = {
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[Kind, dict[str, Any]] = {
    "dense": {"model_type": "qwen2", "tie_word_embeddings": True},
    "experts": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "softcap": {"model_type": "gemma2", "rope_theta": 1e4},
    "gpt-oss": {
        "model_type": "gpt_oss", "rope_theta": 150_000, "hidden_act": "silu", "swiglu_limit": 7.0, "attention_bias": True,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "rope_theta": 1e4, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        **SIGMOID_EXPERTS,
    },
    "Qwen3-Next": {
        "model_type": "qwen3_next", "norm_topk_prob": True, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe", "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True,
        **SIGMOID_EXPERTS,
    },
}  # fmt: skip
SIZES: dict[Size, dict[Kind, dict[str, Any]]] = {
    "large": {
        "dense": dict(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16,
            num_key_value_heads=4, vocab_size=151_936,
        ),
        "experts": dict(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
            head_dim=64, vocab_size=32_000, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=768,
        ),
        "softcap": dict(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
            head_dim=128, query_pre_attn_scalar=128, sliding_window=512, vocab_size=32_000,
        ),
        "gpt-oss": dict(
            hidden_size=1024, intermediate_size=768, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
            head_dim=64, sliding_window=128, vocab_size=32_000, num_local_experts=16, num_experts_per_tok=4,
        ),
        "DeepSeek-V3": dict(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
            q_lora_rank=384, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            vocab_size=32_000, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=768,
        ),
        "Qwen3-Next": dict(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
            head_dim=128, linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=128,
            linear_value_head_dim=128, vocab_size=32_000, num_experts=16, num_experts_per_tok=4,
            moe_intermediate_size=512, shared_expert_intermediate_size=512,
        ),
        "GLM-4.5": dict(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
            head_dim=64, vocab_size=32_000, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=768,
        ),
    },
    "tiny": {
        "dense": dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=500,
        ),
        "experts": dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=500, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        ),
        "softcap": dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, query_pre_attn_scalar=16, sliding_window=8, vocab_size=500,
        ),
        "gpt-oss": dict(
            hidden_size=64, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, sliding_window=8, vocab_size=500, num_local_experts=4, num_experts_per_tok=2,
        ),
        "DeepSeek-V3": dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, vocab_size=500,
            n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=32,
        ),
        "Qwen3-Next": dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=16, vocab_size=500, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        "GLM-4.5": dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=500, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=32,
        ),
    },
}  # fmt: skip
SIZES["small"] = {
    kind: settings | {"num_hidden_layers": 4, "vocab_size": 32_000} for kind, settings in SIZES["large"].items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The batch of one training step of the check."""

    prompts: int
    samples: int
    """Completions for each prompt."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    response_tokens: int
    """Tokens of the longest completion."""
    pack_length: int


WORK: dict[Size, Work] = {
    "large": Work(prompts=4, samples=4, prompt_tokens=512, response_tokens=1024, pack_length=8192),
    "small": Work(prompts=4, samples=4, prompt_tokens=256, response_tokens=512, pack_length=4096),
    "tiny": Work(prompts=2, samples=2, prompt_tokens=12, response_tokens=20, pack_length=64),
}


def work_settings(work: Work) -> dict[str, Any]:
    """Settings of a run that trains on this work, beside its model and how often; losses compare with the engine's logprobs."""
    return {
        "beta": 0.0,
        "use_vllm_logprobs": True,
        "logits_chunk": 0,
        "shared_prompt_packing": False,
        "pack_length": work.pack_length,
        "num_unique_prompts_rollout": work.prompts,
        "num_samples_per_prompt_rollout": work.samples,
        "max_prompt_token_length": work.prompt_tokens,
        "response_length": work.response_tokens,
    }


def size_for(device: torch.device) -> Size:
    """A size that this device trains in seconds."""
    if device.type == "cpu":
        return "tiny"
    return "large" if torch.cuda.get_device_properties(device).total_memory >= LARGE_BYTES else "small"


def write_model(folder: Path, kind: Kind, size: Size, device: torch.device) -> ModelShape:
    """The folder of a model whose weights are random numbers in bf16, so that bf16 and float32 start from the same."""
    hf = COMMON | FAMILIES[kind] | SIZES[size][kind]
    shape = shape_of(hf)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=1))
    save_file(dict(random_weights(shape, device)), folder / "model.safetensors", metadata={"format": "pt"})
    return shape


def random_weights(shape: ModelShape, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, `[as in the rule table]` bf16: norms around their neutral value, the rest small."""
    generator = torch.Generator(device).manual_seed(1)
    for name, dims in hf_tensors(shape).items():
        noise = torch.randn(dims, generator=generator, device=device) * 0.02
        # The norm of a delta net's outputs multiplies by its weight also where the others multiply by 1 + weight.
        is_neutral_at_one = "norm" in name and ("linear_attn" in name or not shape.zero_centred_norms)
        yield name, (noise + 1 if is_neutral_at_one else noise).bfloat16().cpu()
