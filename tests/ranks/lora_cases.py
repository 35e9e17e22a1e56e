"""What the ranks of tests of adapters run beside `cases.gradients`."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from mgrpo.config.schema import Optimizer
from mgrpo.models.placement.boxes import Box
from tests.ranks import cases

Held = list[tuple[Box, np.ndarray]]


def held(boxes: Any) -> Held:
    """Copies of the values; bfloat16 as the float32 of the same value."""
    return [(box, values.detach().float().cpu().clone().numpy()) for box, values in boxes]


def sabotaged_gradients(sabotage: str, **arguments: Any) -> dict[str, Any]:
    """`cases.gradients` with one thing broken that concerns adapters."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from mgrpo.parallel import lora
    from mgrpo.policy.model import ResponseModel

    class Collectives:
        """torch.distributed without its sums."""

        @staticmethod
        def all_reduce(tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
            return all_reduce(tensor, group=group, async_op=True) if async_op else None

    def twice(adapter: Any, weight: torch.Tensor) -> torch.Tensor:
        whole = merged(adapter, weight)
        return 2 * whole - weight if adapter.splits_inputs else whole

    # The package has a function of the module's name.
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    all_reduce, merged = torch.distributed.all_reduce, lora.LoraAdapter.merged
    broken = {
        "embeddings_want_no_gradient": patch.object(ResponseModel, "_preprocess", GPTModel._preprocess),
        "experts_are_not_marked": patch.object(
            lora, "set_tensor_model_parallel_attributes", lambda parameter, *mark: None
        ),
        "missing_sum_of_ranks": patch.object(lora, "dist", Collectives),
        "missing_sum_of_tokens": patch.object(
            finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *args: None
        ),
        "delta_on_each_rank": patch.object(lora.LoraAdapter, "merged", twice),
    }[sabotage]
    with broken:
        return cases.gradients(**arguments)


def fresh(model_dir: str, layout: dict[str, Any], lora: dict[str, Any], seed: int = 1) -> Held:
    """The adapters that a run begins with."""
    from mgrpo.layout import Layout
    from mgrpo.models.adapters import LoraShape
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config
    from mgrpo.policy.policy import Policy

    cases.forget_groups()
    shape, whole = shape_of(read_hf_config(model_dir)), Layout(world_size=torch.distributed.get_world_size(), **layout)
    policy = Policy(shape, whole, dtype=torch.float32, seed=seed, temperature=1.0, lora=LoraShape(**lora))
    return held(policy.adapter_boxes())


def what_layers_use(model_dir: str, lora: dict[str, Any]) -> tuple[Held, dict[str, np.ndarray], Held]:
    """On one rank in bfloat16: the merged boxes, each layer's weight as it multiplies, and those with adapters off."""
    policy = cases.make_policy(model_dir, {}, dtype=torch.bfloat16, lora=lora)
    modules = dict(policy.chunks[0].named_modules())
    used: dict[str, np.ndarray] = {}
    for name, adapter in policy.adapters.by_weight.items():
        layer, weight = modules[name.removesuffix(".weight")], policy.parameters.live[name]
        one = torch.eye(weight.shape[1], dtype=torch.bfloat16)
        with torch.no_grad():
            if adapter.experts > 1:
                ends = torch.arange(1, adapter.experts + 1, dtype=torch.int32) * len(one)
                rows = layer(one.repeat(adapter.experts, 1), ends).view(adapter.experts, len(one), -1)
                used[name] = rows.mT.reshape(weight.shape).float().numpy()
            elif layer.tp_group is None:
                used[name] = layer(one).T.float().numpy()
            else:
                # Megatron adds the bias of queries, keys and values itself.
                product = layer._forward_impl(
                    input=one[:, None], weight=weight, bias=None, allreduce_dgrad=False, sequence_parallel=False
                )
                used[name] = product[:, 0].T.float().numpy()
    boxes: Held = []
    for name, values in used.items():
        boxes += [(piece.box, values[piece.region]) for piece in policy.parameters.places[name].pieces]
    with policy.adapters_off():
        off = held(policy.parameters.boxes(policy.parameters.model))
    return held(policy.boxes()), dict(boxes), off


def learned(
    model_dir: str, layout: dict[str, Any], lora: dict[str, Any], samples: list[Any], dtype: str = "float32"
) -> dict[str, Any]:
    """Three updates: the losses, what the optimizer holds, the base weights, merged weights and the update's size."""
    policy = cases.make_policy(model_dir, layout, dtype=getattr(torch, dtype), lora=lora)
    before = held(policy.parameters.boxes(policy.parameters.model))
    policy.prepare_training(Optimizer(learning_rate=3e-2, adam_epsilon=1e-2), num_optimizer_steps=3)
    packs, num_trained = cases.own_packs(policy, samples, share_prompts=True, pack_length=64)
    losses = []

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
        value = -logprobs.sum() / num_trained
        return value, float(value.detach())

    for _ in range(3):
        losses.append(sum(policy.train_step(policy.microbatches(packs), loss).measured))
    policy.wait_for_weights()
    ratio = policy.adapters.update_ratio(cases.host_group())
    after = held(policy.parameters.boxes(policy.parameters.model))
    found = {
        "losses": losses,
        "trained": sorted({shard.name for shard in policy.shards}),
        "base_is_unchanged": all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)),
        "adapters": held(policy.adapter_boxes()),
        "merged": held(policy.boxes()),
        "base": after,
        "ratio": ratio,
        "holdings": [box for box, _ in policy.boxes()]
        == policy.holdings(cases.host_group()).boxes(torch.distributed.get_rank()),
        "bytes": cases.held_bytes(policy),
    }
    next(iter(policy.adapters.by_weight.values())).a.data[0, 0] = torch.nan
    return found | {"not_finite": policy.not_finite()}


