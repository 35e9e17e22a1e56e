"""An engine's actor inside a placement group of a real Ray cluster that counts GPUs, and what vLLM makes of it there."""

from __future__ import annotations

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
