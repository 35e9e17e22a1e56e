"""Tensors and files of a checkpoint beyond those of its model: reasons to refuse it, and remedies.

Training, evaluation and conversion accept and refuse the same folders through `weight_files`, which calls this. By names alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from mgrpo.models.shape import ModelShape

HEAD = "lm_head.weight"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter, which transformers loads on top of the weights."""
QUANTISED = "hf_quant_config.json"
"""A file by which vLLM takes weights for quantised."""


def some(names: Iterable[str]) -> str:
    """Names of tensors in a message: the only one, or the first of them."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{len(names)} tensors ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"


def name_problems(
    folder: str | Path, missing: Collection[str], extra: Collection[str], shape: ModelShape
) -> Iterator[str]:
    """A sentence where names of tensors are not those of the model.

    Args:
        missing: the model's names that are not there.
        extra: names that the model does not have, except those that are left out.
    """
    missing, extra = sorted(missing), sorted(extra)
    cures = "; ".join(_cures(missing, extra, shape))
    if missing and extra:
        yield (
            f"{folder} lacks {some(missing)}, which its config.json implies, but holds {some(extra)}, which it does not imply"
            f"{cures and ': '}{cures}"
        )
    elif missing:
        yield f"{folder} lacks {some(missing)}, which its config.json implies{cures and ': '}{cures}"
    elif extra:
        yield (
            f"{folder} holds {some(extra)}, which a {shape.family} model with this config.json does not have: "
            f"{cures or 'correct config.json, or take it out of the folder'}"
        )


def beside_problems(folder: Path) -> Iterator[str]:
    """Reasons why files beside the weights make another model of them."""
    if all((folder / name).is_file() for name in ADAPTER):
        yield (
            f"{folder} holds an adapter, {ADAPTER[1]}, beside the weights of a model; merge it into them, or move it to a folder of its "
            "own and give that as lora_adapter_path"
        )
    if (folder / QUANTISED).is_file():
        yield f"{folder} holds {QUANTISED}, by which vLLM takes the weights for quantised; export them unquantised"


def _cures(missing: list[str], extra: list[str], shape: ModelShape) -> Iterator[str]:
    """Remedies for mistakes that the names reveal."""
    if any(mark in name for name in extra for mark in (".lora_", ".modules_to_save.")):
        yield "merge the adapter into the weights"
    if missing == [HEAD]:
        yield "set tie_word_embeddings to true in config.json if the model's embedding is its head"
    if HEAD in extra and shape.tied:
        yield (
            f"{HEAD} differs from the embedding, to which tie_word_embeddings=true ties it; set tie_word_embeddings to false in "
            f"config.json if the model has a head of its own, or take {HEAD} out of the folder"
        )
    numbered = re.compile(re.escape(shape.prefix) + r"layers\.(\d+)\.")
    layers = {int(at[1]) for name in extra if (at := numbered.match(name))}
    if any(name.endswith(".eh_proj.weight") for name in extra):
        yield "layers that draft are among them; set num_nextn_predict_layers to their number"
    elif layers and max(layers) >= shape.num_layers:
        yield f"there are {max(layers) + 1} layers, config.json has num_hidden_layers={shape.num_layers}; correct it"
    if missing and any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in extra):
        yield (
            "all experts of a layer are in one tensor; load the model with transformers and write it with save_pretrained, which gives "
            "each expert tensors of its own"
        )
    elif part := _inserted(missing, extra):
        yield f"names have {part!r} in them; write them without it"
    elif part := _inserted(extra, missing):
        yield f"names lack {part!r}; write them with it"


def _inserted(names: list[str], longer: list[str]) -> str:
    """The part, like "module.", without which `longer` has every one of `names`; empty if there is none."""
    first = names[0].split(".") if names else []
    for words in (name.split(".") for name in longer):
        more = len(words) - len(first)
        for place in range(len(first) + 1 if first and more > 0 else 0):
            part = ".".join(words[place : place + more]) + "."
            if words[:place] + words[place + more :] == first and {*names} <= {_without(name, part) for name in longer}:
                return part
    return ""


def _without(name: str, part: str) -> str:
    return f".{name}".replace(f".{part}", ".")[1:]
