"""Random Hugging Face models of the supported families, small enough for a test and awkward enough to find errors."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB = 125
"""Not a multiple of anything, so that padding of the vocabulary is always at work."""


def save_tiny(
    folder: Path, family: str, *, layers: int = 4, heads: int = 4, kv_heads: int = 2, tied: bool = False
) -> Path:
    """Write a random model to `folder/<family>`; every parameter, norms and biases too, is drawn at random."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "qwen3":
        shape["head_dim"] = 32  # not hidden / heads
    torch.manual_seed(len(family) + layers)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.1)
            if "norm" in parameter_name:
                parameter.add_(1.0)
    target = folder / f"{family}-{layers}-{heads}-{kv_heads}-{tied}"
    model.save_pretrained(target)
    return target


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The oracle: transformers' own model."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
