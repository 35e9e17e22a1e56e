"""Folders of adapters: what is written is read back box by box, and peft itself takes and gives the same policy."""

from __future__ import annotations

import pytest
import torch

from mgrpo.model_io.peft_folder import peft_reader, write_peft
from mgrpo.models.adapters import LoraShape, adapter_tensors, lora_a, lora_b
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from tests.tiny_models import VOCAB, load_hf, save_tiny

LORA = LoraShape(rank=3, alpha=12)


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "gemma2"])
def model_dir(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models"), request.param, layers=2)


def random_adapters(shape, lora):
    torch.manual_seed(4)
    return {name: 0.1 * torch.randn(size) for name, size in adapter_tensors(shape, lora).items()}


def merged_logprobs(model_dir, adapters, lora, tokens):
    model = load_hf(model_dir)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.adapts(name):
                parameter += lora.scale * adapters[lora_b(name)] @ adapters[lora_a(name)]
        return model(tokens).logits.log_softmax(-1)


def test_boxes_are_read_as_they_were_written(model_dir, tmp_path):
    """A rank reads its own columns of A and rows of B."""
    shape = shape_of(read_hf_config(model_dir))
    adapters = random_adapters(shape, LORA)
    write_peft(tmp_path, lambda name: [adapters[name]], shape, LORA, base=str(model_dir))
    read = peft_reader(tmp_path, shape, LORA)
    for name, whole in adapters.items():
        rows, columns = whole.shape
        assert torch.equal(read(Box(name, (0, 0), (rows, columns))), whole)
        part = Box(name, (rows // 2, columns // 3), (rows - rows // 2, columns - columns // 3))
        assert torch.equal(read(part), whole[rows // 2 :, columns // 3 :])
    with pytest.raises(ValueError, match="has lora_r=3, but 4 is asked for"):
        peft_reader(tmp_path, shape, LoraShape(rank=4, alpha=12))


@pytest.mark.parametrize("lora", [LORA, LoraShape(rank=4, alpha=8, use_rslora=True, targets=("q_proj", "down_proj"))])
def test_peft_computes_the_merged_model(model_dir, tmp_path, lora):
    """The adapter and the merged weights of an export are one policy."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    shape = shape_of(read_hf_config(model_dir))
    adapters, tokens = random_adapters(shape, lora), torch.arange(3, 43).view(2, 20) % VOCAB
    write_peft(tmp_path / "adapter", lambda name: [adapters[name]], shape, lora, base=str(model_dir))
    loaded = peft.PeftModel.from_pretrained(load_hf(model_dir), tmp_path / "adapter").eval()
    with torch.no_grad():
        found = loaded(tokens).logits.log_softmax(-1)
    truth = merged_logprobs(model_dir, adapters, lora, tokens)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)
    assert (truth - load_hf(model_dir)(tokens).logits.log_softmax(-1)).abs().max() > 1e-2


def test_what_peft_saves_is_read(model_dir, tmp_path):
    """An adapter of a supervised run with peft is where many runs begin."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    shape, lora = shape_of(read_hf_config(model_dir)), LoraShape(rank=3, alpha=12, targets=("q_proj", "up_proj"))
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(5)
    model = peft.get_peft_model(load_hf(model_dir), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    read, tokens = peft_reader(tmp_path, shape, lora), torch.arange(3, 23)[None]
    adapters = {name: read(Box(name, (0, 0), size)) for name, size in adapter_tensors(shape, lora).items()}
    with torch.no_grad():
        found = model.eval()(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found, merged_logprobs(model_dir, adapters, lora, tokens), rtol=0, atol=1e-5)
