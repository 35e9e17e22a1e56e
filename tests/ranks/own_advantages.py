"""A user's advantages on the ranks of a distributed test, beside the named ones that they repeat."""

from __future__ import annotations

from typing import Any

from mgrpo.layout import Layout
from mgrpo.types import ScoredGroup


def packs(layout: dict[str, Any], estimators: list[str], groups: list[ScoredGroup], pack_length: int) -> list[Any]:
    """For each estimator what this rank is given of a step: the index of all packs, and the bytes of its slice."""
    import torch.distributed as dist

    from mgrpo.moving import from_values
    from mgrpo.run.ranks.lead import Lead
    from tests.ranks.run_cases import GivenGroups

    lead, found = Lead(), []
    for name in estimators:
        config = from_values(
            {
                "model_name_or_path": "unused",
                "advantage_normalization_type": name,
                "num_mini_batches": 2,
                "pack_length": pack_length,
            }
        )
        own = Layout(world_size=dist.get_world_size(), **layout)
        parts = {"lead": lead, "config": config, "layout": own, "hidden": 64}
        batch = GivenGroups(parts, groups).next(1, 0)
        index = {name: (str(array.dtype), array.tolist()) for name, array in batch.index.items()}
        found.append((index, batch.slice.tobytes()))
    lead.close()
    return found
