"""The names and shapes of the rule table against the files that transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from mgrpo.models.family import FAMILIES, shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import hf_tensors
from tests import tiny_models


def test_every_family_has_a_small_model():
    """A family without one is compared with transformers by no test."""
    assert tiny_models.FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_names_exactly_what_transformers_saves(tmp_path, family, tied):
    """A tensor that is called otherwise is not found when loading, and its export is not found by anyone else."""
    folder = tiny_models.save_tiny(tmp_path, family, layers=2, tied=tied)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert hf_tensors(shape_of(read_hf_config(folder))) == saved


def test_the_page_of_models_names_every_family():
    """A family that nobody knows of is used by nobody."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert [family for family in FAMILIES if f"| `{family}` |" not in page] == []
