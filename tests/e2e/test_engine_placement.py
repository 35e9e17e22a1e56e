"""An engine's actor inside a placement group of a real Ray cluster that counts GPUs, and what vLLM makes of it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.start import started_engines, started_fleet
from mgrpo.rollout.vllm import actor, cluster
from tests.e2e.launching import ROOT, survivors
from tests.ranks.test_two_machines import on_two_machines


@pytest.mark.slow
def test_several_workers_on_gpus_run_without_rays_executor(monkeypatch, tmp_path):
    """Ray's executor refuses a bundle of more than one GPU, so no engine with two workers would start."""

    class Probe:
        process = actor.EngineActor.process

        async def start(self, args, *others, **settings):
            from vllm.config import ParallelConfig

            names = ("tensor_parallel_size", "distributed_executor_backend")
            return ParallelConfig(**{name: args[name] for name in names if name in args}).distributed_executor_backend

    monkeypatch.setattr(cluster, "serving_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(actor, "EngineActor", Probe)
    values = {"model_name_or_path": "m", "output_dir": str(tmp_path), "vllm_tensor_parallel_size": 2}
    with started_fleet(from_values(values), num_local_learners=0, on_failure=None) as fleet:
        assert fleet.engines[0].ready.result(120) == "mp"
        assert fleet.seeds_prompts


@pytest.mark.slow
def test_teachers_share_the_gpu_that_the_policys_engine_leaves(monkeypatch, tmp_path):
    """Ray counts in parts: it must put both on one, and neither beside the policy's engine."""

    class Probe:
        process = actor.EngineActor.process

        async def start(self, args, *others, teacher_temperature=None, **settings):
            return os.environ["CUDA_VISIBLE_DEVICES"], teacher_temperature

        async def ping(self): ...

    monkeypatch.setattr(cluster, "serving_gpus", lambda: ["3", "5"])
    monkeypatch.setattr(actor, "EngineActor", Probe)
    model = str(ROOT / "examples/quickstart/model")
    values = {
        "model_name_or_path": model,
        "output_dir": str(tmp_path),
        "teacher_model_name_or_path": [f"math:{model}", f"code:{model}"],
        "teacher_mode": "engine",
        "teacher_temperature": 2.0,
        "teacher_gpu_memory_utilization": 0.5,
    }
    with started_engines(from_values(values), num_local_learners=0, on_failure=None) as engines:
        fleets = [engines.fleet, *(teacher.fleet for teacher in engines.teachers.teachers)]
        (own, _), *others = [fleet.engines[0].ready.result(120) for fleet in fleets]
        assert {own, others[0][0]} == {"3", "5"} and others == [others[0]] * 2 and others[0][1] == 2.0


def test_ray_has_nothing_to_report_of_engines_that_are_ended(monkeypatch, tmp_path, capfd):
    """Whoever reads that a worker died unexpectedly, at the end of a good run, looks for a fault."""

    class EngineActor:  # the name by which the actor's process is known
        process = actor.EngineActor.process

        async def start(self, *args, **settings): ...

    monkeypatch.setattr(actor, "EngineActor", EngineActor)
    values = {"model_name_or_path": "m", "output_dir": str(tmp_path), "vllm_num_engines": 2}
    with started_fleet(from_values(values), num_local_learners=0, on_failure=None) as fleet:
        import ray

        processes = [psutil.Process(engine.end_process.args[0].result(60)[1]) for engine in fleet.engines]
        shutdown = ray.shutdown

        def late_shutdown() -> None:
            assert survivors(processes, 10) == []
            time.sleep(2)  # Ray prints what it has to say
            shutdown()

        monkeypatch.setattr(ray, "shutdown", late_shutdown)
    said = capfd.readouterr()
    assert "died" not in said.out + said.err


SPANNING = """
import json, os, socket, sys
from mgrpo.moving import from_values
from mgrpo.rollout.start import RayNode, started_fleet
from mgrpo.rollout.vllm import actor, cluster

class Probe:
    process = actor.EngineActor.process

    async def start(self, args, *others, **settings):
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
    config = from_values({"model_name_or_path": "m", "ray_address": head, **json.loads(sys.argv[1])})
    with started_fleet(config, num_local_learners=0, on_failure=None) as fleet:
        print(json.dumps(fleet.engines[0].ready.result(60)))
finally:
    for part in ray:
        part.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cpus", "expected"),
    [
        ({"vllm_tensor_parallel_size": 2}, [1, None], "ray"),
        ({"vllm_data_parallel_size": 2, "vllm_enable_expert_parallel": True}, [1, 1], "uni"),
    ],
)
def test_an_engine_with_more_workers_than_a_node_has_gpus_spans_nodes(settings, cpus, expected):
    """vLLM's Ray executor takes the actor's group, with one GPU a bundle, and starts a worker in each. Copies of attention have an
    actor of ours in each bundle."""
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SPANNING, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bundles, num_nodes, backend = json.loads(done.stdout.splitlines()[-1])
    assert [bundle["GPU"] for bundle in bundles] == [1, 1] and num_nodes == 2 and backend == expected
    assert [bundle.get("CPU") for bundle in bundles] == cpus


TWO_NODES = """
import contextlib, os, subprocess, time
from pathlib import Path
# Ray's processes are looked for there by the numbers of this namespace.
subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
from mgrpo.moving import from_values
from mgrpo.processes.address import INTERFACES
from mgrpo.rollout.start import RayNode, started_fleet
from mgrpo.rollout.vllm import actor
from mgrpo.rollout.vllm.ray_processes import node

rank, token, end, by_hand = int(os.environ["RANK"]), "5" * 64, Path(os.environ["END"]), "BY_HAND" in os.environ

class Probe:
    process = actor.EngineActor.process

    async def start(self, args, *others, **settings):
        import ray
        from mgrpo.rollout.vllm import actor
        from mgrpo.rollout.vllm.ray_processes import engine_part

        if not by_hand:
            engine_part.own_interfaces = lambda address: {}
        with contextlib.suppress(FileNotFoundError):  # of the model
            await actor.EngineActor.start(self, args, *others, **settings)
        return ray.util.get_node_ip_address(), *map(os.environ.get, INTERFACES)

def ray_node():
    return RayNode(
        address=f"10.77.0.{1 + rank}", head="10.77.0.1:21234", is_head=rank == 0, gpus=[], num_cpus=1, token=token
    )

def engines():
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    actor.EngineActor = Probe
    values = {"model_name_or_path": "m", "ray_address": "10.77.0.1:21234", "vllm_num_engines": 2}
    with started_fleet(from_values({**values, "output_dir": str(end.parent)}), num_local_learners=0, on_failure=None) as fleet:
        found = [engine.ready.result(60) for engine in fleet.engines]
        os.environ["GLOO_SOCKET_IFNAME"] = "veth0"  # as of rank 0 when it meets the others
        other = found.index(max(found))
        fleet.engines[other].close()
        again = fleet.roster._start(other).ready.result(60)
        print("engines", sorted(found), again == found[other], flush=True)

if by_hand:
    node.own_interfaces = lambda address: {}
ray, deadline = None, time.monotonic() + 90
try:
    while ray is None:  # the first node is there
        with contextlib.suppress(RuntimeError) if rank else contextlib.nullcontext():
            ray = ray_node()
    if rank == 0:
        while len(list(end.parent.glob("joined"))) == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        engines()
    else:
        end.with_name("joined").touch()
    while rank and not end.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
finally:
    end.touch()
    if ray is not None:
        ray.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launched", "by hand"])
def test_an_engine_reaches_others_over_its_own_nodes_interface(tmp_path, monkeypatch, how):
    """The nodes' interfaces have different names: rank 0's would keep the other's engine from every weight sync.

    Launched, the node says it to all workers on it; where Ray was started by hand, the engine finds it out.
    """
    monkeypatch.setenv("END", str(tmp_path / "end"))
    if how == "by hand":
        monkeypatch.setenv("BY_HAND", "1")
    done = on_two_machines(tmp_path, TWO_NODES)
    if "two machines" not in done.stdout or "mount" in done.stderr:
        pytest.skip(f"this user cannot make networks: {done.stderr.strip()}")
    nodes = [("10.77.0.1", "veth0", "=veth0"), ("10.77.0.2", "veth1", "=veth1")]
    assert f"engines {nodes} True" in done.stdout, done.stdout + done.stderr
