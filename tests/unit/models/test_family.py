"""Reading a config.json: what can be built exactly, and refusal of the rest."""

from __future__ import annotations

import pytest

from mgrpo.models.family import Llama3Rope, read_hf_config, shape_of

QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 125,
    "rope_theta": 1e6,
}


def test_both_spellings_of_rope_are_read():
    """transformers 5 moved rope_theta into rope_parameters: a missed base trains a model with other positions."""
    old = shape_of(QWEN2)
    new = {k: v for k, v in QWEN2.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
    }
    assert old == shape_of(new)
    assert old.rope_theta == 1e6


def test_llama3_scaling_is_read_when_megatron_can_do_it():
    """Megatron fixes all numbers of the formula but the factor."""
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert shape_of(QWEN2 | {"model_type": "llama", "rope_scaling": rope}).rope_scaling == Llama3Rope(factor=32.0)
    with pytest.raises(ValueError, match="RoPE scaling"):
        shape_of(QWEN2 | {"model_type": "llama", "rope_scaling": rope | {"high_freq_factor": 8.0}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "supported families: llama, qwen2, qwen3"),
        ({"use_sliding_window": True}, "use_sliding_window=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "RoPE scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused(change, words):
    """A silently different model learns something else."""
    with pytest.raises(ValueError, match=words):
        shape_of(QWEN2 | change)


def test_all_reasons_come_at_once():
    """One reason a start wastes a start each."""
    with pytest.raises(ValueError, match=r"mlp_bias.*use_sliding_window"):
        shape_of(QWEN2 | {"mlp_bias": True, "use_sliding_window": True})


def test_missing_folder_is_named(tmp_path):
    """The most frequent mistake of all."""
    with pytest.raises(ValueError, match=r"nowhere has no config\.json"):
        read_hf_config(tmp_path / "nowhere")
