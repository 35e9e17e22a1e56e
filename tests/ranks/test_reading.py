"""Ranks that hold the same weights read the files of the model once together, and hold what each of them would have read alone."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import hf_tensors
from tests.ranks import cases
from tests.tiny_models import save_tiny

LAYOUTS = {
    "dp2": (2, "llama", {}),
    "dp2 zero3": (2, "qwen2", {"zero_stage": 3}),
    "cp2": (2, "qwen3", {"context": 2}),
    "dp2 experts": (2, "qwen3_moe", {}),
    "dp4 shards of 2": (4, "qwen2", {"zero_stage": 3, "shard_size": 2}),
    "tp2 dp2 ep2": (4, "qwen3_moe", {"tensor": 2, "expert": 2, "sequence_parallel": True}),
    "pp2 dp2 ep2 tied": (4, "qwen3_moe", {"pipeline": 2, "expert": 2}),
    "ep2 edp2 zero3": (4, "mixtral", {"expert": 2, "zero_stage": 3}),
    "latent dp2 ep2": (2, "deepseek_v3", {"expert": 2}),
    "delta dp2": (2, "qwen3_next", {}),
}


def read_together(model_dir: str, layout: dict) -> dict:
    """On this rank: what it has read, which of its parameters differ from its own reading of all, and the same of float32 copies."""
    from mgrpo.policy.untrained_policy import UntrainedPolicy
    from mgrpo.policy.weights import hf_reader

    policy = cases.make_policy(model_dir, layout, dtype=torch.bfloat16)
    read, counted = hf_reader(model_dir, policy.shape), Counter()

    def counting(box):
        values = read(box)
        counted[box.name] += values.numel()
        return values

    def differing(live) -> list[str]:
        found = []
        for name, place in policy.parameters.places.items():
            alone = torch.zeros(place.shape, dtype=live[name].dtype)
            for piece in place.pieces:
                piece.view(alone).copy_(read(piece.box))
            if not torch.equal(live[name].detach(), alone):
                found.append(name)
        return found

    for parameter in policy.parameters.live.values():
        parameter.data.fill_(torch.nan)
    policy.load(counting)
    own = partial(UntrainedPolicy, policy.shape, policy.layout, dtype=torch.bfloat16, seed=1, temperature=1.0)
    reference, before = own(), counted.copy()
    reference.load_masters(counting)
    place = policy.coordinate
    return {
        "counted": before,
        "again": counted - before,
        "differing": differing(policy.parameters.live),
        "following": differing(reference._masters) + differing(reference.parameters.live),
        "place": (place.tensor, place.pipeline),
        "rank": dist.get_rank(),
    }


@pytest.mark.parametrize("case", LAYOUTS)
def test_replicas_read_the_model_once_together(run_ranks, tmp_path, case):
    """A model of 65 GB that each of 256 replicas reads by itself is 17 TB, and an hour of a storage that gives 5 GB a second."""
    ranks, family, layout = LAYOUTS[case]
    model_dir = save_tiny(tmp_path, family, tied="tied" in case)
    found = run_ranks(ranks, read_together, model_dir=str(model_dir), layout=layout)
    assert not any(rank["differing"] + rank["following"] for rank in found), found
    assert all(rank["counted"] == rank["again"] for rank in found)
    sizes = {name: torch.Size(shape).numel() for name, shape in hf_tensors(shape_of(read_hf_config(model_dir))).items()}
    whole = sum((rank["counted"] for rank in found), Counter())
    # Tensor ranks hold copies of norms and routers, and the last stage one of a tied embedding.
    copies = layout.get("tensor", 1)
    for name, size in sizes.items():
        most = 2 if "tied" in case and "embed_tokens" in name else copies
        assert size <= whole[name] <= most * size, (name, whole[name], size)
    dense = [name for name, size in sizes.items() if "norm" not in name and "gate.weight" not in name]
    if "tied" not in case:
        assert all(whole[name] == sizes[name] for name in dense)
    # Each of them reads a share.
    assert max(rank["counted"].total() for rank in found) < 0.75 * sum(sizes.values())
