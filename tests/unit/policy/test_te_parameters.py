"""Layers of Transformer Engine hold what the rule table says, under names of their own.

`te_parameters.json` was recorded by tools/record_te_parameters.py, which builds the product's model with them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgrpo.layout import Layout
from mgrpo.models.family import shape_of
from mgrpo.models.table import local_parameters
from mgrpo.policy.parameters import global_name

RECORDED = json.loads(Path(__file__).with_name("te_parameters.json").read_text())


@pytest.mark.parametrize(
    "rank", RECORDED["ranks"], ids=[f"{rank['model']} {list(rank['layout'].items())}" for rank in RECORDED["ranks"]]
)
def test_every_parameter_is_one_of_the_table(rank):
    """A weight that is not found is neither loaded nor sent to the engines; one of another shape is loaded wrongly."""
    layout = Layout(**rank["layout"])
    shape = shape_of(rank["hf"])
    first_layer = layout.chunk_layers(shape.num_layers, layout.coordinate(rank["rank"]).pipeline, 0).start
    table = local_parameters(shape, layout, rank["rank"])
    found = {}
    for name, size in rank["parameters"].items():
        own = global_name(name, first_layer)
        assert own not in found, f"{name} is the second {own}"
        found[own] = size
    assert found == {name: list(parameter.shape) for name, parameter in table.items()}


def test_norms_are_fused_where_they_come_before_a_product():
    """The record is of Transformer Engine's layers, not of Megatron's own, which would fit as well."""
    fused = {
        rank["model"]: sum("layer_norm_weight" in name for name in rank["parameters"]) for rank in RECORDED["ranks"]
    }
    assert all((count == 0) == model.startswith("olmo") for model, count in fused.items()), fused
