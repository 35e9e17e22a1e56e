"""The model section: what is trained, and in which type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import OPEN_INSTRUCT, TRL, Needs, Rule
from mgrpo.models.hf_config import is_hub_name, no_model

SHORT = Needs(
    "a model_dtype of 16 bits: in a float32 model the head is in float32",
    lambda model_dtype: model_dtype != "float32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    model_name_or_path: Annotated[str | None, OPEN_INSTRUCT] = None
    """Name of a model on the Hugging Face Hub, OWNER/NAME, which is downloaded into the cache (docs/hub.md); the folder of a
    checkpoint (config.json, safetensors, tokenizer files); or the output of mgrpo convert."""
    model_dtype: Annotated[Literal["bfloat16", "float16", "float32"], OPEN_INSTRUCT] = "bfloat16"
    """Type of weights and activations in training and in the engines; the optimizer always keeps float32. In float16 trainer and
    engine differ less than in bfloat16, numbers above 65504 overflow, and the loss is scaled (policy/loss_scale)."""
    cast_lm_head_to_fp32: Annotated[bool, TRL, SHORT] = False
    """Compute logits in float32, in training and in the engines, from a head and its input in model_dtype: nearly removes the
    head's share of their mismatch, and takes twice the memory for logits."""


def _model_path(model_name_or_path: str | None) -> Iterator[str]:
    name = model_name_or_path
    if not name:
        yield "model_name_or_path is not set; give the folder of a Hugging Face checkpoint, or a name on the Hub"
    elif not os.path.isfile(os.path.join(name, "config.json")) and (os.path.isdir(name) or not is_hub_name(name)):
        # What a plan is made for need not be here.
        yield f"model_name_or_path={no_model(name)}"


RULES: tuple[Rule, ...] = (_model_path,)
