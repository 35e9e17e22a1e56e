"""The rows of vLLM's vocabulary that are only padding: no weight sync sends them."""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mgrpo.models.family import read_hf_config, shape_of
from tests.tiny_models import save_tiny


def receive_after_waking_up(folder: str) -> None:
    """A process of its own, because vLLM's state is global: its own model, loader and layers, and our engine of the sync."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from mgrpo.sync import vllm_plugin

    settings = EngineArgs(model=folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64)
    config = settings.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config=config)
    model.load_weights(load_file(f"{folder}/model.safetensors").items())
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    boxes, padding = vllm_plugin.live_boxes(model, asdict(shape_of(read_hf_config(folder))))
    assert sum(view.numel() for view in padding) > 0
    with torch.no_grad():
        sent = [(view, view.clone()) for _, view in boxes]
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what the memory of an engine that has slept may hold

    def receive(version: int) -> None:
        for view, values in sent:
            view.copy_(values)

    engine = object.__new__(vllm_plugin._engine_class())
    engine.receiver, engine.padding = SimpleNamespace(receive=receive), padding
    engine.receive_weights(SimpleNamespace(seed=0, version=1, check=False))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, own[name]), name


@pytest.mark.timeout(240)
def test_after_a_sleep_every_parameter_is_as_it_was_loaded(tmp_path: Path) -> None:
    """The padding takes part in every product with the vocabulary: NaN in it spreads where logits are not cut off."""
    folder = save_tiny(tmp_path, "qwen2", heads=2)
    child = multiprocessing.get_context("spawn").Process(target=receive_after_waking_up, args=(str(folder),))
    child.start()
    child.join(200)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
