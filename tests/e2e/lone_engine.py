"""An engine without learners, which has the weights that it loads by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mgrpo.moving import from_values
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.vllm.cluster import Cluster


@contextmanager
def lone_engine(values: Mapping[str, Any]) -> Iterator[Fleet]:
    """The fleet of it, ready; settings as in a file."""
    cluster = Cluster(from_values(values), num_local_learners=0)
    try:
        fleet = Fleet(Roster(cluster.engines, cluster.settings, keep_logs=cluster.keep_logs), seed=1)
        fleet.wait_ready()
        yield fleet
    finally:
        cluster.close()
