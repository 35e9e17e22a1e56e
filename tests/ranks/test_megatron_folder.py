"""Megatron folders against Megatron: what is stored is what its ranks hold, and what they load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgrpo.layout import Layout
from mgrpo.model_io.convert import hf_to_megatron
from mgrpo.model_io.megatron_folder import stem
from mgrpo.model_io.model_reader import model_reader
from tests.ranks import cases
from tests.tiny_models import save_tiny


def files(folder: str, *, only: str = "", **place: int) -> dict[str, torch.Tensor]:
    """The parameters in the files of a place, those whose name says `only`."""
    paths = Path(folder).glob(f"{stem(**place)}-*.safetensors")
    return {name: tensor for path in paths for name, tensor in load_file(path).items() if only in name}


def differences(model_dir: str, folder: str, layout: dict) -> dict[str, list[str]]:
    """On this rank: parameters that a Megatron folder would load differently, and those it does not hold as they are."""
    policy = cases.make_policy(model_dir, layout)
    live = {name: parameter.detach().clone() for name, parameter in policy.parameters.live.items()}
    shared_out = {}
    if policy.layout.expert > 1:
        place = {"tensor": 0, "pipeline": policy.coordinate.pipeline, "expert": policy.coordinate.expert}
        shared_out = files(folder, only=".experts.", **place)
    stored = {
        **files(folder, tensor=policy.coordinate.tensor, pipeline=policy.coordinate.pipeline, expert=0),
        **shared_out,
    }
    for parameter in policy.parameters.live.values():
        parameter.data.fill_(torch.nan)
    policy.load(model_reader(folder, policy.shape))
    return {
        "loaded": [name for name, p in policy.parameters.live.items() if not torch.equal(p, live[name])],
        "stored": [name for name, p in live.items() if name not in stored or not torch.equal(stored[name], p)],
        "count": len(live),
    }


CASES = {
    "tp2": ("qwen2", {"tensor": 2}, {"tensor": 4, "pipeline": 2}),
    "tp2 tied": ("llama", {"tensor": 2}, {}),
    "pp2": ("gemma2", {"pipeline": 2}, {"tensor": 2}),
    "pp2 interleaved": ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}, {"pipeline": 4}),
    "pp2 interleaved, uneven": (
        "qwen3_moe",
        {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 3},
        {"pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 3},
    ),
    "tp2 ep2": ("qwen3_moe", {"tensor": 2, "expert": 2}, {"expert": 4}),
    "ep2": ("mixtral", {"expert": 2}, {"tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_folders_hold_what_megatron_holds(run_ranks, tmp_path, case):
    """A folder of the run's own layout is its ranks' memory; one of another layout loads the same bits."""
    family, own, other = CASES[case]
    layers = 6 if "uneven" in case else 4
    source = save_tiny(tmp_path, family, tied="tied" in case or "gemma" in family, layers=layers)
    for number, sizes in enumerate((own, other)):
        ranks = 1
        for axis in ("tensor", "pipeline"):
            ranks *= sizes.get(axis, 1)
        folder = tmp_path / str(number)
        hf_to_megatron(source, folder, Layout(world_size=max(ranks, sizes.get("expert", 1)), **sizes))
        for found in run_ranks(2, differences, model_dir=str(source), folder=str(folder), layout=own):
            assert not found["loaded"] and found["count"] > 10
            assert not found["stored"] or sizes is other
