"""Engines on H100s: vLLM's GPU build takes what they are asked to be, and makes of it what the weight sync relies on.

No GPU is there (see `faked_h100`), so this is how an engine would be configured, not that it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgrpo.sync.vllm_plugin.live_weights import PLAIN
from tests.gpu_config.cases import Case, cases, kinds
from tests.gpu_config.conftest import has_gpu_packages

CASES = {case.name: case for case in cases()}
AGAIN = "run `make record-gpu-config`"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def found(case: Case, engines: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """What becomes of the case, or of another engine of its sort."""
    asked = kinds(case.args(tmp_path))
    same = [each for each in (engines.get(case.name), *engines.values()) if each and each["asked"] == asked]
    if not same and not has_gpu_packages():
        pytest.skip(f"no engine that is started with these arguments has been recorded; {AGAIN}")
    assert same, f"no engine of this sort was recorded; {AGAIN}"
    assert "error" not in same[0], same[0]["error"]
    return same[0]["found"]


def test_the_recording_is_what_the_packages_say(
    engines: dict[str, Any], recorded: dict[str, Any], gpu_packages: None
) -> None:
    """On machines without them the recording stands for them."""
    assert engines == recorded["engines"], AGAIN


def test_an_engine_runs_the_code_for_gpus(case: Case, found: dict[str, Any]) -> None:
    """Its plugin, its sampler's masks and its log-probabilities were read in this worker and in this runner."""
    workers = case.config.engine.vllm_tensor_parallel_size
    assert (found["worker"], found["runner"]) == ("vllm.v1.worker.gpu_worker.Worker", "V2")
    executor = "RayExecutorV2" if case.spans_nodes else "MultiprocExecutor" if workers > 1 else "UniProcExecutor"
    assert found["executor"] == executor
    assert found["async_scheduling"] is found["chunked_prefill"] is True
    assert found["weight_transfer"] == "mgrpo"


def test_kernels_come_with_the_package(case: Case, found: dict[str, Any]) -> None:
    """FlashInfer's are compiled when an engine starts, by whichever nvcc there is, on all nodes at the same time."""
    model, engine = case.config.model, case.config.engine
    has_triton = model.model_dtype == "float32" or engine.vllm_kv_cache_dtype in ("fp8_e5m2", "fp8_per_token_head")
    assert found["attention"] == ("TRITON_ATTN" if has_triton else "FLASH_ATTN")
    assert found["layers"] is None or found["layers"]["attention"] == [found["attention"]]
    assert "fuse_allreduce_rms" not in found["passes"]


def test_weights_lie_as_they_were_loaded(case: Case, found: dict[str, Any], tmp_path: Path) -> None:
    """A sync writes in place, in the loader's order; a tensor that it does not find keeps the first step's values."""
    assert found["moe_backend"] == "triton"
    if case.config.engine.vllm_tensor_parallel_size > 1:
        assert found["layers"] is None, "vLLM's groups are of one process here"
        return
    assert found["layers"]["not written by a sync"] == []
    has_experts = kinds(case.args(tmp_path))["model"].startswith("qwen3_moe")
    assert found["layers"]["experts"] == (["TRITON"] if has_experts else []) and "TRITON" in PLAIN


def test_graphs_are_captured_unless_it_is_eager(case: Case, found: dict[str, Any]) -> None:
    """`vllm_enforce_eager` is the way round graphs and compiled code that read weights that change."""
    if case.config.engine.vllm_enforce_eager:
        assert (found["cudagraphs"], found["compilation"], found["graph_sizes"]) == ("NONE", "NONE", 0)
    else:
        assert (found["cudagraphs"], found["compilation"]) == ("FULL_AND_PIECEWISE", "VLLM_COMPILE")
        assert found["graph_sizes"] > 0


def test_memory_is_the_engines_own_or_shared(case: Case, found: dict[str, Any]) -> None:
    """Only memory of vLLM's pool is given up in a sleep; 0.9 of a GPU is not there beside a learner."""
    settings = case.config.engine
    assert found["sleep_mode"] is found["cumem"] is settings.takes_turns
    share = 0.3 if settings.shares_gpus else settings.vllm_gpu_memory_utilization
    assert found["gpu_memory_utilization"] == share
    assert found["max_num_batched_tokens"] == 8192


def test_an_engine_rounds_as_the_trainer_does(case: Case, found: dict[str, Any]) -> None:
    """Otherwise it is another policy than the one that is trained."""
    model = case.config.model
    assert found["dtype"] == model.model_dtype
    assert found["head_dtype"] == ("float32" if model.cast_lm_head_to_fp32 else model.model_dtype)
    assert found["cache_dtype"] == case.config.engine.vllm_kv_cache_dtype
    assert found["logprobs_mode"] == "processed_logprobs"
