"""How a model can be cut: every impossible cut is named with the sizes that are possible."""

from __future__ import annotations

import pytest

from mgrpo.config.derived import infer_layout_of
from mgrpo.config.model_rules import MODEL_RULES
from mgrpo.config.rules import Reading
from mgrpo.config.validate import held_problems
from mgrpo.layout import InferLayout
from mgrpo.moving import from_values

DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "num_hidden_layers": 24,
}
QWEN_MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 88, "intermediate_size": 100}
HYBRID = DENSE | {"model_type": "qwen3_5_text", "linear_num_key_heads": 4}
DEEPSEEK = DENSE | {"num_key_value_heads": 16, "kv_lora_rank": 64, "first_k_dense_replace": 24}
MIXTRAL = DENSE | {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 88}


def found(hf_config, **values):
    return Reading(from_values(values), facts={"hf_config": hf_config}).find(*MODEL_RULES)


@pytest.mark.parametrize(
    ("hf_config", "values", "sentence"),
    [
        (
            DENSE | {"model_type": "olmo3"},
            {"tensor_model_parallel_size": 8},
            "tensor_model_parallel_size=8 does not divide num_key_value_heads=4; choose from {1, 2, 4}",
        ),
        (
            DENSE,
            {"pipeline_model_parallel_size": 5},
            "pipeline_model_parallel_size=5 does not divide num_hidden_layers=24; choose from {1, 2, 3, 4, 6, 8, 12, 24}",
        ),
        (
            DENSE,
            {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 4},
            "virtual_pipeline_model_parallel_size=4 does not divide the 6 layers of a stage (num_hidden_layers=24 / "
            "pipeline_model_parallel_size=4); choose from {1, 2, 3, 6}",
        ),
        (
            DENSE,
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 4},
            "num_layers_in_first_pipeline_stage=4 leaves 20 of num_hidden_layers=24 to the other 3 stages, which need equal "
            "shares; for num_layers_in_first_pipeline_stage choose from {3, 6, 9, 12}",
        ),
        (
            DENSE,
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 10,
                "num_layers_in_last_pipeline_stage": 13,
            },
            "num_layers_in_first_pipeline_stage=10 + num_layers_in_last_pipeline_stage=13 leaves 1 of num_hidden_layers=24 "
            "to no other stage; for num_layers_in_first_pipeline_stage choose from {11}",
        ),
        (
            DENSE | {"num_hidden_layers": 94},
            {
                "pipeline_model_parallel_size": 8,
                "virtual_pipeline_model_parallel_size": 4,
                "num_layers_in_first_pipeline_stage": 8,
                "num_layers_in_last_pipeline_stage": 14,
            },
            "num_layers_in_first_pipeline_stage=8 with virtual_pipeline_model_parallel_size=4 must be 9 to 12: a stage has 4 "
            "chunks of 3 layers, of which the first and the last of the model may have fewer",
        ),
        (
            DENSE | {"num_hidden_layers": 94},
            {
                "pipeline_model_parallel_size": 8,
                "virtual_pipeline_model_parallel_size": 5,
                "num_layers_in_first_pipeline_stage": 11,
                "num_layers_in_last_pipeline_stage": 11,
            },
            "virtual_pipeline_model_parallel_size=5 does not divide the 12 layers of each stage without a number of its own ("
            "num_layers_in_first_pipeline_stage=11, num_layers_in_last_pipeline_stage=11); choose from {1, 2, 3, 4, 6, 12}",
        ),
        (
            DENSE | {"num_hidden_layers": 48},
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 23,
            },
            "virtual_pipeline_model_parallel_size=2 does not divide the 25 layers of each stage without a number of its own ("
            "num_layers_in_first_pipeline_stage=23); choose from {1, 5, 25}, or for num_layers_in_first_pipeline_stage from "
            "{18, 20, 22, 24}",
        ),
        (
            DENSE,
            {"context_parallel_size": 8, "cp_comm_type": "a2a", "tensor_model_parallel_size": 2},
            "context_parallel_size=8 does not divide the 2 of num_key_value_heads=4 that each tensor rank holds, as "
            "cp_comm_type=a2a needs; choose from {1, 2}, or use all_gather",
        ),
        (
            HYBRID,
            {"context_parallel_size": 4, "tensor_model_parallel_size": 2},
            "context_parallel_size=4 does not divide the 2 of linear_num_key_heads=4 that each tensor rank holds, as gated "
            "delta nets need; choose from {1, 2}",
        ),
        (
            HYBRID,
            {"tensor_model_parallel_size": 8},
            "tensor_model_parallel_size=8 does not divide linear_num_key_heads=4; choose from {1, 2, 4}",
        ),
        (
            DEEPSEEK,
            {"tensor_model_parallel_size": 32},
            "tensor_model_parallel_size=32 does not divide num_attention_heads=16; choose from {1, 2, 4, 8, 16}",
        ),
        (
            DENSE | {"intermediate_size": 784},
            {"tensor_model_parallel_size": 2, "fp8": "hybrid"},
            "intermediate_size=784 / tensor_model_parallel_size=2 = 392 must be a multiple of 16 with fp8_recipe=tensorwise; use "
            "fewer tensor ranks, or fp8=none",
        ),
        (
            DENSE | {"intermediate_size": 784},
            {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
            "intermediate_size=784 must be a multiple of 32 with fp8_recipe=mxfp8; use another recipe, or fp8=none",
        ),
        (
            QWEN_MOE,
            {"fp8": "e4m3"},
            "moe_intermediate_size=88 must be a multiple of 16 with fp8_recipe=tensorwise; use fp8=none",
        ),
        (
            DENSE,
            {"expert_model_parallel_size": 2},
            "expert_model_parallel_size=2 needs a mixture-of-experts model, this one has no experts; use 1",
        ),
        (
            QWEN_MOE,
            {"expert_model_parallel_size": 3},
            "expert_model_parallel_size=3 does not divide the model's 8 experts; choose from {1, 2, 4, 8}",
        ),
        (
            QWEN_MOE,
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "sequence_parallel=false with tensor_model_parallel_size=2 cannot train a mixture of experts; use true or auto",
        ),
        (
            DENSE,
            {"vllm_enable_expert_parallel": True, "vllm_tensor_parallel_size": 2},
            "vllm_enable_expert_parallel=true needs a mixture-of-experts model, this one has no experts; leave it out",
        ),
        (
            QWEN_MOE,
            {"vllm_enable_expert_parallel": True},
            "vllm_enable_expert_parallel=true shares out the model's 8 experts among the workers of an engine, but "
            "vllm_tensor_parallel_size=1; leave it out, or use at least 2 workers",
        ),
        (
            QWEN_MOE,
            {"vllm_enable_expert_parallel": True, "vllm_tensor_parallel_size": 16},
            "vllm_enable_expert_parallel=true shares out the model's 8 experts among the workers of an engine, but "
            "vllm_tensor_parallel_size=16; use at most 8 workers",
        ),
        (
            QWEN_MOE,
            {"tensor_model_parallel_size": 16},
            "tensor_model_parallel_size=16 does not divide moe_intermediate_size=88; choose from {1, 2, 4, 8}",
        ),
        (
            MIXTRAL,
            {"tensor_model_parallel_size": 16},
            "tensor_model_parallel_size=16 does not divide intermediate_size=88; choose from {1, 2, 4, 8}",
        ),
        (
            QWEN_MOE,
            {"vllm_data_parallel_size": 2},
            "vllm_data_parallel_size=2 with a mixture of experts is for copies that share out the experts; use "
            "vllm_enable_expert_parallel=true with it, or vllm_num_engines for copies of the whole model",
        ),
        (
            QWEN_MOE,
            {"vllm_enable_expert_parallel": True, "vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 8},
            "vllm_enable_expert_parallel=true shares out the model's 8 experts among the workers of an engine, but "
            "vllm_tensor_parallel_size=2 x vllm_data_parallel_size=8 = 16; use at most 8 workers",
        ),
        (
            DENSE,
            {"vllm_enable_expert_parallel": True, "vllm_data_parallel_size": 2},
            "vllm_enable_expert_parallel=true needs a mixture-of-experts model, this one has no experts; leave it out",
        ),
        (
            MIXTRAL,
            {"vllm_tensor_parallel_size": 16},
            "vllm_tensor_parallel_size=16 does not divide intermediate_size=88; choose from {1, 2, 4, 8}",
        ),
        (
            QWEN_MOE,
            {"tensor_model_parallel_size": 2},
            "moe_intermediate_size=88 / tensor_model_parallel_size=2 = 44 must be a multiple of 8 with experts in "
            "model_dtype=bfloat16; use fewer tensor ranks, or distribute experts with expert_model_parallel_size",
        ),
        (
            MIXTRAL | {"hidden_size": 516},
            {},
            "hidden_size=516 must be a multiple of 8 with experts in model_dtype=bfloat16",
        ),
        (
            DENSE | {"final_logit_softcapping": 30.0},
            {"logits_chunk": 4096},
            "logits_chunk=4096 cannot be combined with the model's final_logit_softcapping=30.0; use 0 or auto",
        ),
        (
            DENSE | {"model_type": "gemma3_text"},
            {"model_dtype": "float16"},
            "model_dtype=float16 with model_type=gemma3_text: activations of Gemma models exceed 65504, the largest number of "
            "float16, and vLLM refuses it as well; use bfloat16",
        ),
    ],
)
def test_an_impossible_cut_is_named_with_the_possible_ones(hf_config, values, sentence):
    """Megatron asserts deep inside a constructor, on every rank, without the number to try next."""
    assert sentence in found(hf_config, **values)


