"""Megatron-core's own checkpoints against Megatron-core: it loads what we write, and we read what it saves."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from mgrpo.model_io.convert import hf_to_megatron, megatron_to_hf
from mgrpo.model_io.hf_folder import same_bits
from mgrpo.models.hf_files.weight_files import torch_dist_folder
from tests.ranks import cases, torch_dist_cases
from tests.ranks.test_logits import compare
from tests.tiny_models import VOCAB, save_tiny

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"tied": True}),
    "olmo2": ("olmo2", {"kv_heads": 4}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "latent, dense": ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 4}),
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "tp2 pp2": (4, {"tensor": 2, "pipeline": 2}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "pp2 ep2": (4, {"pipeline": 2, "expert": 2}),
    "tp2 ep2": (2, {"tensor": 2, "expert": 2, "sequence_parallel": True}),
}
LOADED = [
    *(("llama", "tp2 pp2"), ("llama", "pp2"), ("qwen2 tied", "tp2"), ("qwen2 tied", "pp2"), ("qwen3", "tp2")),
    *(("gemma2", "tp2 pp2"), ("olmo2", "pp2"), ("mixtral", "ep2"), ("mixtral", "tp2"), ("qwen3_moe", "pp2 ep2")),
    *(("qwen3_moe", "tp2 ep2"), ("qwen3_moe", "one rank")),
    *(("deepseek_v3", "tp2 ep2"), ("latent, dense", "tp2"), ("latent, dense", "pp2")),
]
SAVED = [
    *(("llama", "tp2 pp2"), ("qwen2 tied", "tp2 pp2"), ("qwen3", "pp2 vpp2"), ("gemma2", "tp2 pp2"), ("olmo2", "pp2")),
    *(("mixtral", "ep2"), ("mixtral", "tp2"), ("qwen3_moe", "pp2 ep2"), ("qwen3_moe", "tp2 ep2")),
    *(("deepseek_v3", "tp2"), ("latent, dense", "tp2 pp2")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny(folder, family, **settings) for name, (family, settings) in MODELS.items()}


@pytest.mark.parametrize(("name", "layout"), LOADED, ids=[" ".join(case) for case in LOADED])
def test_megatron_loads_what_we_write_in_any_layout(run_ranks, model, tmp_path, name, layout):
    """With a row or a name that Megatron understands otherwise, its model would be another one than transformers'."""
    hf_to_megatron(model[name], tmp_path / "out", None)
    world_size, axes = LAYOUTS[layout]
    compare(
        run_ranks,
        model[name],
        world_size,
        axes,
        cases.random_samples(seed=3, groups=3, group_size=2),
        VOCAB,
        atol=1e-4,
        function=torch_dist_cases.load,
        folder=str(torch_dist_folder(tmp_path / "out")),
    )


@pytest.mark.parametrize("metadata", [None, {"singleton_local_shards": True}], ids=["", "a tensor for each matrix"])
@pytest.mark.parametrize(("name", "layout"), SAVED, ids=[" ".join(case) for case in SAVED])
def test_every_bit_of_what_megatron_saves_comes_back(run_ranks, model, tmp_path, name, layout, metadata):
    """The way out of a Megatron run, from the folder of one of its iterations or from that of the run."""
    world_size, axes = LAYOUTS[layout]
    folder = tmp_path / "run" / "iter_0000010"
    arguments = {"model_dir": str(model[name]), "layout": axes, "folder": str(folder), "metadata": metadata}
    run_ranks(world_size, torch_dist_cases.save, **arguments)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    expected = load_file(model[name] / "model.safetensors")
    for number, checkpoint in enumerate((folder, tmp_path / "run")):
        megatron_to_hf(checkpoint, tmp_path / str(number), hf=model[name])
        found = load_file(tmp_path / str(number) / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(same_bits(found[key], tensor) for key, tensor in expected.items())
