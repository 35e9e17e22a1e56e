"""Megatron-core's own checkpoints against Megatron-core: it loads what we write, and we read what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mgrpo.model_io.convert import hf_to_megatron, megatron_to_hf
from mgrpo.model_io.hf_folder import same_bits
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.weight_files import torch_dist_folder
from tests.ranks import cases, torch_dist_cases
from tests.ranks.test_logits import compare
from tests.tiny_models import VOCAB, load_hf, save_tiny

pytestmark = pytest.mark.learners

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
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_text": ("qwen3_5_text", {"tied": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
}
OWN = ("gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
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


def token_ids() -> torch.Tensor:
    """Longer than a window, and than a chunk of a delta net's rule."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, 70)))


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_hf(folder)(token_ids()).logits


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found[..., :VOCAB], expected[..., :VOCAB], rtol=0, atol=4e-5)


@pytest.mark.parametrize("name", OWN)
def test_a_model_with_megatrons_own_modules_loads_what_we_write(run_ranks, model, tmp_path, name):
    """Where our modules have other parameters than Megatron's, only its own can tell what its checkpoints mean."""
    hf_to_megatron(model[name], tmp_path / "out", None)
    hf = read_hf_config(model[name])
    folder = str(torch_dist_folder(tmp_path / "out"))
    (found,) = run_ranks(1, torch_dist_cases.load_own, hf=hf, folder=folder, ids=token_ids())
    assert_near(found, logits_of(model[name]))


@pytest.mark.parametrize("metadata", [None, {"singleton_local_shards": True}], ids=["", "a tensor for each matrix"])
@pytest.mark.parametrize("name", OWN)
def test_what_a_model_with_megatrons_own_modules_saves_comes_out_as_transformers(
    run_ranks, model, tmp_path, name, metadata
):
    """The way out of a Megatron run: nothing of ours has been near these weights before."""
    folder = tmp_path / "iter_0000010"
    arguments = {"folder": str(folder), "ids": token_ids(), "metadata": metadata}
    (expected,) = run_ranks(1, torch_dist_cases.save_own, hf=read_hf_config(model[name]), **arguments)
    megatron_to_hf(folder, tmp_path / "hf", hf=model[name])
    assert_near(logits_of(tmp_path / "hf"), expected)
