"""Heads of the model's own that draft: where they are refused, and which engines read them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgrpo.moving import from_values
from mgrpo.rollout import drafts
from mgrpo.rollout.vllm.engine_arguments import engine_args
from tests.tiny_models import save_tiny


@pytest.mark.parametrize(
    ("has_heads", "values", "words"),
    [
        (True, {}, None),
        (False, {}, "needs heads that draft (MTP), and"),
        (True, {"vllm_num_speculative_tokens": 3}, "the model has 2 heads; use a multiple of them, or fewer"),
        (
            True,
            {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
            "gives up its heads, which no weight sync writes",
        ),
        (True, {"use_peft": True, "lora_sync": "adapter"}, "use lora_sync=merged"),
        (True, {"vllm_enable_expert_parallel": True, "vllm_data_parallel_size": 2}, "copies of an engine's attention"),
    ],
)
def test_heads_draft_where_they_are_and_stay(has_heads, values, words, tmp_path):
    """An engine would fail when it starts, or draft with whatever memory holds after it has slept."""
    folder = save_tiny(tmp_path, "glm4_moe", num_nextn_predict_layers=2)
    if has_heads:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(64)}, folder / "model.safetensors")
    given = {"model_name_or_path": str(folder), "vllm_speculative_method": "mtp", "vllm_num_speculative_tokens": 4}
    config = from_values(given | values)
    found = list(drafts.draft_problems(config, on_gpu=True, has_states=False))
    assert len(found) == (words is not None) and all(words in sentence for sentence in found), found
    args = {"load_format": "dummy", **drafts.draft_args(config)}
    assert drafts.reads_heads(args) and not drafts.reads_heads(args | {"load_format": "auto"})
    assert not drafts.reads_heads({"load_format": "dummy"})


def test_heads_attend_with_the_kernels_of_their_model(tmp_path):
    """For heads with latent attention vLLM would choose kernels with packed weights, where the CPU has AMX."""
    folder = save_tiny(tmp_path, "deepseek_v3")
    values = {"model_name_or_path": str(folder), "output_dir": str(tmp_path)}
    args = engine_args(from_values(values | {"vllm_speculative_method": "mtp"}), on_gpu=False)
    assert args["speculative_config"]["attention_backend"] == args["attention_backend"] == "CPU_MLA"
    assert (
        "attention_backend"
        not in engine_args(from_values(values | {"vllm_speculative_method": "mtp"}), on_gpu=True)["speculative_config"]
    )
