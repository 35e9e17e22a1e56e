"""What TRL's tests fetch from the Hub, made here: tiny random models under the names of TRL's, and the zen data set.

Everything lies in the folder in which the tests run, so that `trl-internal-testing/...` is the path of a folder. Shapes are TRL's
except for what a CPU engine needs (heads of 32 features); vocabularies have about a thousand tokens. Chat templates, texts and custom
model code are those of the checkout.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ORGANISATION = "trl-internal-testing"
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MAMBA = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "ssm_state_size": 16,
    "use_mamba_kernels": False,
}
QWEN = ("<|im_end|>", "<|endoftext|>")
LLAMA = ("<|eot_id|>", "<|finetune_right_pad_id|>")


@dataclass(frozen=True, kw_only=True)
class Model:
    family: str
    """The first part of the name of transformers' classes."""
    template: str
    """Its chat template, a file of the checkout."""
    end_and_pad: tuple[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of its config besides SHAPE."""
    scores: bool = False
    """Whether it is a reward model."""


MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": Model(family="Qwen2", template="qwen2_5", end_and_pad=QWEN),
    "tiny-Qwen3ForCausalLM": Model(family="Qwen3", template="qwen3", end_and_pad=QWEN, settings={"head_dim": 32}),
    "tiny-Qwen3MoeForCausalLM": Model(
        family="Qwen3Moe", template="qwen3", end_and_pad=QWEN, settings=EXPERTS | {"num_experts": 4}
    ),
    "tiny-Gemma2ForCausalLM": Model(
        family="Gemma2", template="gemma", end_and_pad=("<eos>", "<pad>"), settings={"head_dim": 32}
    ),
    "tiny-Cohere2ForCausalLM": Model(
        family="Cohere2", template="cohere2", end_and_pad=("<|END_OF_TURN_TOKEN|>", "<PAD>")
    ),
    "tiny-Glm4MoeForCausalLM": Model(
        family="Glm4Moe",
        template="glm4moe",
        end_and_pad=("<|user|>", "<|endoftext|>"),
        settings=EXPERTS | {"n_routed_experts": 4},
    ),
    "tiny-GptOssForCausalLM": Model(
        family="GptOss",
        template="gptoss",
        end_and_pad=("<|return|>", "<|endoftext|>"),
        settings={"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-NemotronHForCausalLM-nano": Model(
        family="NemotronH",
        template="nemotron_3_nano",
        end_and_pad=QWEN,
        settings=EXPERTS | MAMBA | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32},
    ),
    "tiny-RemoteForCausalLM": Model(family="Llama", template="llama3", end_and_pad=LLAMA),
    "tiny-Qwen2ForSequenceClassification-2.5": Model(family="Qwen2", template="qwen2_5", end_and_pad=QWEN, scores=True),
    "tiny-Qwen3ForSequenceClassification": Model(
        family="Qwen3", template="qwen3", end_and_pad=QWEN, settings={"head_dim": 32}, scores=True
    ),
    "tiny-LlamaForSequenceClassification-3.2": Model(
        family="Llama", template="llama3_2", end_and_pad=LLAMA, scores=True
    ),
}


def make(checkout: Path, folder: Path) -> None:
    """Write data, models and the package `trl` (in site/) to `folder`; what is there already is kept."""
    make_package(checkout / "trl", folder / "site")
    home = folder / ORGANISATION
    if not (home / "zen").exists():
        make_data(checkout / "scripts" / "generate_zen_dataset.py", home / "zen")
    templates = {file.stem: file.read_text() for file in sorted((checkout / "trl" / "chat_templates").glob("*.jinja"))}
    for name, model in MODELS.items():
        if not (home / name / "tokenizer.json").exists():
            tokenizer = make_tokenizer(templates[model.template], model.end_and_pad, list(templates.values()))
            make_model(home / name, model, tokenizer)
            if "Remote" in name:
                own_classes(home / name, checkout / "scripts/generate_tiny_models/for_causal_lm/_remote_code")


def make_package(modules: Path, site: Path) -> None:
    """Write a package `trl` whose trainer and config are this project's; its other modules are those of a checkout."""
    package = site / "trl" / "__init__.py"
    package.parent.mkdir(parents=True, exist_ok=True)
    package.write_text(f"from mgrpo.trl import GRPOConfig, GRPOTrainer\n\n__path__ = [{str(modules)!r}]\n")


def make_data(program: Path, folder: Path) -> None:
    """Write the data set that TRL's program pushes to the Hub."""
    from datasets import DatasetDict

    names = []

    def push_to_hub(splits: DatasetDict, repository: str, *, config_name: str) -> None:
        names.append(config_name)
        (folder / config_name).mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(folder / config_name / f"{split}.parquet")

    with mock.patch.object(DatasetDict, "push_to_hub", push_to_hub):
        runpy.run_path(str(program))["main"](0.1, True, f"{ORGANISATION}/zen")
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in names)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")


def make_tokenizer(template: str, end_and_pad: tuple[str, str], texts: list[str]) -> Any:
    """Byte pairs learned from `texts`, with a chat template and the special tokens that it writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = sorted({*re.findall(r"<\|\w+\|>|<bos>|<\w+_of_turn>", template), *end_and_pad})
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    end, pad = end_and_pad
    bos = {"bos_token": "<bos>"} if "<bos>" in special else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=end, pad_token=pad, **bos)
    tokenizer.chat_template = template
    return tokenizer


def make_model(folder: Path, model: Model, tokenizer: Any) -> None:
    """Write a random model in bfloat16, as TRL's are, and its tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{model.family}Config")(
        **SHAPE | model.settings,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{"num_labels": 1} if model.scores else {},
    )
    kind = "ForSequenceClassification" if model.scores else "ForCausalLM"
    weights = getattr(transformers, model.family + kind)(config)
    if not model.scores:
        never_end(weights.get_input_embeddings().weight, weights.get_output_embeddings().weight, tokenizer.eos_token_id)
    weights.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def never_end(embeddings: Any, head: Any, end: int) -> None:
    """Make the token that ends a completion unlikely: among the 151,936 of TRL's model it is, and one of the tests relies on it.

    One feature becomes the same in all tokens, and the head answers it with a no.

    Args:
        embeddings: `[vocab, hidden]`, changed.
        head: `[vocab, hidden]`, changed.
    """
    import torch

    with torch.no_grad():
        embeddings[:, 0] = 1.0
        head[end, 0] = -2.0


def own_classes(folder: Path, code: Path) -> None:
    """Turn a Llama in `folder` into a model whose classes lie beside it, those of `code`."""
    for source in code.glob("*_remote.py"):
        shutil.copy(source, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    file.write_text(json.dumps(config))
