"""What vLLM makes of mgrpo's engine arguments on an H100. `record` starts it, as a process that believes in one.

python -m tests.gpu_config.resolve FOLDER       writes FOLDER/engines.json
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import hf_tensors
from tests.gpu_config.cases import Case, cases, kinds
from tests.gpu_config.faked_h100 import believe


def resolved(args: dict[str, Any]) -> dict[str, Any]:
    """The engine's configuration, in plain values, and that of its layers if it has one worker."""
    from vllm.config import set_current_vllm_config
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.executor.abstract import Executor

    transfer = WeightTransferConfig(backend="mgrpo")
    config = AsyncEngineArgs(**args, weight_transfer_config=transfer).create_engine_config()
    model, compilation, passes = config.model_config, config.compilation_config, config.compilation_config.pass_config
    with set_current_vllm_config(config):
        attention = get_attn_backend(
            model.get_head_size(),
            model.dtype,
            config.cache_config.cache_dtype,
            num_heads=model.get_num_attention_heads(config.parallel_config),
        )
        layers = layers_of(config) if config.parallel_config.world_size == 1 else None
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "worker": config.parallel_config.worker_cls,
        "executor": Executor.get_class(config).__name__,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "attention": attention.get_name(),
        "moe_backend": config.kernel_config.moe_backend,
        "compilation": compilation.mode.name,
        "cudagraphs": compilation.cudagraph_mode.name,
        "graph_sizes": len(compilation.cudagraph_capture_sizes or ()),
        "passes": sorted(name for name, value in vars(passes).items() if value is True),
        "sleep_mode": model.enable_sleep_mode,
        "cumem": model.enable_cumem_allocator,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "cache_dtype": config.cache_config.cache_dtype,
        "logprobs_mode": model.logprobs_mode,
        "weight_transfer": config.weight_transfer_config.backend,
        "layers": layers,
    }


def layers_of(config: Any) -> dict[str, Any]:
    """The kernels that the model's layers choose, and how the plugin finds their weights; without memory for them."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mgrpo.sync.vllm_plugin.live_weights import check_experts, live_boxes

    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(vllm_config=config)
    shape = shape_of(read_hf_config(config.model_config.model))
    check_experts(model, has_experts=shape.experts is not None)
    sizes = {name: prod(size) for name, size in hf_tensors(shape).items()}
    for box, target in live_boxes(model, asdict(shape))[0]:
        assert target.dtype == config.model_config.dtype, f"{box} is kept as {target.dtype}"
        sizes[box.name] -= box.size
    modules = list(model.modules())
    methods = [getattr(module, "quant_method", None) for module in modules]
    return {
        "model": type(model).__name__,
        "attention": sorted({module.attn_backend.get_name() for module in modules if hasattr(module, "attn_backend")}),
        "experts": sorted({each.unquantized_backend.name for each in methods if hasattr(each, "unquantized_backend")}),
        "not written by a sync": [name for name, left in sizes.items() if left],
    }


def join_alone() -> None:
    """vLLM's groups, of one process: layers ask for their place in them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", backend="gloo")
        initialize_model_parallel()


def engine(case: Case, folder: Path) -> dict[str, Any]:
    """What a case asks for, and what becomes of it or why nothing does."""
    from vllm.plugins import load_general_plugins

    os.environ.update({name: value for name, value in case.environment().items() if value})
    load_general_plugins()
    args = case.args(folder)
    asked = {"asked": kinds(args)}
    try:
        return asked | {"found": resolved(args)}
    except Exception as err:
        return asked | {"error": f"{type(err).__name__}: {err}"}


def main() -> None:
    folder = Path(sys.argv[1])
    believe()
    join_alone()
    engines = {case.name: engine(case, folder) for case in cases()}
    (folder / "engines.json").write_text(json.dumps(engines))


if __name__ == "__main__":
    main()
