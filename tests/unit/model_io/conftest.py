"""Models to convert."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
from megatron_cases import CARRIED, change

from mgrpo.model_io.convert import hf_to_megatron
from tests.tiny_models import FAMILIES, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """`model(family)`: a random model's folder with tokenizer files; families alternate in type and in a tied head."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str) -> Path:
        number = list(FAMILIES).index(family)
        kv_heads = 4 if "olmo" in family else 2  # norms over all heads of a token: no copies of key-value heads
        made = save_tiny(folder, family, kv_heads=kv_heads, tied="gemma" in family or number % 3 == 1)
        if number % 2:
            change(made, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
        for name, text in CARRIED.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text)
        return made

    return make


@pytest.fixture
def own_model(model, tmp_path):
    """`own_model(family)`: a copy that the test may spoil."""

    def copy(family: str) -> Path:
        return Path(shutil.copytree(model(family), tmp_path / "own"))

    return copy


@pytest.fixture
def written(model, tmp_path):
    """`written(family)`: the folder of a new checkpoint, whose parent has the files beside the weights."""

    def write(family: str) -> Path:
        hf_to_megatron(model(family), tmp_path / "megatron", None)
        return tmp_path / "megatron" / "release"

    return write
