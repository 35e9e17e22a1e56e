"""tools/convert_gguf_to_hf.py against transformers: a random model, written as llama.cpp writes it, must come back equal."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

ROOT = Path(__file__).resolve().parents[3]
HEADS, KV_HEADS, LAYERS, HIDDEN = 4, 2, 2, 32
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_gguf_to_hf", ROOT / "tools" / "convert_gguf_to_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vocabulary() -> list[str]:
    """3 control tokens, the 256 bytes, and two merges of which one joins digits."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), "ab", "12"]


def random_model(family: str, *, tied: bool) -> torch.nn.Module:
    """Every parameter random, norms and biases too, so that nothing can be lost or swapped unseen."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, restated: halves of a head become neighbouring rows."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: torch.nn.Module, family: str, *, tied: bool) -> dict[str, np.ndarray]:
    """The model's weights under GGUF's names and in llama.cpp's row order."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if family == "llama" and "q_proj" in name:
            array = permute(array, HEADS)
        if family == "llama" and "k_proj" in name:
            array = permute(array, KV_HEADS)
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            index, part = stem.removeprefix("model.layers.").split(".", 1)
            tensors[f"blk.{index}.{names[part]}.{kind}"] = array
        else:
            tensors[f"{names[stem]}.{kind}"] = array
    return tensors


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, architecture: str, pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL_TOKENS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_converted_model_computes_the_same_logits(
    converter: ModuleType, tmp_path: Path, family: str, tied: bool
) -> None:
    """Rows left in llama.cpp's order, a lost bias or a wrong rope_theta would all train a broken model without a word."""
    import transformers

    original = random_model(family, tied=tied)
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(original, family, tied=tied), architecture=family)
    converter.convert(path, tmp_path / "hf", "float32")

    converted, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(converted.eval()(tokens).logits, original(tokens).logits, rtol=1e-5, atol=1e-5)


def tied_llama() -> dict[str, np.ndarray]:
    return gguf_tensors(random_model("llama", tied=True), "llama", tied=True)


def test_generation_stops_at_the_end_token_of_the_file(converter: ModuleType, tmp_path: Path) -> None:
    """Engines take the stop token from generation_config.json; without it every completion runs to its limit."""
    path = write_gguf(tmp_path / "m.gguf", tied_llama(), architecture="llama")
    converter.convert(path, tmp_path / "hf", "bfloat16")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 2
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], config["rms_norm_eps"], config["tie_word_embeddings"]) == ("bfloat16", 1e-5, True)


@pytest.mark.parametrize(("pre", "digits"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_tokenizer_cuts_texts_as_the_file_says(
    converter: ModuleType, tmp_path: Path, pre: str, digits: list[str]
) -> None:
    """A model sees other ids than it was trained on when digits are merged that its tokenizer keeps apart."""
    import transformers

    converter.convert(write_gguf(tmp_path / "m.gguf", tied_llama(), architecture="llama", pre=pre), tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")

    text = "ab 12\n<|im_end|>"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    assert tokens == ["ab", "\u0120", *digits, "\u010a", "<|im_end|>"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(tokenizer("  a, b").input_ids) == "  a, b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_a_truncated_or_foreign_file_is_named_in_the_error(converter: ModuleType, tmp_path: Path) -> None:
    """The usual accident is a broken download; it must not end in a folder that loads."""
    whole = write_gguf(tmp_path / "m.gguf", tied_llama(), architecture="llama")
    content = whole.read_bytes()
    half = content[: len(content) // 2]
    for name, broken in {"cut": half, "head": content[:100], "foreign": b"<html></html>", "empty": b""}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{name}.gguf is not a complete GGUF file"):
            converter.convert(path, tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(ValueError, match="is not a file"):
        converter.convert(tmp_path / "nowhere.gguf", tmp_path / "out")


def test_what_cannot_be_carried_over_is_refused(converter: ModuleType, tmp_path: Path) -> None:
    """A missing weight would be drawn at random by transformers; scaled RoPE would silently be plain."""
    tensors = tied_llama()
    missing = {name: array for name, array in tensors.items() if name != "blk.1.ffn_up.weight"}
    cases = {
        "lacks 1 weights, the first is model.layers.1.mlp.up_proj.weight": (missing, "llama", "smollm"),
        "scaled RoPE": (tensors | {"rope_freqs.weight": np.ones(4, np.float32)}, "llama", "smollm"),
        "architecture 'gemma' is not supported": (tensors, "gemma", "smollm"),
        "pre-tokenizer 'tekken' is not supported": (tensors, "llama", "tekken"),
    }
    for number, (message, (weights, architecture, pre)) in enumerate(cases.items()):
        path = write_gguf(tmp_path / f"{number}.gguf", weights, architecture=architecture, pre=pre)
        with pytest.raises(ValueError, match=message):
            converter.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_not_installed_is_named(converter: ModuleType) -> None:
    """The message is the only hint at what to install."""
    with pytest.raises(ValueError, match="pip install no-such-package-here"):
        converter.find_in_package("no-such-package-here")
