"""What a sync finds and writes in a worker's memory: vLLM's own models, loaders and layers, and our engine of the sync.

They are in a process of their own, because vLLM's state is global.
"""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from mgrpo.config.adapter import ADAPTER_RANKS
from mgrpo.models.adapters import ENGINE_ADAPTER, LINEAR_LAYERS, LoraShape
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.peft import PREFIX, WEIGHTS
from tests.peft_folders import save_adapter
from tests.tiny_models import save_tiny

LORA = LoraShape(rank=3, alpha=12, use_rslora=True, is_merged=False)
"""vLLM has no room of rank 3, only of 8."""


def start(folder: str, **settings: Any) -> tuple[torch.nn.Module, Any]:
    """vLLM's model with its weights, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    common = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    config = EngineArgs(model=folder, **common, **settings).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config=config)
    model.load_weights(load_file(f"{folder}/model.safetensors").items())
    return model, config


def receiving(**values: Any) -> Any:
    """Our engine of the sync in a worker."""
    from mgrpo.sync.vllm_plugin import transfer_engine

    engine = object.__new__(transfer_engine._engine_class())
    given = {
        "parallel_config": SimpleNamespace(rank=0, data_parallel_rank=0, world_size=1),
        "vllm_config": SimpleNamespace(load_config=SimpleNamespace(load_format="auto")),
    }
    vars(engine).update(given | values)
    return engine


def padding_after_waking_up(folder: str) -> None:
    from mgrpo.sync.vllm_plugin.live_weights import live_boxes

    model, _ = start(folder)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    boxes, padding = live_boxes(model, asdict(shape_of(read_hf_config(folder))))
    assert sum(view.numel() for view in padding) > 0
    with torch.no_grad():
        sent = [(view, view.clone()) for _, view in boxes]
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what the memory of an engine that has slept may hold

    def receive(version: int) -> bool:
        for view, values in sent:
            view.copy_(values)
        return True

    engine = receiving(receiver=SimpleNamespace(receive=receive), padding=padding)
    engine.receive_weights(SimpleNamespace(seed=0, version=1, check=False))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, own[name]), name


def adapters_in_their_slot(folder: str) -> None:
    from vllm.config.lora import MaxLoRARanks
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    from mgrpo.sync.vllm_plugin.live_weights import adapter_boxes, live_boxes

    assert get_args(MaxLoRARanks) == ADAPTER_RANKS
    shape = shape_of(read_hf_config(folder))
    stored = save_adapter(Path(folder) / "adapter", shape, LORA)
    names = [*LINEAR_LAYERS]
    model, config = start(folder, enable_lora=True, max_loras=1, max_lora_rank=8, lora_target_modules=names)
    workers = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
    model = workers.create_lora_manager(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def slots() -> dict[str, torch.Tensor]:
        layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_a_stacked")}
        return {
            f"{name} {kind} {number}": part.clone()
            for name, layer in layers.items()
            for kind, parts in (("a", layer.lora_a_stacked), ("b", layer.lora_b_stacked))
            for number, part in enumerate(parts)
        }

    request = LoRARequest("policy", ENGINE_ADAPTER, str(stored))
    workers.add_adapter(request)
    truth = slots()
    assert len(truth) == 14 * shape.num_layers and all(part.any() for part in truth.values())

    for _ in range(2):  # a later run may join the engine that an earlier one has left
        boxes = adapter_boxes(model, asdict(shape), LORA)
        assert not any(part.any() for part in slots().values())
        tensors = load_file(stored / WEIGHTS)
        for box, view in boxes:
            values = tensors[PREFIX + box.name][
                box.within(type(box)(box.name, (0, 0), tensors[PREFIX + box.name].shape))
            ]
            view.copy_(values * (LORA.scale if box.name.endswith("lora_B.weight") else 1))
        for name, part in slots().items():
            torch.testing.assert_close(part, truth[name], rtol=1e-6, atol=0, msg=name)
    workers.remove_all_adapters()  # at the end of a weight update
    # Read from no folder: there is none.
    workers.set_active_adapters({LoRARequest("policy", ENGINE_ADAPTER, "weight sync")}, None)
    assert all(torch.allclose(part, truth[name]) for name, part in slots().items())

    loaded, padding = live_boxes(model, asdict(shape))
    by_name = load_file(f"{folder}/model.safetensors")
    assert {box.name for box, _ in loaded} == by_name.keys() and padding
    for box, view in loaded:
        whole = by_name[box.name]
        assert torch.equal(view, whole[box.within(type(box)(box.name, (0,) * whole.dim(), whole.shape))]), box
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())

    place = {"host": "127.0.0.1", "port": 1, "engine": 0, "generation": 0}
    invitation = {"model": asdict(shape), "lora": asdict(LORA), **place}
    plain, _ = start(folder)
    engine = receiving(model=plain, receiver=None)
    with pytest.raises(RuntimeError, match="started without enable_lora, which lora_sync=adapter needs"):
        engine.init_transfer_engine(SimpleNamespace(invitation=invitation, is_trial=False))


def run(folder: str, results: Connection) -> None:
    """Sends why each check has failed; empty where it has not."""
    for check in (padding_after_waking_up, adapters_in_their_slot):
        try:
            check(folder)
            results.send("")
        except BaseException:
            results.send(traceback.format_exc())


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
    folder = save_tiny(tmp_path_factory.mktemp("model"), "qwen2", heads=2)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=partial(run, str(folder), there))
    child.start()
    there.close()
    try:
        found = {}
        for name in ("padding", "adapters"):
            assert here.poll(200), "vLLM does not answer"
            found[name] = here.recv()
        return found
    finally:
        child.kill()
        child.join()


@pytest.mark.timeout(240)
def test_after_a_sleep_every_parameter_is_as_it_was_loaded(failures) -> None:
    """The padding takes part in every product with the vocabulary: NaN in it spreads where logits are not cut off."""
    assert not failures["padding"], failures["padding"]


@pytest.mark.timeout(240)
def test_adapters_lie_where_vllm_loads_them_from_a_folder(failures) -> None:
    """An adapter in another layer's slot, unscaled, or forgotten after the update, serves another policy without an error."""
    assert not failures["adapters"], failures["adapters"]
