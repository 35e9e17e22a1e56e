"""What the settings of adapters mean, what they cannot be combined with, and where an adapter to start from brings them."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.validate import problems, warnings
from mgrpo.models.adapters import LoraShape
from mgrpo.models.family import shape_of
from mgrpo.moving import GRPOConfig, from_values
from tests.peft_folders import save_adapter

DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
FUSED = DENSE | {"model_type": "gpt_oss", "num_local_experts": 4, "tie_word_embeddings": False}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
LATENT = DENSE | {"model_type": "glm4_moe_lite", "num_key_value_heads": 4}
LORA = {"use_peft": True, "learning_rate": 2e-4}
APART = LORA | {"lora_sync": "adapter"}


def problems_of(values):
    with pytest.raises(ConfigError) as caught:
        from_values(values)
    return caught.value.problems


def test_the_names_and_defaults_are_the_other_trainers():
    """A script of Open Instruct or TRL with `--use_peft` must train the adapters that it trains there."""
    assert from_values({}).adapter.lora is None
    assert from_values({"use_peft": True}).adapter.lora == LoraShape(rank=16, alpha=32)
    own = {"lora_r": 8, "lora_alpha": 16, "use_rslora": True, "lora_target_modules": ["up_proj", "q_proj"]}
    expected = LoraShape(rank=8, alpha=16, use_rslora=True, targets=("up_proj", "q_proj"))
    assert from_values(LORA | own).adapter.lora == expected
    assert GRPOConfig.from_trl(LORA | own).adapter.lora == expected
    flags = "--use_peft --lora_r 8 --lora_alpha 16 --use_rslora --lora_target_modules up_proj q_proj"
    assert GRPOConfig.from_open_instruct(flags).adapter.lora == expected
    for everything in ("all-linear", ["all-linear"], None):
        assert from_values(LORA | {"lora_target_modules": everything}).adapter.lora == LoraShape(rank=16, alpha=32)


def test_dropout_of_the_other_trainers_defaults_is_noted_and_any_other_refused():
    """Dropout in the trainer alone makes the ratio differ from 1 before any update."""
    for value in (0.05, "0.05"):
        (note,) = from_values(LORA | {"lora_dropout": value}).notes
        assert note.startswith("lora_dropout has no effect: dropout would make trainer and engine two policies")
    assert from_values(LORA | {"lora_dropout": 0}).notes == ()
    (problem,) = problems_of(LORA | {"lora_dropout": 0.1})
    assert problem.startswith("lora_dropout=0.1 is refused: dropout would make trainer and engine two policies")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("load_in_4bit", True),
        ("load_in_8bit", True),
        ("init_lora_weights", "pissa"),
        ("lora_modules_to_save", ["lm_head"]),
        ("lora_target_parameters", ["experts.gate_up_proj"]),
        ("lora_task_type", "SEQ_CLS"),
    ],
)
def test_what_would_train_something_else_is_refused_by_name(name, value):
    """An adapter that means something else than in peft is found out when it is loaded, after the run."""
    (problem,) = problems_of(LORA | {name: value})
    assert problem.startswith(f"{name}=") and " is refused: " in problem


def found_in(model, values, hf_config=DENSE, *, world_size=1):
    config = from_values({**model, "output_dir": f"{model['model_name_or_path']}/out", **values})
    return problems(config, world_size=world_size, hf_config=hf_config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (LORA | {"zero_stage": 2}, "use_peft=true cannot be combined with zero_stage=2, as Megatron-FSDP asks for"),
        (LORA | {"zero_stage": 3}, "use zero_stage=1 (states of adapters are small), and tensor_model_parallel_size"),
        (LORA | {"ref_policy_update_freq": 2}, "use_peft=true cannot be combined with ref_policy_update_freq=2: the"),
        (LORA | {"optimizer_cpu_offload": True}, "optimizer_cpu_offload=true cannot be combined with use_peft=true"),
        (LORA | {"use_precision_aware_optimizer": True}, "whose optimizer states are small; leave use_precision_aware"),
        (LORA | {"transformer_impl": "transformer_engine"}, "got transformer_impl=transformer_engine; use local or"),
        (LORA | {"lora_r": 0}, "lora_r=0 must be at least 1"),
        (
            LORA | {"lora_r": 65},
            "lora_r=65 is more than the model's hidden_size=64, the highest rank that a matrix can",
        ),
        (LORA | {"lora_alpha": -1}, "lora_alpha=-1 must be at least 1"),
        ({"lora_r": 8}, "lora_r=8 needs use_peft=true, without which all weights are trained; set it, or leave lora_r"),
        (
            {"lora_target_modules": ["q_proj"], "lora_alpha": 8},
            "lora_alpha=8, lora_target_modules=q_proj needs use_peft=true",
        ),
        (LORA | {"lora_target_modules": []}, "lora_target_modules is empty; name matrices, or give all-linear"),
        (LORA | {"lora_target_modules": ["all-linear", "q_proj"]}, "leave out q_proj, or all-linear"),
        (
            LORA | {"lora_target_modules": ["q_proj", "linear_fc1"]},
            "lora_target_modules: linear_fc1 must be of this model's q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj, or all-linear (embeddings",
        ),
        (LORA | {"lora_target_modules": ["w1"]}, "lora_target_modules: w1 must be of this model's q_proj, k_proj"),
        (LORA | {"lora_adapter_path": "/nowhere"}, "lora_adapter_path=/nowhere has no adapter_config.json"),
        ({"lora_sync": "adapter"}, "lora_sync=adapter needs use_peft=true, without which all weights are trained"),
        (
            APART | {"vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:8000"},
            "lora_sync=adapter needs engines that the run starts, got vllm_mode=server; use ray or colocate, or lora_sync",
        ),
        (
            APART | {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
            "lora_sync=adapter cannot be combined with vllm_enable_sleep_mode=true: an engine that gives up its memory",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(model, values, words):
    """Each of these would end, or silently change, a run whose engines have started."""
    (problem,) = found_in(model, values)
    assert words in problem


def test_what_adapters_can_be_combined_with_is_not_refused(model):
    """A rule that is too wide takes a layout away."""
    for values, ranks in (({}, 1), ({"zero_stage": 0}, 2), ({"tensor_model_parallel_size": 2}, 2)):
        assert found_in(model, LORA | values, world_size=ranks) == []
    for axis in ("expert_model_parallel_size", "tensor_model_parallel_size"):
        assert found_in(model, LORA | {axis: 2}, EXPERTS, world_size=2) == []
    for values in ({}, {"vllm_mode": "colocate"}, {"vllm_kv_cache_dtype": "fp8", "vllm_tensor_parallel_size": 2}):
        assert found_in(model, APART | values) == []
    attention = {"lora_target_modules": ["q_proj", "o_proj"]}
    assert found_in(model, APART | attention, EXPERTS) == []


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (
            ["all-linear"],
            "experts (gate_proj, up_proj, down_proj); name others in lora_target_modules, such as q_proj k_proj",
        ),
        (
            ["up_proj", "o_proj"],
            "experts (up_proj); name others in lora_target_modules, such as o_proj, or use lora_sync=merged",
        ),
        (
            ["down_proj"],
            "experts (down_proj); name others in lora_target_modules, such as o_proj, or use lora_sync=merged",
        ),
    ],
)
def test_what_vllm_does_not_serve_as_an_adapter_is_refused(model, targets, words):
    """vLLM would serve the experts without their adapters."""
    (problem,) = found_in(model, APART | {"lora_target_modules": targets}, EXPERTS)
    assert problem.startswith("lora_sync=adapter does not serve adapters of") and words in problem
    assert found_in(model, LORA | {"lora_target_modules": targets}, EXPERTS) == []


def test_an_adapter_of_what_vllm_folds_away_is_refused(model):
    """Decoding would go without it, while the learner counts it in."""
    (problem,) = found_in(model, APART, LATENT)
    assert (
        "experts (gate_proj, up_proj, down_proj) and of latent vectors (q_a_proj, kv_a_proj_with_mqa, kv_b" in problem
    )
    assert "such as q_b_proj o_proj, or" in problem
    assert found_in(model, APART | {"lora_target_modules": ["q_b_proj", "o_proj"]}, LATENT) == []
    assert found_in(model, LORA, LATENT) == []


def test_the_highest_rank_that_vllm_serves(model):
    """vLLM refuses the next one when the engine starts."""
    wide = DENSE | {"hidden_size": 1024}
    assert found_in(model, APART | {"lora_r": 512}, wide) == [] == found_in(model, LORA | {"lora_r": 513}, wide)
    (problem,) = found_in(model, APART | {"lora_r": 513}, wide)
    assert (
        problem == "lora_r=513 is more than 512, the highest rank that vLLM serves; lower it, or use lora_sync=merged"
    )


@pytest.mark.parametrize(
    ("values", "hf_config", "expected"),
    [
        ({"learning_rate": 9e-5}, DENSE, "0.0002 here"),
        ({"learning_rate": 1e-4}, DENSE, None),
        ({"learning_rate": 4e-6, "preset": "trl_main"}, DENSE, "1e-05 here"),
        ({"learning_rate": 5e-6, "preset": "trl_main"}, DENSE, None),
        ({"learning_rate": 1e-5}, DENSE | {"hidden_size": 4096}, None),
        ({"learning_rate": 1e-6}, DENSE | {"hidden_size": 4096}, "1e-05 here"),
        ({"learning_rate": 1e-4}, DENSE | {"hidden_size": 4096}, "5e-6 to 2e-5 is usual"),
    ],
)
def test_a_learning_rate_of_full_training_is_remarked_on(values, hf_config, expected):
    """The commonest reason for which adapters seem not to learn."""
    found = [
        line
        for line in warnings(from_values({"use_peft": True} | values), world_size=1, hf_config=hf_config)
        if line.startswith("learning_rate=")
    ]
    assert (expected is None and found == []) or (len(found) == 1 and expected in found[0])


def test_attention_alone_is_remarked_on():
    """It is what most examples of other trainers name."""
    (found,) = warnings(from_values(LORA | {"lora_target_modules": ["q_proj", "v_proj"]}), world_size=1)
    assert found.startswith("lora_target_modules=q_proj v_proj leaves the MLP without adapters")
    assert warnings(from_values(LORA | {"lora_target_modules": ["q_proj", "down_proj"]}), world_size=1) == []


def test_experts_in_one_tensor_have_no_adapter(model):
    """A user who asks for all layers, or for experts by name, must learn that attention alone would be trained."""
    said = warnings(from_values(LORA), world_size=1, hf_config=FUSED)
    assert any("all-linear is attention alone in this model (q_proj, k_proj, v_proj, o_proj)" in one for one in said)
    assert not any("attention alone" in one for one in warnings(from_values(LORA), world_size=1, hf_config=EXPERTS))
    (problem,) = found_in(model, LORA | {"lora_target_modules": ["q_proj", "down_proj"]}, FUSED)
    assert "must be of this model's q_proj, k_proj, v_proj, o_proj, or all-linear (experts that share one" in problem


def test_an_adapter_to_start_from_brings_its_own_shape(tmp_path, model):
    """Its rank is in its tensors: a user who has to repeat it can only get it wrong."""
    stored = LoraShape(rank=4, alpha=24, use_rslora=True, targets=("q_proj", "up_proj"))
    folder = str(save_adapter(tmp_path / "adapter", shape_of(DENSE), stored))
    config = from_values(LORA | {"lora_adapter_path": folder})
    assert config.adapter.lora == stored
    assert f"lora_r is 4, that of the adapter in lora_adapter_path={folder}" in config.notes
    assert found_in(model, LORA | {"lora_adapter_path": folder}) == []
    assert from_values(LORA | {"lora_adapter_path": folder, "lora_r": 8}).adapter.lora_r == 8
    (problem,) = found_in(model, LORA | {"lora_adapter_path": folder, "lora_r": 8})
    assert problem.startswith(f"lora_adapter_path={folder} has lora_r=4, but 8 is asked for; leave lora_r out")
