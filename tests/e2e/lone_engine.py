"""An engine without learners, which has the weights that it loads by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mgrpo.moving import from_values
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import policy_kind


@contextmanager
def lone_engine(values: Mapping[str, Any]) -> Iterator[Fleet]:
    """The fleet of it, ready; settings as in a file."""
    config = from_values(values)
    cluster = Cluster(config, num_local_learners=0)
    try:
        engines = cluster.start_engines(policy_kind(config, on_gpu=cluster.on_gpu, num_local_learners=0)).engines
        fleet = Fleet(Roster(engines, cluster.settings, keep_logs=cluster.keep_logs), seed=1)
        fleet.wait_ready()
        yield fleet
    finally:
        cluster.close()
