"""Every public model whose sizes are shipped: the rule table against transformers, and the figures that its makers published."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mgrpo.models.family import shape_of
from mgrpo.models.memory import num_weights
from mgrpo.models.table import hf_tensors
from mgrpo.planner.plan_command import shipped_configs
from mgrpo.planner.work import active_weights

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Families that transformers has under another name."""
EXPERT = re.compile(r"\.experts\.(\d+\.)?\w+")
PUBLISHED = {
    "qwen3-235b-a22b": (235e9, 22e9),  # arXiv:2505.09388
    "glm-4.5": (355e9, 32e9),  # 2508.06471
    "glm-4.5-air": (106e9, 12e9),
    "deepseek-v3": (671e9, 37e9),  # 2412.19437
    "moonlight-16b-a3b": (15.96e9, 2.24e9),  # 2502.16982
    "kimi-k2": (1.026e12, 32e9),  # 2507.20534
    # The model card, 2508.10925, counts the LM head.
    "gpt-oss-20b": (20.91e9, 3.61e9 - 201_088 * 2880),
    "gpt-oss-120b": (116.83e9, 5.13e9 - 201_088 * 2880),
    # By their names, which count both ends.
    "qwen3.5-122b-a10b": (122e9, 10e9 - 2 * 248_320 * 3072),
    "qwen3.5-397b-a17b": (397e9, 17e9 - 2 * 248_320 * 4096),
}
"""All weights, and those of the layers that a token meets, which makers give in two or three digits."""


def of_transformers(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of what transformers saves of this model, built on the meta device."""
    name = SAME_AS.get(hf["model_type"], hf["model_type"])
    config = CONFIG_MAPPING[name].from_dict(hf | {"model_type": name})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if hf["tie_word_embeddings"] else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def without_experts(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in tensors.items() if not EXPERT.search(name)}


@pytest.mark.parametrize("name", shipped_configs())
def test_a_published_model_has_as_many_weights_as_in_transformers(name: str) -> None:
    """A plan, a checkpoint and a sync of another model than the published one: counted tensor by tensor, experts together.

    Transformers keeps the experts of a layer in one tensor, which its files do not always do.
    """
    hf = shipped_configs()[name]
    ours, theirs = hf_tensors(shape_of(hf)), of_transformers(hf)
    assert without_experts(ours) == without_experts(theirs)
    assert sum(map(math.prod, ours.values())) == sum(map(math.prod, theirs.values()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_weights_of_its_name(name: str) -> None:
    """A plan counts operations by active weights: a shared expert or the first layers counted wrong would be a tenth of them."""
    shape = shape_of(shipped_configs()[name])
    weights, active = PUBLISHED[name]
    assert num_weights(shape) == pytest.approx(weights, rel=0.01)
    assert sum(active_weights(shape)) == pytest.approx(active, rel=0.06)
