"""What vLLM's own loader gives to one worker of an engine: a program for each worker, which prints its boxes for each model."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any


def main(rank: int, port: int, tensor: int, data: int, expert_parallel: bool, folders: list[str]) -> None:
    os.environ |= {
        "MGRPO_ENGINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_DP_SIZE": str(data),
        "VLLM_DP_RANK": str(rank // tensor),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_DIST_IDENT": str(port),
    }
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config
    from mgrpo.sync.vllm_plugin.live_weights import check_experts, check_written, live_boxes

    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU has it
    for number, folder in enumerate(folders):
        config = EngineArgs(
            model=folder,
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=64,
            enforce_eager=True,
            enable_prefix_caching=False,
            tensor_parallel_size=tensor,
            enable_expert_parallel=expert_parallel,
            distributed_executor_backend="mp",
        ).create_engine_config()
        with set_current_vllm_config(config):
            if number == 0:
                init_distributed_environment(tensor, rank % tensor, f"tcp://127.0.0.1:{port}", rank, "gloo")
                initialize_model_parallel(tensor)
            model = get_model(vllm_config=config)
        shape = shape_of(read_hf_config(folder))
        check_experts(model, has_experts=shape.experts is not None)
        boxes, zeros = live_boxes(model, asdict(shape))
        check_written(model, [*(view for _, view in boxes), *zeros])
        print("boxes", json.dumps([(box.name, box.start, box.shape) for box, _ in boxes]), flush=True)
        config.compilation_config.static_forward_context.clear()


if __name__ == "__main__":
    arguments: Any = json.loads(sys.argv[1])
    main(**arguments)
