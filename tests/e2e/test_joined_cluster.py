"""A run that joins a Ray cluster, which another process has started: on which conditions, and where engines then meet it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow

HEAD = """
import ray, sys

info = ray.init(
    address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20,
    _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1], log_to_driver=False, logging_level="ERROR",
)
print(info.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
JOIN = """
import sys
from mgrpo.config import ConfigError
from mgrpo.moving import from_values
from mgrpo.rollout.start import started_fleet
from mgrpo.rollout.vllm import actor, cluster

class Probe:
    process = actor.EngineActor.process

    async def start(self, args, *others, **settings): ...

actor.EngineActor = Probe
cluster.serving_gpus = lambda: ["0", "1"]
config = from_values({"model_name_or_path": "m", "ray_address": sys.argv[1]})
try:
    with started_fleet(config, num_local_learners=int(sys.argv[2]), on_failure=None) as fleet:
        fleet.engines[0].ready.result(60)
        print(fleet.meeting_host)
except ConfigError as err:
    print(err.problems[0])
"""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Of a cluster of one node, which counts two GPUs."""
    folder = tmp_path_factory.mktemp("r")
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        yield head.stdout.readline().strip()
    finally:
        head.stdin.close()
        head.wait(60)


def joined(address: str, *, num_local_learners: int, within: tuple[str, ...] = (), **variables: str) -> str:
    """What a run says that joins the cluster."""
    command = [*within, sys.executable, "-c", JOIN, address, str(num_local_learners)]
    environment = {**os.environ, **ENVIRONMENT, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_engines_meet_the_learners_where_ray_knows_rank_0(address):
    """The loopback address of a node is another node's own."""
    assert joined(address, num_local_learners=0) == "127.0.0.1"


def test_gpus_of_learners_that_the_cluster_counts_as_free_are_refused(address):
    """Ray would start an engine on a GPU that a learner fills, and one of the two runs out of memory."""
    said = joined(address, num_local_learners=1)
    assert "counts 2 GPUs on rank 0's machine, where learners leave 1" in said
    assert f"`ray start --address {address} --num-gpus 0`" in said


def test_a_machine_that_is_no_node_of_the_cluster_is_told_to_join(address):
    """Ray looks for a daemon of its own on this machine for a minute, and then speaks of attributes of nodes."""
    elsewhere = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel refuses namespaces to this user")
    said = joined(address, num_local_learners=1, within=elsewhere, RAY_gcs_server_request_timeout_seconds="20")
    assert "rank 0's machine is not one of its nodes" in said
    assert f"`ray start --address {address} --num-gpus 0`" in said
