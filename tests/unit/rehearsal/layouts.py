"""The layouts that are rehearsed: wide models of few layers, whose sizes cost nothing, and small ones that are also saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WIDE = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
    "vocab_size": 16000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
EXPERTS = WIDE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
MIXTURE = WIDE | {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
LATENT = MIXTURE | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
DELTA = MIXTURE | {
    "model_type": "qwen3_next",
    "num_experts": 8,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 512,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
CLAMPED = WIDE | {
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 512,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
CAPPED = WIDE | {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
SMALL = WIDE | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"intermediate_size": 96, "vocab_size": 256}
SMALL_EXPERTS = (
    EXPERTS | {key: value for key, value in SMALL.items() if key != "model_type"} | {"moe_intermediate_size": 32}
)

SETTINGS: dict[str, Any] = {
    "model_name_or_path": "none",
    "model_dtype": "bfloat16",
    "beta": 0.0,
    "pack_length": 2048,
    "max_prompt_token_length": 256,
    "response_length": 768,
    "num_unique_prompts_rollout": 8,
    "num_samples_per_prompt_rollout": 2,
    "vllm_num_engines": 1,
    "weight_sync_bucket_mb": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and settings, and the number of learners."""

    learners: int
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: WIDE)
    teachers: tuple[dict[str, Any], ...] = ()
    """Of the models that `settings` name as teachers and that are loaded."""

    @property
    def argv(self) -> list[str]:
        words = []
        for name, value in (SETTINGS | {"num_learners_per_node": self.learners} | self.settings).items():
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words

    @property
    def ranks(self) -> list[int]:
        """The first rank, and the last where it is on another stage or reports no metrics."""
        splits = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return [0, self.learners - 1] if any(name in self.settings for name in splits) else [0]


PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
SHARED = {"expert_model_parallel_size": 2}
# Packs of long prompts: activations of layers, and little of the LM head.
OFFLOADED = {
    "activation_offloading": True,
    "pack_length": 8192,
    "max_prompt_token_length": 3840,
    "response_length": 256,
    "logits_chunk": 4096,
}
# Almost all tokens are responses, of which the plan takes all to be.
FP32 = {"model_dtype": "float32", "max_prompt_token_length": 16, "response_length": 1008}
EIGHT_BITS = {"fp8": "hybrid"}
LONG = {"pack_length": 8192, "max_prompt_token_length": 3840, "response_length": 256, "logits_chunk": 4096}
ENGINE_CASES: dict[str, Case] = {
    "as they are": Case(learners=2, settings={"transformer_impl": "transformer_engine"}),
    "8 bits": Case(learners=2, settings=EIGHT_BITS | LONG),
    "8 bits, reference": Case(learners=2, settings=EIGHT_BITS | {"beta": 0.1, "ref_policy_update_freq": 1}),
    "8 bits, recompute full": Case(learners=2, settings=EIGHT_BITS | LONG | {"recompute_granularity": "full"}),
    "8 bits, pipeline": Case(learners=4, settings=EIGHT_BITS | LONG | PIPELINE),
    "8 bits, tensor": Case(learners=4, settings=EIGHT_BITS | TENSOR),
    "8 bits, tensor, blocks": Case(learners=4, settings=EIGHT_BITS | TENSOR | {"fp8_recipe": "blockwise"}),
    "8 bits, tensor, mxfp8": Case(learners=4, settings=EIGHT_BITS | TENSOR | {"fp8_recipe": "mxfp8"}),
    "8 bits, overlap": Case(learners=4, settings=EIGHT_BITS | TENSOR | {"tp_comm_overlap": True}),
    "overlap": Case(learners=4, settings=TENSOR | {"tp_comm_overlap": True}),
    "8 bits, experts": Case(learners=4, settings=EIGHT_BITS | SHARED | LONG, model=EXPERTS),
    "8 bits, experts, tensor, recompute moe": Case(
        learners=4,
        settings=EIGHT_BITS | TENSOR | SHARED | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        model=EXPERTS,
    ),
    "8 bits, clamped": Case(learners=4, settings=EIGHT_BITS | SHARED, model=CLAMPED),
    "8 bits, latent": Case(learners=4, settings=EIGHT_BITS | SHARED, model=LATENT),
    "8 bits, delta": Case(learners=2, settings=EIGHT_BITS | SHARED, model=DELTA),
    "8 bits, saved": Case(
        learners=2,
        settings=EIGHT_BITS,
        model=SMALL | {"head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 128},
    ),
}
"""Those whose layers are Transformer Engine's, by name."""
CASES: dict[str, Case] = {
    "ZeRO-0": Case(learners=2, settings={"zero_stage": 0}),
    "ZeRO-1": Case(learners=2),
    "ZeRO-1, many shards": Case(learners=16),
    "ZeRO-3, many shards": Case(learners=16, settings={"zero_stage": 3}, model=WIDE | {"num_hidden_layers": 6}),
    "ZeRO-2": Case(learners=2, settings={"zero_stage": 2}),
    "ZeRO-3": Case(learners=2, settings={"zero_stage": 3}),
    "HSDP": Case(learners=4, settings={"zero_stage": 3, "fsdp_shard_degree": 2}),
    "fp32": Case(learners=2, settings=FP32),
    "fp32, tensor": Case(learners=4, settings=FP32 | TENSOR),
    "fp32, pipeline": Case(learners=4, settings=FP32 | PIPELINE),
    "fp32, recompute selective": Case(
        learners=2,
        settings=FP32 | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ),
    "fp32, recompute full": Case(learners=2, settings=FP32 | {"recompute_granularity": "full"}),
    "tensor": Case(learners=4, settings=TENSOR),
    "pipeline": Case(learners=4, settings=PIPELINE),
    "pipeline, tied": Case(learners=2, settings=PIPELINE, model=WIDE | {"tie_word_embeddings": True}),
    "interleaved": Case(
        learners=2,
        settings=PIPELINE | {"virtual_pipeline_model_parallel_size": 2},
        model=WIDE | {"num_hidden_layers": 4},
    ),
    "interleaved, uneven": Case(
        learners=2,
        settings=PIPELINE
        | {
            "virtual_pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 3,
        },
        model=WIDE | {"num_hidden_layers": 6},
    ),
    "context, all_gather": Case(learners=4, settings=CONTEXT | {"cp_comm_type": "all_gather"}),
    "context, a2a": Case(learners=4, settings=CONTEXT | {"cp_comm_type": "a2a"}),
    "all axes": Case(learners=8, settings=TENSOR | PIPELINE | CONTEXT | {"recompute_granularity": "selective"}),
    "experts": Case(learners=4, settings={"expert_model_parallel_size": 2}, model=EXPERTS),
    "experts, routing replay": Case(
        learners=4,
        settings={"expert_model_parallel_size": 2, "routing_replay": "learner", "num_mini_batches": 2},
        model=EXPERTS,
    ),
    "experts, tensor, recompute full": Case(
        learners=4, settings=TENSOR | SHARED | {"recompute_granularity": "full", "num_mini_batches": 2}, model=EXPERTS
    ),
    "experts, recompute moe": Case(
        learners=2,
        settings=SHARED | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        model=EXPERTS,
    ),
    "experts, whole": Case(learners=2, model=EXPERTS),
    "experts, whole, recompute full": Case(learners=2, settings={"recompute_granularity": "full"}, model=EXPERTS),
    "latent, tensor": Case(learners=4, settings=TENSOR | SHARED, model=LATENT),
    "latent, all_gather": Case(learners=4, settings=CONTEXT | SHARED, model=LATENT),
    "latent, a2a": Case(learners=4, settings=CONTEXT | SHARED | {"cp_comm_type": "a2a"}, model=LATENT),
    "latent, queries of hidden states": Case(
        learners=4, settings=TENSOR | SHARED, model=LATENT | {"q_lora_rank": None, "v_head_dim": 96}
    ),
    "delta": Case(learners=2, settings=SHARED, model=DELTA),
    "delta, tensor": Case(learners=4, settings=TENSOR | SHARED, model=DELTA),
    "delta, context": Case(learners=4, settings=CONTEXT | SHARED, model=DELTA),
    "delta, shared prompts": Case(learners=2, settings=SHARED | {"shared_prompt_packing": "true"}, model=DELTA),
    "clamped, tensor": Case(learners=4, settings=TENSOR | SHARED, model=CLAMPED),
    "clamped, context": Case(learners=4, settings=CONTEXT | SHARED, model=CLAMPED),
    "clamped, shared prompts": Case(learners=2, settings=SHARED | {"shared_prompt_packing": "true"}, model=CLAMPED),
    "recompute full": Case(learners=2, settings=TENSOR | {"recompute_granularity": "full"}),
    "recompute selective": Case(
        learners=2,
        settings=TENSOR | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ),
    "offloaded activations": Case(learners=2, settings=OFFLOADED, model=WIDE | {"num_hidden_layers": 6}),
    "offloaded activations, pipeline, recompute full": Case(
        learners=2,
        settings=OFFLOADED | PIPELINE | {"recompute_granularity": "full"},
        model=WIDE | {"num_hidden_layers": 12},
    ),
    "offloaded activations, experts, recompute moe": Case(
        learners=2,
        settings=OFFLOADED | SHARED | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        model=EXPERTS | {"num_hidden_layers": 4},
    ),
    "reference": Case(learners=2, settings=TENSOR | {"beta": 0.1, "ref_policy_update_freq": 1}),
    "teachers": Case(
        learners=2,
        settings=TENSOR
        | {
            "teacher_model_name_or_path": ["a:A", "b:B", "self"],
            "distillation_loss": "forward_kl",
            "distillation_topk": 4,
        },
        teachers=(WIDE | {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32}, CAPPED),
    ),
    "teachers elsewhere": Case(
        learners=2, settings={"teacher_model_name_or_path": ["A"], "teacher_mode": "server", "distillation_loss": "jsd"}
    ),
    "chunked head": Case(learners=2, settings=TENSOR | {"logits_chunk": 4096}),
    "logits in fp32": Case(learners=2, settings=TENSOR | {"cast_lm_head_to_fp32": True, "logits_chunk": 0}),
    "logits in fp32, chunked": Case(learners=2, settings=TENSOR | {"cast_lm_head_to_fp32": True, "logits_chunk": 4096}),
    "kept sets": Case(learners=2, settings=TENSOR | {"top_k": 8, "logits_chunk": 0}),
    "kept sets, chunked head": Case(learners=4, settings=TENSOR | CONTEXT | {"top_k": 8, "logits_chunk": 4096}),
    "top entropy": Case(learners=2, settings={"top_entropy_quantile": 0.5}),
    "shared prompts": Case(learners=2, settings={"shared_prompt_packing": "true"}),
    "soft caps": Case(learners=2, settings={"logits_chunk": 0}, model=CAPPED),
    "offload": Case(learners=2, settings={"optimizer_cpu_offload": True}, model=SMALL),
    "saved": Case(learners=2, model=SMALL),
    "saved, ZeRO-0": Case(learners=2, settings={"zero_stage": 0}, model=SMALL),
    "saved, ZeRO-2": Case(learners=2, settings={"zero_stage": 2}, model=SMALL),
    "saved, ZeRO-3": Case(learners=2, settings={"zero_stage": 3}, model=SMALL),
    "saved, reference": Case(learners=2, settings={"beta": 0.1, "ref_policy_update_freq": 1}, model=SMALL),
    "saved, average": Case(
        learners=2,
        settings={"teacher_model_name_or_path": ["self"], "teacher_update_rate": 0.1},
        model=SMALL,
    ),
    "saved, experts": Case(learners=2, settings={"expert_model_parallel_size": 2}, model=SMALL_EXPERTS),
}
"""By name."""
