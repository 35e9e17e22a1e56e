"""What is rebound in other packages at run time must still be there: a new release may move it without an error."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from mgrpo.parallel import backend, stand_in
from mgrpo.rollout.vllm.cluster import UNUSED_SERVICES
from mgrpo.sync.vllm_plugin import rebound

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("module", "name", "why"), stand_in.REBOUND)
def test_megatron_still_has_what_the_cpu_stand_in_replaces(module, name, why):
    """Without the name the stand-in does nothing there, and Megatron asks CUDA for a device."""
    backend.install()
    names = vars(importlib.import_module(f"megatron.core.{module}"))
    assert name in names, f"{module}.{name} is gone; it was replaced because: {why}"
    if name == "torch":
        assert names["torch"].cuda.current_device().type == "cpu"


@pytest.mark.parametrize(("module", "name", "why"), stand_in.REBOUND_WITHOUT_TE)
def test_megatron_still_reads_what_is_supplied_without_transformer_engine(module, name, why):
    """The name itself is supplied, so only the module's text can show that it is still read there."""
    backend.install()
    found = importlib.import_module(f"megatron.core.{module}")
    assert name in inspect.getsource(found), f"{module}.{name} is gone; it was replaced because: {why}"


ON_CUDA_WITHOUT_TE = """
import sys, torch
sys.modules["transformer_engine"] = None
torch.cuda.is_available = lambda: True
from mgrpo.parallel import backend
backend.install()
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.transformer.moe import moe_utils
assert moe_utils.torch is torch, "the stand-in is for machines without CUDA"
# megatron-core 0.19 has no such name: it asks for the class's name.
assert not isinstance(torch.nn.Linear(1, 1), getattr(mcore_fsdp_adapter, "TELinear", ()))
tokens, weight = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
scores = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
torch.testing.assert_close(scores, tokens @ weight.T)
scores.sum().backward()
torch.testing.assert_close(weight.grad, tokens.sum(0).expand(2, 3))
"""


def test_routers_and_sharded_parameters_need_no_transformer_engine_on_cuda():
    """On GPUs a mixture of experts would end in its first forward, and ZeRO-2 with tensor ranks when it is wrapped."""
    done = subprocess.run([sys.executable, "-c", ON_CUDA_WITHOUT_TE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["raise RuntimeError('not for this Python')", "", "class FusedAdam: ..."])
def test_neither_the_apex_of_pypi_nor_wandb_is_imported(tmp_path, text):
    """The one is a web framework's library, whose import may fail in any way; the other leaves folders in /tmp."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text(text if text.startswith("raise") else "")
    (tmp_path / "wandb.py").write_text("")
    (package / "optimizers.py").write_text(f"{text}\nFusedSGD = None\n")
    program = (
        "from mgrpo.parallel import backend; backend.install(); import torch; from megatron.core import optimizer; "
        "from megatron.core.models.gpt import gpt_layer_specs; "
        "assert optimizer.Adam is torch.optim.AdamW and not gpt_layer_specs.HAVE_APEX; "
        "import sys; assert 'wandb' not in sys.modules; import wandb"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_megatron_still_has_what_is_mended_or_overridden():
    """Without the names ZeRO-2 and 3 lay their mesh over all pipeline stages again, or a norm waits for every tensor."""
    backend.install()
    from mgrpo.parallel import fsdp, gradients, pipeline
    from mgrpo.parallel.moe import dispatcher, experts

    for module, name, why in (
        *dispatcher.REBOUND,
        *experts.REBOUND,
        *fsdp.REBOUND,
        *gradients.REBOUND,
        *pipeline.REBOUND,
    ):
        assert hasattr(importlib.import_module(f"megatron.core.{module}"), name), f"{module}.{name} is gone: {why}"


@pytest.mark.parametrize(("module", "name", "value", "why"), rebound.REBOUND)
def test_vllm_still_has_what_the_plugin_replaces(module, name, value, why):
    """Without the name vLLM packs its weights again: writes in place are lost and digests prove nothing."""
    assert hasattr(resolve_name(module), name), f"{module}.{name} is gone; replaced because: {why}"


def test_ray_still_starts_the_services_that_are_left_out():
    """Without the names Ray starts a dashboard and waits for it."""
    from ray._private.node import Node

    started = inspect.getsource(Node.start_head_processes) + inspect.getsource(Node.start_ray_processes)
    assert all(f"self.{name}(" in started for name in UNUSED_SERVICES)
