"""What peft's folders say, and what of them is refused."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from mgrpo.models.adapters import LoraShape
from mgrpo.models.family import shape_of
from mgrpo.models.peft import CONFIG, PREFIX, WEIGHTS, peft_problems, stored_lora, target_names
from tests.peft_folders import save_adapter
from tests.unit.models.test_table import MODELS

LORA = LoraShape(rank=3, alpha=6)
DENSE = shape_of(
    {
        "model_type": "llama",
        "num_attention_heads": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_hidden_layers": 2,
    }
)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def folder(tmp_path):
    return save_adapter(tmp_path / "adapter", DENSE, LORA)


def test_a_folder_says_what_it_was_written_from(tmp_path):
    """Rank, alpha and targets decide what the tensors mean."""
    for number, lora in enumerate((LORA, LoraShape(rank=1, alpha=8, use_rslora=True, targets=("down_proj", "k_proj")))):
        folder = save_adapter(tmp_path / str(number), DENSE, lora)
        stored = stored_lora(folder)
        assert (stored.rank, stored.alpha, stored.use_rslora) == (lora.rank, lora.alpha, lora.use_rslora)
        assert set(stored.targets) == set(lora.targets or ALL)
        assert list(peft_problems(folder, DENSE, lora)) == []


def test_targets_are_the_models_own_matrices():
    """Names of another family would be adapters of nothing."""
    assert target_names(DENSE) == ALL
    assert set(target_names(shape_of(MODELS["mixtral"]))) == {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3', expected 'LORA'"),
        ({"r": 0}, "has r=0; expected a whole number above 0"),
        ({"lora_alpha": 1.5}, "has lora_alpha=1.5; expected a whole number above 0"),
        ({"r": 4}, "has lora_r=4, but 3 is asked for; leave lora_r out"),
        ({"lora_alpha": 12}, "has lora_alpha=12, but 6 is asked for"),
        ({"use_rslora": True}, "has use_rslora=true, but false is asked for"),
        ({"use_dora": True}, "has use_dora=true: DoRA's magnitudes are neither"),
        ({"bias": "all"}, "has bias='all': biases are not trained"),
        ({"modules_to_save": ["lm_head"]}, 'has modules_to_save=["lm_head"]: whole modules'),
        ({"fan_in_fan_out": True}, "has fan_in_fan_out=true: matrices are stored"),
        ({"lora_alpha": float("inf")}, "has lora_alpha=inf; expected a whole number above 0"),
        ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens=[1]: adapters are on for every token"),
        ({"use_qalora": True}, "has use_qalora=true: A is of the whole input"),
        ({"rank_pattern": {"q_proj": 8}}, 'has rank_pattern={"q_proj": 8}: all adapters have one rank'),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', which changed the model's own weights"),
        ({"init_lora_weights": "olora"}, "has init_lora_weights='olora', which changed the model's own weights"),
    ],
)
def test_each_difference_is_one_sentence(tmp_path, changed, words):
    """An adapter that is read as another one trains on without an error."""
    folder = save_adapter(tmp_path / "adapter", DENSE, LORA, **changed)
    (problem,) = peft_problems(folder, DENSE, LORA)
    assert problem.startswith(f"{folder} {words}")


def edit(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_missing_and_foreign_tensors_are_named(folder):
    """A layer whose adapter is not in the file would start from zero."""
    gone = "model.layers.1.mlp.up_proj.lora_A.weight"
    edit(folder, lambda tensors: tensors.pop(PREFIX + gone))
    assert [str(folder) in line and gone in line for line in peft_problems(folder, DENSE, LORA)] == [True]
    edit(folder, lambda tensors: tensors.update({PREFIX + gone: next(iter(tensors.values())).new_zeros(3, 7)}))
    (problem,) = peft_problems(folder, DENSE, LORA)
    assert f"{gone} has shape [3, 7], this model needs [3, 32]; is it an adapter of another model?" in problem
    one = next(iter(load_file(folder / WEIGHTS).values()))
    edit(folder, lambda tensors: tensors.update({PREFIX + gone: one.new_zeros(3, 32)}))
    edit(folder, lambda tensors: tensors.update({PREFIX + "model.layers.2.mlp.up_proj.lora_A.weight": one.clone()}))
    (problem,) = peft_problems(folder, DENSE, LORA)
    assert "holds model.layers.2.mlp.up_proj.lora_A.weight, which belongs to no adapter of this model" in problem


def test_other_targets_are_compared_by_name(tmp_path):
    """Names say at once what a list of missing tensors hides."""
    folder = save_adapter(tmp_path / "adapter", DENSE, LoraShape(rank=3, alpha=6, targets=("q_proj", "v_proj")))
    (problem,) = peft_problems(folder, DENSE, LORA)
    assert f"has lora_target_modules=q_proj v_proj, but {' '.join(ALL)} is asked for" in problem


def test_what_cannot_be_read_is_said(folder):
    """Folders come from other machines and other programs."""
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "has no adapter_model.safetensors; only safetensors are read" in next(peft_problems(folder, DENSE, LORA))
    for text, words in (("[]", "holds list; expected an object"), ("{", "cannot be read")):
        (folder / CONFIG).write_text(text)
        assert words in next(peft_problems(folder, DENSE, LORA))
    (folder / CONFIG).unlink()
    assert "has no adapter_config.json; give the folder of an adapter" in next(peft_problems(folder, DENSE, LORA))


def test_files_of_peft_itself_are_understood(folder):
    """peft writes more fields than we do, and null for what is off."""
    config = json.loads((folder / CONFIG).read_text())
    more = {
        "alpha_pattern": {},
        "rank_pattern": {},
        "layers_to_transform": None,
        "eva_config": None,
        "lora_bias": False,
    }
    (folder / CONFIG).write_text(json.dumps(config | more | {"target_modules": "all-linear"}))
    assert list(peft_problems(folder, DENSE, LORA)) == []
