"""What the plan counts, counted on real models: run by `test_real_bytes` as a process of its own, which prints JSON.

Collectives go to torch's fake process group: any rank of any layout in one process, whose tensors have the right sizes
and whose values mean nothing. On ranks of a `RankPool` the same functions use the real group.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mgrpo.parallel import backend

backend.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from mgrpo.config.schema import Optimizer, Parallel  # noqa: E402
from mgrpo.layout import Layout  # noqa: E402
from mgrpo.models.adapters import LoraShape  # noqa: E402
from mgrpo.models.family import shape_of  # noqa: E402
from mgrpo.models.table import local_parameters  # noqa: E402
from mgrpo.planner.plan_command import shipped_config  # noqa: E402
from mgrpo.policy.policy import Policy  # noqa: E402
from mgrpo.types import PackedBatch  # noqa: E402


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[None]:
    """This process as one rank of a world that does not exist; among real ranks as itself."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        yield
        return
    new_group = dist.new_group
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    # Megatron also asks for a gloo group, which has no fake store.
    dist.new_group = lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})
    try:
        yield
    finally:
        dist.new_group = new_group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def policy_on(hf: dict[str, Any], layout: Layout, dtype: torch.dtype, settings: Parallel, **head: Any) -> Policy:
    """A policy whose weights are whatever they are."""
    return Policy(shape_of(hf), layout, dtype=dtype, seed=1, temperature=1.0, settings=settings, **head)


def meta(model: str, layout: dict[str, Any], rank: int) -> dict[str, Any]:
    """The real model of one rank, built on the meta device: its parameters beside the rule table's."""
    layout_ = Layout(**layout)
    hf = shipped_config(model)
    device, backend.device = backend.device, lambda: torch.device("meta")
    try:
        with rank_of(layout_, rank), torch.device("meta"):
            policy = policy_on(hf, layout_, torch.bfloat16, Parallel())
            live = {name: list(parameter.shape) for name, parameter in policy.parameters.live.items()}
            built = sum(parameter.numel() for chunk in policy.chunks for parameter in chunk.parameters())
    finally:
        backend.device = device
    table = {name: list(place.shape) for name, place in local_parameters(shape_of(hf), layout_, rank).items()}
    return {"differing": [name for name in live | table if live.get(name) != table.get(name)], "parameters": built}


def states(
    hf: dict[str, Any],
    layout: dict[str, Any],
    rank: int,
    dtype: str,
    parallel: dict[str, Any],
    lora: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Bytes of parameters, gradient buffers and optimizer states after one update."""
    layout_, settings = Layout(**layout), Parallel(**parallel)
    with rank_of(layout_, rank):
        policy = policy_on(hf, layout_, getattr(torch, dtype), settings, lora=lora and LoraShape(**lora))
        policy.prepare_training(Optimizer(), num_optimizer_steps=1)
        moments = [shard.moment(kind) for shard in policy.shards for kind in ("exp_avg", "exp_avg_sq")]
        masters = [shard.main for shard in policy.shards]
        parameters = [parameter.data for parameter in policy.parameters.live.values()]
        if layout_.zero_stage < 2:
            buffers = [buffer for chunk in policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            gradients = [buffer.grad_data for buffer in buffers]
            if layout_.zero_stage == 1:
                frozen = [own.data for own in policy.parameters.live.values() if not own.requires_grad]
                parameters = [*frozen, *(buffer.param_data for buffer in buffers)]
        else:
            groups = [group for chunk in policy.chunks for group in chunk.param_and_grad_buffer.parameter_groups]
            gradients = [group.main_grad_buffer.data for group in groups]
            if layout_.zero_stage == 3:
                parameters = [group.model_weight_buffer.data for group in groups]
        # Megatron updates float32 weights in place: these are not masters.
        own = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        masters = [tensor for tensor in masters if tensor.untyped_storage().data_ptr() not in own]
        return {
            "parameters": sum(tensor.nbytes for tensor in parameters),
            "gradients": sum(tensor.nbytes for tensor in gradients),
            "optimizer": sum(tensor.nbytes for tensor in masters + moments),
        }


def pack_of(tokens: int, documents: int) -> PackedBatch:
    """Equal documents; the second half of each is its response."""
    length = tokens // documents
    responses = length // 2
    starts = np.arange(documents) * length
    rows = (starts[:, None] + np.arange(length - responses - 1, length - 1)).reshape(-1)
    count = len(rows)
    return PackedBatch(
        tokens=np.ones(tokens, np.int32),
        positions=np.tile(np.arange(length), documents).astype(np.int32),
        branches=np.zeros(tokens, np.int32),
        cu_seqlens=np.append(starts, tokens).astype(np.int32),
        rows=rows.astype(np.int32),
        targets=np.ones(count, np.int32),
        response_cu_seqlens=(np.arange(documents + 1) * responses).astype(np.int32),
        loss_mask=np.ones(count, np.bool_),
        rollout_logprobs=np.zeros(count, np.float32),
        ages=np.zeros(count, np.uint8),
        advantages=np.ones(count, np.float32),
        samples=np.arange(documents, dtype=np.int32),
    )


def activations(
    hf: dict[str, Any],
    layout: dict[str, Any],
    rank: int,
    dtype: str,
    parallel: dict[str, Any],
    tokens: int,
    documents: int,
) -> dict[str, int]:
    """Bytes that one forward pass keeps for its backward pass: saved storages, except weights."""
    layout_, settings = Layout(**layout), Parallel(**parallel)
    saved: dict[int, torch.UntypedStorage] = {}
    with rank_of(layout_, rank):
        chunk_columns = 0 if settings.logits_chunk == "auto" else settings.logits_chunk
        policy = policy_on(hf, layout_, getattr(torch, dtype), settings, logits_chunk=chunk_columns)
        for parameter in policy.parameters.live.values():
            parameter.data.normal_(std=0.02)
        weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters.live.values()}
        (microbatch,) = policy.microbatches([pack_of(tokens, documents)])
        (model,) = policy.chunks
        if layout_.pipeline > 1 and rank >= layout_.world_size // layout_.pipeline:
            width = tokens // layout_.context // (layout_.tensor if layout_.sequence_parallel else 1)
            hidden = torch.randn(width, 1, hf["hidden_size"], dtype=getattr(torch, dtype), requires_grad=True)
            model.set_input_tensor(hidden)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(
                microbatch.tokens, microbatch.positions, documents=microbatch.documents, response=microbatch.response
            )
        rows = len(microbatch.response.rows)
        del output
    return {"bytes": sum(storage.nbytes() for storage in saved.values()), "rows": rows}


def main() -> None:
    """Reads cases from stdin, `[[function, arguments], ...]`, and prints one result each."""
    found = []
    for name, arguments in json.load(sys.stdin):
        try:
            found.append(globals()[name](**arguments))
        except Exception as err:
            found.append({"error": f"{type(err).__name__}: {err}"})
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
