"""Fields of config.json that the installed vLLM reads and transformers ignores: with one, an engine samples from another model.

Learners compute the same as transformers. `tests/unit/models/test_engine_fields.py` compares these tables with the source of the
installed vLLM, and fails on a field that is in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgrpo.models.hf_config import HfConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""The class of each `model_type`. vLLM goes by `architectures`, transformers and the learners by `model_type`."""
WINDOWED = frozenset(
    ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmo3", "gemma2", "gpt_oss", "gemma3_text"),
)
"""Families in which transformers reads `sliding_window`."""
LATENT = frozenset(("deepseek_v3", "kimi_k2", "glm4_moe_lite"))
HYBRID = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
TRANSFORMERS_BACKEND = frozenset(("seed_oss", "olmo2", "olmo3"))
"""Families without a class in vLLM."""
ABSENT = ()
"""No value is harmless: vLLM checks only that the key is present."""
EMPTY = (None,)
OFF = (None, False)
ALL = frozenset(ARCHITECTURES)


@dataclass(frozen=True, slots=True)
class EngineField:
    """A key of config.json that vLLM reads in these families."""

    harmless: tuple[Any, ...]
    """Values under which vLLM computes the same as transformers."""
    families: frozenset[str] = ALL


ENGINE_FIELDS: Mapping[str, EngineField] = {
    # The layers of a family.
    "sliding_window": EngineField(EMPTY, ALL - WINDOWED),
    "is_causal": EngineField((True,)),
    "dual_chunk_attention_config": EngineField(EMPTY),
    "attention_chunk_size": EngineField(EMPTY),
    "rswa_window": EngineField(EMPTY),
    "llama_4_scaling": EngineField(EMPTY, LATENT | {"mistral"}),
    "logit_scale": EngineField((1,), TRANSFORMERS_BACKEND | {"llama", "mistral"}),
    "final_logit_softcapping": EngineField(EMPTY, TRANSFORMERS_BACKEND),
    "qk_norm": EngineField(OFF, frozenset(("qwen2",))),
    "bias": EngineField(OFF, frozenset(("llama", "mistral"))),
    "qkv_bias": EngineField(OFF, HYBRID | {"llama", "mistral"}),
    "target_layer_count": EngineField(ABSENT, frozenset(("llama", "mistral"))),
    "ada_rms_norm_t_cond": EngineField(OFF, frozenset(("mistral",))),
    "shared_expert_intermediate_size": EngineField((None, 0), frozenset(("qwen3_moe",))),
    "attn_output_gate": EngineField((True,), HYBRID),
    "layer_scale": EngineField(OFF, HYBRID),
    "output_gate_type": EngineField(("silu", "swish"), HYBRID),
    "norm_topk_prob": EngineField((True,), frozenset(("qwen3_5_moe_text",))),
    "mlp_only_layers": EngineField((None, []), frozenset(("qwen3_5_moe_text",))),
    "decoder_sparse_step": EngineField((1,), frozenset(("qwen3_5_moe_text",))),
    "index_topk": EngineField(ABSENT),
    "moe_router_dtype": EngineField(EMPTY, LATENT),
    # The model around them.
    "head_dtype": EngineField((None, "model")),
    "compression_config": EngineField(EMPTY),
    "is_encoder_decoder": EngineField(OFF),
    "is_mm_prefix_lm": EngineField(OFF),
    "canvas_length": EngineField(EMPTY),
    "text_config": EngineField(EMPTY),
    "llm_config": EngineField(ABSENT),
    "thinker_config": EngineField(EMPTY),
    "per_layer_config": EngineField(EMPTY),
    "is_heterogeneous": EngineField(OFF),
    "block_configs": EngineField(ABSENT),
    "layers_block_type": EngineField(EMPTY),
    "attn_type_list": EngineField((None, [])),
    "compress_ratios": EngineField(ABSENT),
    "hidden_size_per_head": EngineField(EMPTY),
    "rotary_emb_base": EngineField(EMPTY),
    "rotary_pct": EngineField(EMPTY),
    "rotary_emb_fraction": EngineField(EMPTY),
}
"""Fields by key of config.json."""
ROPE_FIELDS: Mapping[str, EngineField] = {
    "mrope_section": EngineField(ABSENT, ALL - {"qwen3_5_text", "qwen3_5_moe_text"}),
    "rope_dim": EngineField((None, 0)),
    "use_fope": EngineField(OFF),
    "is_deepseek_v4": EngineField(OFF),
}
"""Fields by key of a record of RoPE."""


def engine_field_problems(family: str, hf: HfConfig, ropes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Fields that make an engine compute differently from transformers, one sentence each."""
    expected = ARCHITECTURES[family]
    if (named := hf.get("architectures") or [expected]) != [expected]:
        yield f"architectures={named!r} (vLLM goes by it, transformers by model_type; expected [{expected!r}])"
    yield from _found(ENGINE_FIELDS, hf, family, "")
    for record in ropes:
        yield from _found(ROPE_FIELDS, record, family, "RoPE with ")


def _found(fields: Mapping[str, EngineField], values: Mapping[str, Any], family: str, where: str) -> Iterator[str]:
    for key, field in fields.items():
        if key in values and family in field.families and values[key] not in field.harmless:
            yield (
                f"{where}{key}={values[key]!r:.80} (vLLM reads it, transformers ignores it in this family; take it out of config.json to "
                "train without it)"
            )
