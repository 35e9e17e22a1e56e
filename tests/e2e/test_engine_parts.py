"""An engine of several copies of attention that loses a process, on one node or on two: it is dead, and started again as a whole."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.engine import EngineError
from mgrpo.rollout.vllm import engine_set
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import policy_kind
from tests.e2e.launching import survivors
from tests.e2e.test_expert_parallel import PROMPTS, SAMPLING, difference
from tests.sampling import prompt_batch
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SOON_S, START_S = 30, 300


@contextmanager
def engine_of(folder, parts, monkeypatch):
    """An engine of two copies, each on a node of its own if there are two parts."""
    monkeypatch.setattr(engine_set, "engine_bundles", lambda *args, **kwargs: [{"CPU": 1}] * parts)
    values = {
        "model_name_or_path": str(save_tiny(folder, "qwen3_moe", num_experts=5)),
        "model_dtype": "float32",
        "max_prompt_token_length": 32,
        "response_length": 200,
        "vllm_kv_cache_mb": 16,
        "vllm_data_parallel_size": 2,
        "vllm_enable_expert_parallel": True,
        "output_dir": str(folder / "out"),
    }
    config = from_values(values)
    cluster = Cluster(config, num_local_learners=0)
    try:
        yield cluster.start_engines(policy_kind(config, on_gpu=False, num_local_learners=0)), config.model_path
    finally:
        cluster.close()


def named(*words: str) -> list[psutil.Process]:
    """Processes below this one that run and whose command line has one of these."""

    def line(process: psutil.Process) -> str:
        with suppress(psutil.NoSuchProcess):  # or a zombie
            return " ".join(process.cmdline())
        return ""

    found = psutil.Process().children(recursive=True)
    return [each for each in found if any(word in line(each) for word in words)]


@pytest.mark.parametrize(
    ("parts", "victim"),
    [(1, "EngineCore_DP1"), (1, "DPCoordinator"), (2, "EngineCore_DP1"), (2, "EnginePart")],
)
def test_an_engine_of_several_copies_lives_and_dies_as_one(tmp_path, monkeypatch, parts, victim):
    """The copies that are left would wait in the exchange with the experts of the dead one, and the run for them."""
    with engine_of(tmp_path, parts, monkeypatch) as (started, folder):
        engine = started.engines[0]
        engine.ready.result(START_S)
        assert difference(engine, folder) < 1e-5
        long = prompt_batch(PROMPTS * 4, replace(SAMPLING, max_tokens=200, stop_token_ids=()))
        engine.submit(long).result(60)
        engine.resume().result(60)
        whole = named("EngineCore_DP", "DPCoordinator", "EnginePart", "EngineActor")
        (dead,) = named(victim)
        dead.kill()
        begun = time.monotonic()
        with pytest.raises(EngineError):
            while True:
                engine.poll().result(2 * SOON_S)
        assert time.monotonic() - begun < SOON_S
        engine.close()
        assert survivors(whole, SOON_S) == []
        again = started.start(0)
        again.ready.result(START_S)
        assert difference(again, folder) < 1e-5
