"""Objects that a script has loaded: as folders before training, and with the trained weights after it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from mgrpo.parallel import backend
from mgrpo.rewards.reward_model import check_reward_model
from mgrpo.trl import loaded
from mgrpo.trl.loaded import as_reward_functions, written
from mgrpo.trl.policy_model import PolicyModel

peft = pytest.importorskip("peft", reason="peft is not installed")

MODEL = Path("examples/quickstart/model")


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")


def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight + 1 for name, weight in weights.items()}


def export(folder: Path, model: torch.nn.Module) -> Path:
    """A trained model, every weight of which is another."""
    model.load_state_dict(changed(model.state_dict()))
    model.save_pretrained(folder)
    return folder


def test_a_loaded_model_is_trained_from_a_folder_and_then_has_the_trained_weights(tmp_path):
    """Scripts go on with the object that they have, as TRL trains it in place."""
    model = load()
    policy = PolicyModel(model)
    settings, problems = policy.settings(tmp_path, has_tokenizer=True)
    assert (settings, problems) == ({"model_name_or_path": str(tmp_path / "model")}, [])
    policy.write(tmp_path, beta=0.1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    assert all(torch.equal(saved.state_dict()[name], weight) for name, weight in before.items())
    policy.take(export(tmp_path / "hf", load()))
    assert policy.load(None) is model
    assert all(torch.equal(model.state_dict()[name], weight + 1) for name, weight in before.items())


def test_the_tokenizer_of_a_loaded_model_is_that_of_its_name(tmp_path):
    """As in TRL, which takes it from where the model came from."""
    model = load()
    settings, problems = PolicyModel(model).settings(tmp_path, has_tokenizer=False)
    assert (settings["tokenizer_name_or_path"], problems) == (str(MODEL), [])
    model.config._name_or_path = ""
    (problem,) = PolicyModel(model).settings(tmp_path, has_tokenizer=False)[1]
    assert problem.endswith("give processing_class")


def test_a_name_becomes_an_object_when_it_is_asked_for(tmp_path):
    """Before training that of the name; afterwards the same object has the trained weights, as has one that is new."""
    policy = PolicyModel(str(MODEL))
    model = policy.load(None)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trained = export(tmp_path / "hf", load())
    policy.take(trained)
    late = PolicyModel(str(MODEL))
    late.take(trained)
    for found in (model, late.load(None)):
        assert all(torch.equal(found.get_parameter(name), weight + 1) for name, weight in before.items())


@pytest.fixture
def adapted():
    torch.manual_seed(0)
    return peft.get_peft_model(load(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def adapter(folder: Path, model: torch.nn.Module) -> Path:
    """An export whose adapters are others."""
    weights = peft.get_peft_model_state_dict(model)
    model.save_pretrained(folder / "adapter", state_dict=changed(weights))
    return folder


def test_a_peft_model_is_its_base_and_its_adapter(tmp_path, adapted, caplog):
    """The base must be the model without adapters, and training goes on with the adapter as it is."""
    policy = PolicyModel(adapted)
    settings, problems = policy.settings(tmp_path, has_tokenizer=True)
    assert not problems and settings["lora_adapter_path"] == str(tmp_path / "adapter")
    assert (settings["use_peft"], settings["lora_r"], settings["lora_target_modules"]) == (
        True, 4, ("down_proj", "q_proj")
    )  # fmt: skip
    policy.write(tmp_path, beta=0.1)
    assert not caplog.text, "an adapter that adds nothing yet is the model without it"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    assert all(torch.equal(base.state_dict()[name], weight) for name, weight in load().state_dict().items())
    before = peft.get_peft_model_state_dict(adapted)
    written_there = peft.utils.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    assert all(torch.equal(written_there[name], weight) for name, weight in before.items())
    before = {name: weight.clone() for name, weight in before.items()}
    policy.take(adapter(tmp_path / "hf", adapted))
    after = peft.get_peft_model_state_dict(policy.load(None))
    assert all(torch.equal(after[name], weight + 1) for name, weight in before.items())
    policy.write(tmp_path, beta=0.1)
    assert "the reference of beta=0.1 is the model without its adapter" in caplog.text


@pytest.mark.parametrize("is_loaded", [False, True])
def test_adapters_of_a_model_without_them_are_an_object_of_peft(tmp_path, adapted, is_loaded):
    """With the names of peft, before and after training."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    policy = PolicyModel(load() if is_loaded else str(MODEL), config)
    policy.write(tmp_path, beta=0.0)
    before = {name: weight.clone() for name, weight in policy.load(None).named_parameters()}
    policy.take(adapter(tmp_path / "hf", adapted))
    for name, weight in before.items():
        same = torch.equal(policy.load(None).get_parameter(name), weight)
        assert same == (".lora_" not in name), name


def test_a_peft_model_has_one_adapter_and_no_config_beside_it(adapted):
    """Which of two was meant is a guess."""
    assert any(
        "beside a PeftModel" in problem
        for problem in PolicyModel(adapted, peft.LoraConfig()).settings(MODEL, has_tokenizer=True)[1]
    )
    named = peft.get_peft_model(load(), peft.LoraConfig(), adapter_name="mine")
    assert any(
        "expected one, default" in problem for problem in PolicyModel(named).settings(MODEL, has_tokenizer=True)[1]
    )


@pytest.fixture
def reward_model():
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1
    )
    return AutoModelForSequenceClassification.from_config(config)


def test_reward_models_are_folders_with_the_tokenizer_that_is_meant(tmp_path, reward_model):
    """The tokenizer decides what the model reads, and where its score is."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    reward_model.config._name_or_path = "owner/judge"
    functions = [len, reward_model, "accuracy_reward"]
    own, folder, name = as_reward_functions(functions, [None, tokenizer, None], tmp_path)
    assert (own, name) == (len, "accuracy_reward") and Path(folder).name == "judge"
    check_reward_model(folder)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(3)
    (again,) = as_reward_functions([folder], [tokenizer], tmp_path / "again")
    assert again != folder
    check_reward_model(again)
    assert (
        AutoTokenizer.from_pretrained(again).pad_token
        == tokenizer.pad_token
        != AutoTokenizer.from_pretrained(folder).pad_token
    )


def test_the_other_ranks_wait_for_what_rank_0_writes(tmp_path, monkeypatch):
    """One that reads before it is written finds the model of an earlier run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    store, order = torch.distributed.HashStore(), []
    monkeypatch.setattr(backend, "meeting_store", lambda **_: store)
    monkeypatch.setattr(loaded, "world_size", lambda: 2)
    monkeypatch.setattr(loaded, "_NUMBERS", iter([7, 7]))
    monkeypatch.setattr(loaded, "rank", lambda: int(threading.current_thread().name == "rank 1"))
    other = threading.Thread(target=lambda: order.append(written(pytest.fail, tmp_path / "model")), name="rank 1")
    other.start()
    written(lambda folder: (order.append("written"), (folder / "new").touch()), tmp_path / "model")
    other.join(10)
    assert order == ["written", str(tmp_path / "model")]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
