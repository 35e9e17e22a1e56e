"""What the ranks of `test_optimizer.py` run."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from tests.ranks import cases
from tests.ranks.update_cases import followed_updates


def norm_and_scale(seed: int) -> dict[str, Any]:
    """Norm and scaled gradients by Megatron's own functions and by those that replace them, and the calls that wait."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    from mgrpo.parallel import gradients

    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = local_multi_tensor_l2_norm, local_multi_tensor_scale
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(n, generator=generator) * 10**n for n in (1, 7, 0, 5)]
    expected = {
        "norm": clip_grads.get_grad_norm_fp32(tensors),
        "scaled": _clipped(clip_grads, tensors),
    }
    gradients.install()
    waits: list[int] = []
    item, to_float = torch.Tensor.item, torch.Tensor.__float__
    with (
        patch.object(torch.Tensor, "item", lambda tensor: (waits.append(1), item(tensor))[1]),
        patch.object(torch.Tensor, "__float__", lambda tensor: (waits.append(1), to_float(tensor))[1]),
    ):
        norm = clip_grads.get_grad_norm_fp32(tensors)
    return {
        "expected": expected,
        "own": {"norm": norm, "scaled": _clipped(clip_grads, tensors)},
        "empty": clip_grads.get_grad_norm_fp32([]),
        "waits": len(waits),
    }


def _clipped(clip_grads: Any, tensors: list[torch.Tensor]) -> list[list[float]]:
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=1.0, total_norm=3.0)
    return [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None]


def trained(model_dir: str, **arguments: Any) -> dict[str, Any]:
    """`cases.train_steps`, how many parameters torch's fused Adam updates, and by how much each update is wrong."""
    from mgrpo.policy import optimizer

    make, counts = optimizer._make_adam, []

    def make_adam(*args: Any, **kwargs: Any) -> Any:
        adam = make(*args, **kwargs)
        counts.extend(len(group["params"]) * bool(group.get("fused")) for group in adam.param_groups)
        return adam

    with patch.object(optimizer, "_make_adam", make_adam), followed_updates() as errors:
        result = cases.train_steps(model_dir, **arguments)
    return result | {"num_fused": sum(counts), "errors": errors}


def shapes_sent(**arguments: Any) -> dict[str, Any]:
    """`cases.gradients`, which fails where stages send each other shapes."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def refused(*args: Any) -> None:
        raise AssertionError("a shape was sent")

    with patch.object(P2PCommunicator, "_communicate_shapes", refused):
        return cases.gradients(**arguments)


def overlapped(overlaps: bool, **arguments: Any) -> dict[str, Any]:
    """`cases.train_steps` with small buckets of gradients, and each step with another number of micro-batches.

    "on_their_way" says of each chunk and step which buckets were being summed when the backward pass was over; "sums" and
    "gathers" have for each bucket how often its gradients were summed and its parameters gathered.
    """
    from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer

    from mgrpo.policy import optimizer
    from mgrpo.policy.policy import Policy

    group = param_and_grad_buffer._ParamAndGradBucketGroup
    made = optimizer.DistributedDataParallelConfig

    def buckets(**options: Any) -> Any:
        return made(**options | {"bucket_size": 2000, "overlap_grad_reduce": overlaps})

    finish, add_up, gather = DistributedDataParallel.finish_grad_sync, group.start_grad_sync, group.start_param_sync
    on_their_way, summed, gathered = [], [], []

    def finish_grad_sync(chunk: Any, *args: Any, **kwargs: Any) -> None:
        on_their_way.append([bucket.grad_reduce_handle is not None for bucket in chunk.bucket_groups])
        finish(chunk, *args, **kwargs)

    def start_grad_sync(bucket: Any, *args: Any, **kwargs: Any) -> None:
        summed.append(bucket)
        add_up(bucket, *args, **kwargs)

    def start_param_sync(bucket: Any, *args: Any, **kwargs: Any) -> None:
        gathered.append(bucket)
        gather(bucket, *args, **kwargs)

    def microbatches(policy: Any, packs: list[Any]) -> list[Any]:
        # A bucket must not be summed as soon as it has as many gradients as it had in the first step.
        return collate_all(policy, packs * (1, 3, 2)[policy.optimizer_steps])

    collate_all = Policy.microbatches
    with (
        patch.object(Policy, "microbatches", microbatches),
        patch.object(optimizer, "DistributedDataParallelConfig", buckets),
        patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync),
        patch.object(group, "start_grad_sync", start_grad_sync),
        patch.object(group, "start_param_sync", start_param_sync),
    ):
        result = cases.train_steps(**arguments)
    sums, gathers = ([started.count(bucket) for bucket in set(started)] for started in (summed, gathered))
    return result | {"on_their_way": on_their_way, "sums": sums, "gathers": gathers}


def offloaded(in_parts: bool | None, **arguments: Any) -> dict[str, Any]:
    """`cases.train_steps`, without its device memory before and after each step, and the elements it ends with.

    "left" says for each time after an update how many bytes of parameters, gradients and states this rank still had.
    `in_parts`: it first keeps what the weight sync reads; None: it keeps all. Memory that is taken again comes with other values, as on a machine that used it meanwhile.
    """
    from mgrpo.policy.lora_policy import made
    from mgrpo.policy.policy import Policy

    step, resize, left, policies = Policy.train_step, torch.UntypedStorage.resize_, [], []

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        return storage

    def between_steps(policy: Policy) -> None:
        with patch.object(torch.UntypedStorage, "resize_", resized):
            if in_parts:
                views = list(policy.live_boxes())
                before = [values.clone() for _, values in made(views)]
                policy.offload(keep_boxes=True)
                assert all(map(torch.equal, (values for _, values in made(views)), before))
            policy.offload()
            if policy.num_updates:
                left.append(cases.held_bytes(policy))
            policy.restore()

    def train_step(policy: Policy, *args: Any, **kwargs: Any) -> Any:
        policies[:] = [policy]
        if in_parts is None:
            return step(policy, *args, **kwargs)
        between_steps(policy)
        result = step(policy, *args, **kwargs)
        between_steps(policy)
        return result

    with patch.object(Policy, "train_step", train_step):
        result = cases.train_steps(**arguments)
    held = [(str(box), values.flatten().tolist()) for box, values in policies[0].boxes()]
    return result | {"left": left, "held": held}