@pytest.mark.parametrize(
    ("hf_config", "values"),
    [
        (DENSE, {"tensor_model_parallel_size": 8}),
        (DENSE | {"model_type": "olmo3"}, {"tensor_model_parallel_size": 4}),
        (DENSE, {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 3}),
        (DENSE, {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 3}),
        (
            DENSE,
            {
                "pipeline_model_parallel_size": 4,
                "num_layers_in_first_pipeline_stage": 5,
                "num_layers_in_last_pipeline_stage": 3,
            },
        ),
        (
            DENSE | {"num_hidden_layers": 94},
            {
                "pipeline_model_parallel_size": 8,
                "virtual_pipeline_model_parallel_size": 4,
                "num_layers_in_first_pipeline_stage": 11,
                "num_layers_in_last_pipeline_stage": 11,
            },
        ),
        (
            DENSE | {"num_hidden_layers": 126},
            {
                "pipeline_model_parallel_size": 8,
                "virtual_pipeline_model_parallel_size": 8,
                "num_layers_in_first_pipeline_stage": 15,
                "num_layers_in_last_pipeline_stage": 15,
            },
        ),
        (
            DENSE | {"num_hidden_layers": 126},
            {
                "pipeline_model_parallel_size": 16,
                "virtual_pipeline_model_parallel_size": 8,
                "num_layers_in_first_pipeline_stage": 7,
                "num_layers_in_last_pipeline_stage": 7,
            },
        ),
        (DENSE, {"context_parallel_size": 8, "cp_comm_type": "all_gather"}),
        (DENSE, {"context_parallel_size": 4, "cp_comm_type": "a2a"}),
        (HYBRID, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}),
        # Experts that are shared out stay whole, and no layer has an MLP of intermediate_size.
        (QWEN_MOE, {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}),
        (MIXTRAL, {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}),
        (QWEN_MOE, {"tensor_model_parallel_size": 2, "model_dtype": "float32"}),
        (DENSE | {"final_logit_softcapping": 30.0}, {"logits_chunk": "auto"}),
        (DENSE, {"logits_chunk": 4096}),
    ],
)
def test_a_possible_cut_is_not_refused(hf_config, values):
    """A rule that is stricter than the model costs memory or speed on somebody's machine."""
    assert found(hf_config, **values) == []