def refused(model_dir: str, layout: dict[str, Any], lora: dict[str, Any], settings: dict[str, Any]) -> str:
    """Why a policy with adapters cannot be made."""
    try:
        cases.make_policy(model_dir, layout, settings=settings, lora=lora)
    except ValueError as err:
        return str(err)
    return ""


def sent(model_dir: str, layout: dict[str, Any], lora: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
    """In bfloat16: what an engine's worker holds after updates, and the boxes of each rank; rank 0 is the worker as well.

    Where adapters are not merged, the worker has loaded the model itself; also what is said when that is another one.
    """
    from mgrpo.layout import InferLayout
    from mgrpo.models.adapters import are_apart, engine_adapter_boxes
    from mgrpo.models.table import engine_boxes
    from mgrpo.policy.weights import hf_reader
    from mgrpo.sync.channel import Sender
    from mgrpo.sync.group import connect_store, open_store
    from mgrpo.sync.vllm_plugin.receiver import Receiver

    policy = cases.make_policy(model_dir, layout, dtype=torch.bfloat16, lora=lora)
    policy.prepare_training(Optimizer(learning_rate=3e-2, adam_epsilon=1e-2), num_optimizer_steps=2)
    group, place = cases.host_group(), [0]
    store, place[0] = open_store("127.0.0.1", 30) if policy.rank == 0 else (None, 0)
    torch.distributed.broadcast_object_list(place, group=group)
    sender = Sender(
        policy.sync_boxes(),
        holdings=policy.holdings(group),
        model=policy.shape,
        lora=policy.lora,
        train_layout=policy.layout,
        infer_layout=InferLayout(),
        rank=policy.rank,
        dtype=torch.bfloat16,
        store=store or connect_store("127.0.0.1", place[0], 30),
        host="127.0.0.1",
        port=place[0],
        bucket_bytes=1 << 14,
        timeout_s=30,
    )
    (boxes,), loaded = engine_boxes(policy.shape, InferLayout()), []
    if are_apart(policy.lora):
        read = hf_reader(model_dir, policy.shape)
        loaded = [(box, read(box).to(torch.bfloat16)) for box in boxes]
        (boxes,) = engine_adapter_boxes(policy.shape, InferLayout(), policy.lora)
    live = [(box, torch.zeros(box.shape, dtype=torch.bfloat16)) for box in boxes]
    packs, num_trained = cases.own_packs(policy, samples, share_prompts=True, pack_length=64)

    def receive() -> None:
        receiver = Receiver(live, loaded=loaded, worker=0, invitation=sender.invitation(0))
        for version in (1, 2):
            receiver.receive(version)
            receiver.report_digests(version)
        if loaded:
            loaded[3][1][0] += 1
            receiver.report_digests(3)

    with ThreadPoolExecutor(1) as threads:
        worker = threads.submit(receive) if policy.rank == 0 else None
        failures = sender.join({0: 0})
        for version in (1, 2):
            policy.train_step(policy.microbatches(packs), lambda *values: (-values[0].sum() / num_trained, None))
            policy.wait_for_weights()
            failures |= sender.send(version, [0])
        assert not failures, failures
        if worker:
            worker.result(30)
    digests = sender.digests()
    torch.distributed.all_reduce(digests, group=group)
    refusal = ""
    if policy.rank == 0:
        sender.compare(2, digests, {0: 0})
        try:
            sender.compare(3, digests, {0: 0} if loaded else {})
        except RuntimeError as err:
            refusal = str(err)
    return {
        "worker": held(live) if policy.rank == 0 else [],
        "policy": held(policy.boxes()),
        "adapters": held(policy.adapter_boxes()),
        "bytes": (sender.plan.bytes_moved, sender.plan.lower_bound),
        "refusal": refusal,
    }
