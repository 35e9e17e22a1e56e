"""What is rebound in other packages at run time must still be there: a new release may move it without an error."""

from __future__ import annotations

import importlib

import pytest

from mgrpo.parallel import backend
from mgrpo.sync import vllm_plugin


@pytest.mark.parametrize(("module", "name", "why"), backend.REBOUND)
def test_megatron_still_has_what_the_cpu_stand_in_replaces(module, name, why):
    """Without the name the stand-in does nothing there, and Megatron asks CUDA for a device."""
    backend.install()
    names = vars(importlib.import_module(f"megatron.core.{module}"))
    assert name in names, f"{module}.{name} is gone; it was replaced because: {why}"
    if name == "torch":
        assert names["torch"].cuda.current_device().type == "cpu"


def test_megatron_still_has_what_is_mended_or_overridden():
    """Without the names ZeRO-2 and 3 lay their mesh over all pipeline stages again, or a norm waits for every tensor."""
    backend.install()
    from mgrpo.parallel import fsdp, gradients, pipeline

    for module, name, why in (*fsdp.REBOUND, *gradients.REBOUND, *pipeline.REBOUND):
        assert hasattr(importlib.import_module(f"megatron.core.{module}"), name), f"{module}.{name} is gone: {why}"


@pytest.mark.parametrize(("module", "name", "value", "why"), vllm_plugin.REBOUND)
def test_vllm_still_has_what_the_plugin_replaces(module, name, value, why):
    """Without the name vLLM packs its weights again: writes in place are lost and digests prove nothing."""
    assert hasattr(importlib.import_module(module), name), f"{module}.{name} is gone; replaced because: {why}"
