"""An engine's actor inside a placement group of a real Ray cluster that counts GPUs, and what vLLM makes of it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mgrpo.config import from_values
from mgrpo.rollout.start import started_fleet
from mgrpo.rollout.vllm import actor, cluster


@pytest.mark.slow
def test_several_workers_on_gpus_run_without_rays_executor(monkeypatch, tmp_path):
    """Ray's executor refuses a bundle of more than one GPU, so no engine with two workers would start."""

    class Probe:
        async def start(self, args):
            from vllm.config import ParallelConfig

            names = ("tensor_parallel_size", "distributed_executor_backend")
            return ParallelConfig(**{name: args[name] for name in names if name in args}).distributed_executor_backend

    monkeypatch.setattr(cluster, "serving_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(actor, "EngineActor", Probe)
    values = {"model_name_or_path": "m", "output_dir": str(tmp_path), "vllm_tensor_parallel_size": 2}
    with started_fleet(from_values(values), num_local_learners=0) as fleet:
        assert fleet.engines[0].ready.result(120) == "mp"
        assert fleet.seeds_prompts


SPANNING = """
import json, os, socket
from mgrpo.config import from_values
from mgrpo.rollout.start import RayNode, started_fleet
from mgrpo.rollout.vllm import actor, cluster

class Probe:
    async def start(self, args):
        from ray.util import get_current_placement_group, placement_group_table

        group = get_current_placement_group()
        nodes = placement_group_table(group)["bundles_to_node_id"].values()
        return group.bundle_specs, len(set(nodes)), args["distributed_executor_backend"]

with socket.create_server(("", 0)) as probe:
    head = f"127.0.0.2:{probe.getsockname()[1] % 8000 + 21000}"
ray = []
try:
    for number in (2, 3):
        address, token = f"127.0.0.{number}", "5" * 64
        part = RayNode(address=address, head=head, is_head=number == 2, gpus=["0"], num_cpus=1, token=token)
        ray.append(part)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    actor.EngineActor, cluster.serving_gpus = Probe, lambda: ["0"]
    config = from_values({"model_name_or_path": "m", "ray_address": head, "vllm_tensor_parallel_size": 2})
    with started_fleet(config, num_local_learners=0) as fleet:
        print(json.dumps(fleet.engines[0].ready.result(60)))
finally:
    for part in ray:
        part.close()
"""


@pytest.mark.slow
def test_an_engine_with_more_workers_than_a_node_has_gpus_spans_nodes():
    """vLLM's Ray executor takes the actor's group, with one GPU a bundle, and starts a worker in each."""
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SPANNING], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    bundles, num_nodes, backend = json.loads(done.stdout.splitlines()[-1])
    assert [bundle["GPU"] for bundle in bundles] == [1, 1] and num_nodes == 2 and backend == "ray"
