"""What a run with adapters leaves: an export that is the merged model, a peft folder, and a state that goes on in any layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from mgrpo.checkpoint.reader import open_checkpoint
from mgrpo.models.adapters import LoraShape, adapter_tensors, lora_a, lora_b
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.peft import ADAPTER, PREFIX, peft_problems
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import hf_tensors
from tests.ranks import run_cases
from tests.ranks.test_learning import SETTINGS, scored_groups
from tests.tiny_models import save_tiny
from tools import parity

pytestmark = pytest.mark.learners

STEPS, SAVED = 4, 2
LORA = LoraShape(rank=3, alpha=6)
SETTINGS = SETTINGS | {
    "use_peft": True,
    "lora_r": 3,
    "lora_alpha": 6,
    # At 0.2 uninterrupted runs in two layouts already part: four steps make 0.4 of a difference of 1e-7.
    "learning_rate": 0.02,
    "sequence_parallel": "auto",
}
TENSOR, PIPELINE, DATA = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"zero_stage": 1}
CONTEXT, EXPERTS = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
ATTENTION = {"lora_target_modules": ["q_proj", "v_proj", "o_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: save_tiny(tmp_path_factory.mktemp("models"), **parity.MODELS[name])
        for name in ("qwen2", "qwen3-moe", "llama, tied")
    }


@pytest.fixture(scope="module")
def learned(run_ranks, folders, tmp_path_factory):
    """Four steps with adapters on two ranks, saved after the second: results, checkpoint and export, by layout."""
    made = {}

    def run(model, **layout):
        key = json.dumps([model, layout])
        if key not in made:
            out = tmp_path_factory.mktemp("learned")
            results = go(run_ranks, folders[model], out, save_after=SAVED, **layout)
            made[key] = results, str(out / "checkpoints" / f"step_{SAVED}"), out / "hf"
        return made[key]

    return run


def go(run_ranks, model, out, *, save_after=0, resume_from=None, **settings):
    values = SETTINGS | settings | {"output_dir": str(out)} | ({"resume": resume_from} if resume_from else {})
    arguments = {"model_dir": str(model), "groups": scored_groups(), "steps": STEPS, "folder": str(out / "hf")}
    return run_ranks(2, run_cases.learn, settings=values, save_after=save_after, resume_from=resume_from, **arguments)


def tensors_of(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def adapters_of(folder):
    return {name.removeprefix(PREFIX): value for name, value in tensors_of(folder / ADAPTER).items()}


def assert_same(found, truth):
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=4e-7, msg=name)


CHANGES = [
    ("qwen2", TENSOR, PIPELINE),
    ("qwen2", TENSOR, DATA),
    ("qwen2", DATA, TENSOR),
    ("qwen2", PIPELINE, {"zero_stage": 0}),
    ("llama, tied", PIPELINE, CONTEXT),
    ("qwen3-moe", EXPERTS, DATA),
    ("qwen3-moe", DATA, TENSOR | EXPERTS),
]


@pytest.mark.parametrize(("model", "before", "after"), CHANGES, ids=[f"{m}: {a} to {b}" for m, a, b in CHANGES])
def test_adapters_go_on_in_any_layout(run_ranks, folders, learned, tmp_path, model, before, after):
    """Masters and moments that are lost, or land in another matrix, make another policy of the last two steps."""
    whole, checkpoint, export = learned(model, **before)
    rest = go(run_ranks, folders[model], tmp_path, resume_from=checkpoint, **after)
    for name in ("loss/policy_avg", "objective/kl2_avg", "grad_norm"):
        assert rest[0][name] == pytest.approx(whole[0][name], rel=1e-5, abs=1e-7), name
    assert rest[0]["state"]["adam"] == [4.0 * SAVED]  # 2 epochs x 2 mini-batches a step
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(export))
    assert_same(adapters_of(tmp_path / "hf"), adapters_of(export))


def test_the_same_layout_goes_on_exactly(run_ranks, folders, learned, tmp_path):
    """A master that was rounded, or a step count that is off by one, shows only here."""
    whole, checkpoint, export = learned("qwen2", **TENSOR)
    assert go(run_ranks, folders["qwen2"], tmp_path, resume_from=checkpoint, **TENSOR) == whole
    for name, value in tensors_of(export).items():
        assert torch.equal(tensors_of(tmp_path / "hf")[name], value), name


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [("qwen2", TENSOR, PIPELINE), ("llama, tied", PIPELINE, CONTEXT), ("qwen3-moe", EXPERTS, TENSOR)],
    ids=str,
)
def test_another_layout_has_the_same_state_bit_for_bit(run_ranks, folders, learned, tmp_path, model, before, after):
    """Two layouts round differently in the steps after it, which hides a state that was only nearly taken over."""
    _, path, _ = learned(model, **before)
    values = SETTINGS | after | {"output_dir": str(tmp_path), "resume": path}
    arguments = {"model_dir": str(folders[model]), "groups": scored_groups(), "resume_from": path}
    run_ranks(2, run_cases.save_again, settings=values, **arguments)
    own, truth = open_checkpoint(str(tmp_path / "checkpoints" / f"step_{SAVED}")), open_checkpoint(path)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert own.names(kind) and set(own.names(kind)) == set(truth.names(kind))
        for name in truth.names(kind):
            whole = Box(name, (0, 0), truth.shape(kind, name))
            assert torch.equal(own.read(kind, whole), truth.read(kind, whole)), (kind, name)


def test_a_state_holds_adapters_and_not_the_model(learned, folders):
    """It is a thousandth of a full state, and says which model it belongs to."""
    _, path, _ = learned("qwen2", **TENSOR)
    checkpoint = open_checkpoint(path)
    expected = adapter_tensors(shape_of(read_hf_config(folders["qwen2"])), LORA)
    assert set(checkpoint.kinds) == {"exp_avg", "exp_avg_sq", "master", "random", "rollouts"}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert {name: checkpoint.shape(kind, name) for name in checkpoint.names(kind)} == expected
    record = checkpoint.state["learner"]["adapters"]
    assert record["settings"]["lora_r"] == 3 and len(record["base"]) == 64


@pytest.mark.parametrize(
    ("model", "settings"),
    [("qwen2", TENSOR), ("qwen2", PIPELINE), ("qwen3-moe", EXPERTS), ("qwen2", DATA | ATTENTION)],
    ids=str,
)
def test_an_export_is_the_merged_model_beside_its_adapter(learned, folders, model, settings):
    """What engines had, what evaluations measured and what peft loads must be one policy."""
    _, _, export = learned(model, **settings)
    shape = shape_of(read_hf_config(folders[model]))
    lora = LoraShape(rank=3, alpha=6, targets=tuple(settings.get("lora_target_modules", ())))
    base, merged, adapters = tensors_of(folders[model]), tensors_of(export), adapters_of(export)
    assert list(peft_problems(export / ADAPTER, shape, lora)) == []
    assert json.loads((export / ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folders[model]
    )
    moved = 0
    for name in hf_tensors(shape):
        if not lora.adapts(name):
            assert torch.equal(merged[name], base[name]), name
            continue
        delta = lora.scale * adapters[lora_b(name)] @ adapters[lora_a(name)]
        torch.testing.assert_close(merged[name], base[name] + delta, rtol=1e-5, atol=1e-6, msg=name)
        moved += delta.abs().max() > 1e-3
    assert moved >= 4


def test_a_run_starts_from_an_exported_adapter(run_ranks, folders, learned, tmp_path):
    """Read box by box on another layout, it is the policy that was exported; the reference is the model without it."""
    _, _, export = learned("qwen2", **TENSOR)
    arguments = {"model_dir": str(folders["qwen2"]), "folder": str(tmp_path / "hf")}
    settings = {"use_peft": True, "lora_adapter_path": str(export / ADAPTER), "output_dir": str(tmp_path)} | PIPELINE
    run_ranks(2, run_cases.export_at_once, settings=settings, **arguments)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(export))
    for name, value in adapters_of(export).items():
        assert torch.equal(adapters_of(tmp_path / "hf")[name], value), name