def test_copies_of_attention_that_share_out_experts_are_one_engine():
    """As engines of their own each would need the memory of all experts."""
    assert found(QWEN_MOE, vllm_enable_expert_parallel=True, vllm_data_parallel_size=4) == []
    config = from_values(
        {
            "vllm_enable_expert_parallel": True,
            "vllm_data_parallel_size": 4,
            "vllm_tensor_parallel_size": 2,
            "vllm_num_engines": 2,
        }
    )
    assert infer_layout_of(config.engine) == InferLayout(engines=2, tensor=2, data=4, expert_parallel=True)
    assert config.engine.num_workers == 8


def test_copies_of_a_dense_model_are_engines():
    """They share nothing; of a mixture of experts they would."""
    assert found(DENSE, vllm_data_parallel_size=4) == [] and found(QWEN_MOE, vllm_data_parallel_size=1) == []
    config = from_values({"vllm_data_parallel_size": 4, "vllm_num_engines": 2})
    assert config.engine.vllm_num_engines == 8 and config.engine.num_workers == 1
    assert any(note.startswith("vllm_data_parallel_size=4 -> vllm_num_engines (8)") for note in config.notes)


@pytest.mark.parametrize(
    ("teacher", "values", "sentences"),
    [
        (
            DENSE,
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "vllm_tensor_parallel_size": 3},
            [],
        ),
        (
            DENSE | {"num_hidden_layers": 28},
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 11,
                "num_layers_in_last_pipeline_stage": 13,
            },
            [
                "num_layers_in_first_pipeline_stage=11 + num_layers_in_last_pipeline_stage=13 leaves 4 of num_hidden_layers=28"
            ],
        ),
        (DENSE, {"expert_model_parallel_size": 8}, ["expert_model_parallel_size=8 needs a mixture-of-experts model"]),
        (DENSE | {"final_logit_softcapping": 30.0}, {"logits_chunk": 64}, ["logits_chunk=64 cannot be combined"]),
        (DENSE | {"num_attention_heads": 6}, {"tensor_model_parallel_size": 0}, []),
        (DENSE | {"num_attention_heads": 6}, {"tensor_model_parallel_size": 3}, []),
    ],
    ids=["fits", "uneven stages", "no experts", "capped", "unsound", "ranks that do not fit"],
)
def test_a_teacher_beside_the_policy_is_cut_by_the_same_rules(teacher, values, sentences):
    """Its first forward pass would fail on some ranks, and the others would wait. Engines do not hold it."""
    said = held_problems(from_values(values), world_size=8, hf_config=teacher)
    assert len(said) == len(sentences)
    assert all(sentence.startswith(words) for sentence, words in zip(said, sentences, strict=True)), said
