"""Our calls of vLLM and torch, as the packages for GPUs have them; see `uses`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.rollout.engine import Sampling
from mgrpo.rollout.vllm.calls import sampling_settings
from mgrpo.sync.group import join_group
from tests.gpu_config.faked_h100 import ROOT, environment
from tests.gpu_config.record import installed_versions
from tests.gpu_config.uses import NCCL, OWNERS, PACKAGE, described, uses

AGAIN = "run `make record-gpu-config`"


def test_every_call_fits_the_packages_for_gpus(recorded: dict[str, Any]) -> None:
    """One that does not is an error on the first GPU, after the model was loaded."""
    assert [misfit for use in uses() if (misfit := use.misfit(recorded["interfaces"]))] == []


def test_the_recording_is_what_the_packages_say(recorded: dict[str, Any]) -> None:
    """Where a recording is wrong, it lets wrong calls pass."""
    assert recorded["versions"] == installed_versions(), AGAIN
    found = described(uses())
    missing = set() if dist.is_nccl_available() else {NCCL, f"{NCCL}.send"}
    assert recorded["interfaces"].keys() - found.keys() == missing, AGAIN
    for owner, own in found.items():
        told = recorded["interfaces"][owner]
        assert told.keys() == own.keys(), AGAIN
        # Of functions written in C a newer Python may know more signatures.
        both = [name for name in own if told[name] is not None and own[name] is not None]
        assert {name: told[name] for name in both} == {name: own[name] for name in both}, AGAIN


@pytest.mark.parametrize("file", OWNERS)
def test_what_is_said_of_expressions_is_in_use(file: str) -> None:
    """Calls of an object under another name would not be looked at."""
    nodes = ast.walk(ast.parse((PACKAGE / file).read_text()))
    assert OWNERS[file].keys() - {ast.unparse(node) for node in nodes if isinstance(node, ast.expr)} == set()


KNOWN: dict[str, dict[str, list[str] | None]] = {
    "vllm.a:F": {"": ["(x, y=...)"], "go": ["(tensors, rank)"], "at": None},
    "vllm.a:make": {"": ["(store, rank)", "(store, rank, *, timeout=...)"]},
}


@pytest.mark.parametrize(
    ("code", "misfits"),
    [
        ("F(1); F(1, y=2); F(*a, **b); F.go(1, rank=2); F.at; make(1, 2, timeout=3)", []),
        ("F()", ["F is (x, y=...), called as F()"]),
        ("F(1, z=2)", ["F is (x, y=...), called as F(1, z=2)"]),
        ("F(1, **b, z=2)", ["F is (x, y=...), called as F(1, **b, z=2)"]),
        ("F.went(1)", ["F went does not exist"]),
        ("F.went", ["F went does not exist"]),
        ("make(1, 2, 3)", ["make is (store, rank) or (store, rank, *, timeout=...), called as make(1, 2, 3)"]),
        ("self._call(F.go, 1)", ["F go is (tensors, rank), called as F.go(1)"]),
        ("class A(F):\n def go(self, tensors, rank, more=1): self.at", []),
        ("class A(F[int]):\n def go(self, *args, **kwargs): self.x = 1; self.x", []),
        ("class A(F):\n def go(self, tensors): ...", ["F go is (tensors, rank), ours (tensors)"]),
        ("class A(F):\n def go(self, rank, tensors): ...", ["F go is (tensors, rank), ours (rank, tensors)"]),
        ("class A(F):\n def _own(self): self.gone()", ["F gone does not exist"]),
        ("class A(F):\n def own(self): ...", ["F own does not exist"]),
    ],
)
def test_calls_that_do_not_fit_are_found(tmp_path: Path, code: str, misfits: list[str]) -> None:
    """A reader that finds nothing would let everything pass."""
    (tmp_path / "a.py").write_text(f"from vllm.a import F, make\n{code}\n")
    found = dict.fromkeys(misfit for use in uses(tmp_path) if (misfit := use.misfit(KNOWN)))
    assert [each.partition("vllm.a:")[2] for each in found] == misfits


def test_an_object_of_an_object_has_to_be_named(tmp_path: Path) -> None:
    """What is called of it could not be looked up."""
    (tmp_path / "a.py").write_text("from vllm.a import F\nF.at.more()\n")
    with pytest.raises(AssertionError, match=r"a\.py:2: say in OWNERS what F\.at is"):
        uses(tmp_path)


def test_the_settings_of_a_sample_are_vllms(recorded: dict[str, Any]) -> None:
    """They are built apart from the call, which the reader cannot follow."""
    (known,) = recorded["interfaces"]["vllm:SamplingParams"][""]
    plain = Sampling(num_samples=2, temperature=1.0, max_tokens=3, stop_token_ids=(1,))
    rich = dataclasses.replace(plain, stop_strings=("x",), regex="[0-9]")
    others = ("seed", "flat_logprobs", "skip_clone", "output_kind")
    names = {*sampling_settings(plain), *sampling_settings(rich), *others}
    assert names - {each.partition("=")[0] for each in known[1:-1].split(", ")} == set()


# ---- with the packages for GPUs only


def test_nccl_is_asked_for_what_it_has(gpu_packages: None) -> None:
    """The first line of its constructor refuses a machine without GPUs: what stands before it was accepted."""
    if torch.cuda.is_available():
        pytest.skip("here is a GPU, on which it would go on")
    with pytest.raises((RuntimeError, ValueError), match="only supported with GPUs"):
        join_group(
            dist.HashStore(),
            rank=0,
            size=1,
            dtype=torch.bfloat16,
            device=torch.device("cuda", 0),
            host="127.0.0.1",
            timeout_s=5,
        )


def test_what_async_llm_passes_on_reaches_the_gpus_worker(gpu_packages: None) -> None:
    """Engine and workers are in other processes: the name of a method and its arguments are messages."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu_worker import Worker

    asked = {use.name for use in uses() if use.place.startswith("rollout/vllm/actor.py")}
    passed = set()
    for sender in (AsyncLLM, Executor):
        for node in ast.walk(ast.parse(inspect.getsource(sender))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "self.collective_rpc":
                continue
            name = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else None
            if name in asked:
                (given,) = [keyword.value for keyword in node.keywords if keyword.arg == "kwargs"] or [ast.Dict([], [])]
                keys = (
                    [key.arg for key in given.keywords]
                    if isinstance(given, ast.Call)
                    else map(ast.literal_eval, given.keys)
                )
                inspect.signature(getattr(Worker, name)).bind(None, **dict.fromkeys(keys))
                passed.add(name)
    assert passed == {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "sleep",
        "wake_up",
    }


IMPORTS = """
from tests.gpu_config.faked_h100 import believe
believe()
import importlib
for name in (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.vllm_flash_attn",
    "vllm.compilation.backends",
    "vllm.device_allocator.cumem",
    "vllm.cumem_allocator",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
):
    importlib.import_module(name)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
assert callable(GPUModelRunner.get_model)
"""


def test_what_an_engine_on_a_gpu_runs_can_be_imported(gpu_packages: None, tmp_path: Path) -> None:
    """Its compiled parts want the driver's library, CUDA's of the right version, and torch's stable interface."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
