"""Names and shapes of the parameters that layers of Transformer Engine have, for tests on machines without it.

    python -m tools.record_te_parameters > tests/unit/policy/te_parameters.json

The product's own model is built, on torch's meta device, for small models of every kind and some ranks of some layouts.
Transformer Engine must be importable; its compiled extension and a GPU are not needed, as nothing is computed: the package
`transformer-engine` alone, without its dependencies, with triton and onnxscript. Run it again when Transformer Engine or
Megatron changes.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from mgrpo.layout import Layout
from mgrpo.models.family import shape_of

HF: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 125,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": HF | {"model_type": "llama"},
    "mistral": HF | {"model_type": "mistral"},
    "qwen2": HF | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": HF | {"model_type": "qwen3"},
    "olmo2": HF | {"model_type": "olmo2"},
    "olmo3": HF | {"model_type": "olmo3"},
    "gemma2": HF | {"model_type": "gemma2"},
    "gemma3_text": HF | {"model_type": "gemma3_text"},
    "mixtral": HF | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": HF | EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
}
LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"world_size": 1}, 0),
    ({"world_size": 2, "tensor": 2, "sequence_parallel": True}, 1),
    ({"world_size": 2, "pipeline": 2}, 1),
]
EXPERT_LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"world_size": 2, "expert": 2}, 1),
    ({"world_size": 2, "tensor": 2, "expert": 2, "sequence_parallel": True}, 1),
]


class _Absent(type):
    """A name of the extension: it has every attribute, and cannot be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} of Transformer Engine's extension is not there: nothing can be computed")

    def __int__(cls) -> int:
        return 0

    __index__ = __int__


def do_without_extension() -> None:
    """Let Transformer Engine be imported without its compiled extension."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # Transformer Engine's own switch: load no library
    extension: Any = types.ModuleType("transformer_engine_torch")
    extension.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
    extension.__getattr__ = lambda name: _Absent.__getattr__(_Absent("extension", (), {}), name)
    sys.modules["transformer_engine_torch"] = extension
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None


def believe_in_cuda() -> None:
    """Let torch say that there is an H100, all of whose tensors are on the meta device."""
    import torch

    h100 = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100")
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: "meta"
    cuda.get_device_capability = lambda *device: (9, 0)
    cuda.get_device_properties = lambda *device: h100
    tensors: Any = torch.Tensor
    tensors.cuda = lambda tensor, *device, **options: tensor


def parameters(hf: dict[str, Any], layout: dict[str, Any], rank: int) -> dict[str, list[int]]:
    """The parameters that one rank holds, under the names of its modules."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mgrpo.config.schema import Parallel
    from mgrpo.parallel import axes, backend
    from mgrpo.policy.model import build

    torch.distributed.init_process_group("fake", rank=rank, world_size=layout["world_size"], store=FakeStore())
    backend.device = lambda: torch.device("meta")
    try:
        axes.tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: None
        axes.make_groups(Layout(**layout), seed=0)
        with torch.device("meta"):
            chunks = build(
                shape_of(hf),
                Layout(**layout),
                torch.bfloat16,
                settings=Parallel(transformer_impl="transformer_engine"),
                logits_chunk=0,
                trains_entropy=False,
                scores_entropy=False,
            )
        return {name: list(own.shape) for chunk in chunks for name, own in chunk.named_parameters()}
    finally:
        backend.leave_process_groups()


def main() -> None:
    if find_spec("transformer_engine_torch") is None:
        do_without_extension()
    believe_in_cuda()
    from mgrpo.parallel import backend

    backend.install()
    from megatron.core.transformer.moe import moe_layer

    # It has no parameters, and tables on the device.
    moe_layer.MoEAlltoAllTokenDispatcher = lambda *args, **kwargs: None
    recorded = [
        {"model": name, "hf": hf, "layout": layout, "rank": rank, "parameters": parameters(hf, layout, rank)}
        for name, hf in MODELS.items()
        for layout, rank in (LAYOUTS + EXPERT_LAYOUTS if "moe" in name or name == "mixtral" else LAYOUTS)
    ]
    versions = {name: version(name) for name in ("transformer-engine", "megatron-core")}
    lines = ",\n".join(json.dumps(rank) for rank in recorded)
    print(f'{{"versions": {json.dumps(versions)}, "ranks": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
