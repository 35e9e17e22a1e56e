"""What the ranks of a distributed test run. Module-level functions with plain arguments and results."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mgrpo import algo, packing
from mgrpo.config.loss import LossConfig
from mgrpo.config.schema import Optimizer, Parallel
from mgrpo.layout import InferLayout, Layout
from mgrpo.models.adapters import LoraShape, adapter_tensors
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import local_parameters
from mgrpo.types import KeptTokens, TrainSample


def forget_groups() -> None:
    """Destroy the groups of the previous case: each has its own thread, and hundreds of them overload a machine."""
    from megatron.core import parallel_state
    from torch.distributed.distributed_c10d import _world

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    gc.collect()
    for group in [group for group in _world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def host_group() -> dist.ProcessGroup:
    """All ranks, for tensors in host memory; the default group is NCCL's on GPUs. All ranks must call."""
    return dist.new_group(backend="gloo")


def make_policy(
    model_dir: str,
    layout: dict[str, Any],
    temperature: float = 0.8,
    logits_chunk: int = 0,
    fp32_logits: bool = False,
    dtype: torch.dtype = torch.float32,
    settings: dict[str, Any] | None = None,
    checkpoint: tuple[Any, str] | None = None,
    lora: dict[str, Any] | None = None,
):
    """A policy on `layout`, in new groups; with the weights of `checkpoint`, a (checkpoint, kind), if given.

    Args:
        lora: fields of a `LoraShape`; its A and B are those of `random_adapters`.
    """
    from mgrpo.policy.policy import Policy
    from mgrpo.policy.weights import hf_reader

    forget_groups()
    policy = Policy(
        shape_of(read_hf_config(model_dir)),
        Layout(world_size=dist.get_world_size(), **layout),
        dtype=dtype,
        seed=1,
        temperature=temperature,
        logits_chunk=logits_chunk,
        fp32_logits=fp32_logits,
        settings=Parallel(**(settings or {})),
        lora=lora and LoraShape(**lora),
    )
    policy.load(partial(checkpoint[0].read, checkpoint[1]) if checkpoint else hf_reader(model_dir, policy.shape))
    if policy.lora:
        tensors = random_adapters(policy.shape, policy.lora)
        policy.load_adapters(lambda box: torch.from_numpy(tensors[box.name][region(box)]))
    return policy


def random_adapters(shape: ModelShape, lora: LoraShape) -> dict[str, np.ndarray]:
    """Every adapter tensor, none of which is 0, so that each has a gradient."""
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.1, size).astype(np.float32) for name, size in adapter_tensors(shape, lora).items()}


def region(box: Box) -> tuple[slice, ...]:
    """Where a box lies in its tensor."""
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def own_packs(policy, samples: list[TrainSample], *, share_prompts: bool, pack_length: int):
    """Packs of this rank for one mini-batch, and the number of tokens trained on all ranks."""
    layout = policy.layout
    padding = {"multiple_of": layout.pack_multiple_of, "document_multiple_of": layout.document_multiple_of}
    plan = packing.plan_step(
        samples,
        pack_length=layout.round_up(pack_length),
        dp=layout.data,
        num_mini_batches=1,
        micro_batches_multiple_of=layout.micro_batches_multiple_of,
        share_prompts=share_prompts and layout.context == 1,
        **padding,
    )
    index, slices = packing.to_slices(samples, plan, **padding)
    (packs,) = packing.from_slice(index, slices[policy.coordinate.data].filled())
    return packs, int(index["num_trained_tokens"][0])


def gradients(
    model_dir: str,
    layout: dict[str, Any],
    samples: list[TrainSample],
    loss: dict[str, Any],
    share_prompts: bool = True,
    pack_length: int = 64,
    logits_chunk: int = 0,
    fp32_logits: bool = False,
    settings: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """One training step: loss, logprobs by sample, gradient norm and every gradient as boxes of HF tensors.

    With adapters also the logprobs without them, and the merged weights as boxes.
    """
    policy = make_policy(
        model_dir,
        layout,
        logits_chunk=logits_chunk,
        fp32_logits=fp32_logits,
        settings=settings,
        lora=lora,
        dtype=getattr(torch, dtype),
    )
    dims_of_head, rows_of_head, without = [], [], {}

    def watch(layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        rows_of_head.append(len(inputs[0]))
        dims_of_head.append(output[0].dim())

    if policy.is_last_stage:
        policy.chunks[-1].output_layer.register_forward_hook(watch)
    policy.prepare_training(Optimizer(learning_rate=0.0, max_grad_norm=0.0), num_optimizer_steps=1)
    packs, num_trained = own_packs(policy, samples, share_prompts=share_prompts, pack_length=pack_length)
    microbatches = policy.microbatches(packs)
    if lora:
        with policy.adapters_off():
            policy.score(microbatches, "ref")
    settings = LossConfig(**loss)
    denominator = algo.loss_denominator(num_trained, settings)

    def grpo_loss(logprobs, entropy, batch):
        old = batch.loss_inputs.rollout_logprobs
        result = algo.policy_loss(
            logprobs,
            old,
            batch.loss_inputs.advantages,
            batch.loss_inputs.loss_mask,
            batch.loss_inputs.response_cu_seqlens,
            config=settings,
            ref_logprobs=old - 0.1,
            denominator=denominator,
        )
        cuts = batch.pack.response_cu_seqlens
        by_sample = {
            int(sample): (logprobs[a:b].tolist(), entropy[a:b].tolist())
            for sample, a, b in zip(batch.pack.samples, cuts[:-1], cuts[1:], strict=True)
        }
        if lora:
            reference = batch.logprobs["ref"]
            without.update(
                {
                    int(n): reference[a:b].tolist()
                    for n, a, b in zip(batch.pack.samples, cuts[:-1], cuts[1:], strict=True)
                }
            )
        return result.loss, (float(result.loss.detach()), by_sample)

    result = policy.train_step(microbatches, grpo_loss)
    boxes = [
        (box, gradient.cpu().clone().numpy())
        for shard in policy.shards
        for box, gradient in shard.boxes(policy.parameters.places[shard.name], shard.gradient)
    ]
    return {
        "loss": sum(loss for loss, _ in result.measured),
        "samples": {k: v for _, by_sample in result.measured for k, v in by_sample.items()},
        "grad_norm": result.grad_norm,
        "gradients": boxes,
        "coordinate": policy.coordinate,
        "is_last_stage": policy.is_last_stage,
        "reports_metrics": policy.reports_metrics,
        "without_adapters": without,
        "merged": [(box, view.cpu().clone().numpy()) for box, view in policy.boxes()] if lora else [],
        "has_logits": any(dims > 1 for dims in dims_of_head),
        "rows_of_head": sum(rows_of_head),
    }


def trained_export(model_dir: str, layout: dict[str, Any], samples: list[TrainSample], folder: str, steps: int) -> None:
    """A few optimizer steps, then the model in HF format."""
    from mgrpo.model_io.hf_export import export_hf

    policy = make_policy(model_dir, layout)
    # A large epsilon keeps Adam from blowing up the rounding of gradients near 0.
    policy.prepare_training(Optimizer(learning_rate=1e-2, adam_epsilon=1e-2), num_optimizer_steps=steps)
    packs, num_trained = own_packs(policy, samples, share_prompts=True, pack_length=64)
    for _ in range(steps):
        policy.train_step(
            policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.sum() / num_trained, None)
        )
    export_hf(policy, model_dir, folder, group=host_group())


def marks(model_dir: str, layout: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    """For each parameter whether this rank holds a part of it, and whether it is marked as a part."""
    policy = make_policy(model_dir, layout)
    whole = local_parameters(policy.shape, Layout(world_size=1), 0)
    return [
        (name, place.shape != whole[name].shape, getattr(policy.parameters.live[name], "tensor_model_parallel", False))
        for name, place in policy.parameters.places.items()
    ]


def make_sharded_policy(model_dir: str, layout: dict[str, Any]):
    """A policy that holds what it holds in training: ZeRO shards exist only with an optimizer."""
    policy = make_policy(model_dir, layout)
    policy.prepare_training(Optimizer(), num_optimizer_steps=1)
    return policy


def holdings(model_dir: str, layout: dict[str, Any]) -> Any:
    """The boxes that each rank holds in training."""
    return make_sharded_policy(model_dir, layout).holdings(host_group())


def send_weights(
    model_dir: str,
    layout: dict[str, Any],
    port: int,
    version: int,
    bucket_bytes: int = 1 << 14,
    engine: InferLayout | None = None,
) -> dict[str, Any]:
    """Join engine 0's transfer group and send it the model's weights once; what was sent."""
    from mgrpo.sync.channel import Sender
    from mgrpo.sync.group import connect_store
    from tests.unit.sync.ends import sent_bytes

    policy = make_sharded_policy(model_dir, layout)
    sender = Sender(
        policy.live_boxes(),
        holdings=policy.holdings(host_group()),
        model=policy.shape,
        train_layout=policy.layout,
        infer_layout=engine or InferLayout(),
        rank=policy.rank,
        dtype=torch.float32,
        store=connect_store("127.0.0.1", port, 30),
        host="127.0.0.1",
        port=port,
        bucket_bytes=bucket_bytes,
        timeout_s=30,
    )
    failures = sender.join({0: 0}) | sender.send(version, [0])
    assert not failures, failures
    digests = sender.digests()
    dist.all_reduce(digests, group=host_group())
    return {
        "sent": sent_bytes(sender),
        "bytes_moved": sender.plan.bytes_moved,
        "lower_bound": sender.plan.lower_bound,
        "digests": digests.tolist(),
    }


def random_samples(
    seed: int, groups: int = 5, group_size: int = 3, vocab: int = 125, *, groups_of_turns: int = 0
) -> list[TrainSample]:
    """Groups with prompts and responses of different lengths, some tokens masked, old logprobs off-policy.

    Args:
        groups_of_turns: further groups, whose responses have tokens that were not sampled; in the first sample none was.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups + groups_of_turns):
        prompt = rng.integers(3, vocab, rng.integers(1, 9)).astype(np.int32)
        samples += [_random_sample(rng, prompt, int(rng.integers(1, 9)), vocab, group) for _ in range(group_size)]
    with_turns = groups * group_size
    return samples[:with_turns] + [
        _with_turns(sample, rng.random(len(sample.tokens)) < (0.6 if number else 0.0))
        for number, sample in enumerate(samples[with_turns:])
    ]


def long_samples(seed: int, vocab: int = 125) -> list[TrainSample]:
    """A prompt of 71 tokens with completions of 97 and 23, beyond two chunks of a delta net and any window or original position."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, vocab, 71).astype(np.int32)
    return [_random_sample(rng, prompt, length, vocab, group=99) for length in (97, 23)]


def _random_sample(rng: np.random.Generator, prompt: np.ndarray, length: int, vocab: int, group: int) -> TrainSample:
    mask = np.ones(length, dtype=bool)
    mask[: int(rng.integers(0, length))] = rng.random() < 0.7
    return TrainSample(
        prompt_tokens=prompt,
        tokens=rng.integers(3, vocab, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=rng.normal(-4.8, 0.3, length).astype(np.float32),
        advantage=float(rng.normal()),
        group=group,
    )


def with_sets(samples: list[TrainSample], vocab: int = 125) -> list[TrainSample]:
    """The samples as if each token had been sampled from a set of 1 to 8; tokens that were not sampled have none."""
    rng = np.random.default_rng(11)

    def from_sets(sample: TrainSample) -> TrainSample:
        sizes = rng.integers(1, 9, len(sample.tokens)).astype(np.int32) * sample.is_predicted
        others = [rng.permutation(vocab).astype(np.int32) for _ in sizes]
        ids = [
            np.concatenate(([token], ids[ids != token]))[:size]
            for token, ids, size in zip(sample.tokens, others, sizes, strict=True)
        ]
        logprobs = (rng.normal(0, 0.3, len(sizes)) - np.log(np.maximum(sizes, 1))).astype(np.float32)
        kept = KeptTokens.of_sizes(np.concatenate(ids).astype(np.int32), sizes)
        return replace(sample, kept=kept, rollout_logprobs=np.where(sizes > 0, logprobs, sample.rollout_logprobs))

    return [from_sets(sample) for sample in samples]


def _with_turns(sample: TrainSample, is_sampled: np.ndarray) -> TrainSample:
    logprobs = np.where(is_sampled, sample.rollout_logprobs, np.float32(0))
    return replace(sample, is_sampled=is_sampled, loss_mask=sample.loss_mask & is_sampled, rollout_logprobs=logprobs)


def response_logits(model_dir: str, layout: dict[str, Any], samples: list[TrainSample]) -> dict[str, Any]:
    """This rank's vocabulary shard of the logits of every response row, by sample, in one pack."""
    return policy_logits(make_policy(model_dir, layout), samples)


def policy_logits(policy, samples: list[TrainSample]) -> dict[str, Any]:
    """The same of a policy."""
    packs, _ = own_packs(policy, samples, share_prompts=True, pack_length=4096)
    (microbatch,) = policy.microbatches(packs)
    captured = []
    if policy.is_last_stage:
        model = policy.chunks[-1]
        model.output_layer.register_forward_hook(
            lambda layer, args, output: captured.append(model.capped(output[0][:, 0]))
        )
    policy.score([microbatch], "old")
    cuts = microbatch.pack.response_cu_seqlens
    by_sample = {
        int(sample): captured[0][a:b].cpu().numpy()
        for sample, a, b in zip(microbatch.pack.samples, cuts[:-1], cuts[1:], strict=True)
        if captured
    }
    return {"logits": by_sample, "tensor_rank": policy.coordinate.tensor}


def head_operands(
    model_dir: str, layout: dict[str, Any], samples: list[TrainSample], **head: Any
) -> dict[str, np.ndarray] | None:
    """What this rank's LM head is given in bf16, its rows of the weight, and the logprobs; None before the last stage."""
    policy = make_policy(model_dir, layout, temperature=1.0, dtype=torch.bfloat16, **head)
    assert all(parameter.dtype == torch.bfloat16 for parameter in policy.parameters.live.values())
    packs, _ = own_packs(policy, samples, share_prompts=False, pack_length=4096)
    (microbatch,) = policy.microbatches(packs)
    given = []
    if policy.is_last_stage:
        policy.chunks[-1].output_layer.register_forward_pre_hook(lambda layer, args: given.append(args[0]))
    policy.score([microbatch], "old")
    if not given:
        return None
    model, rows = policy.chunks[-1], microbatch.response.indices
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    logprobs, targets = microbatch.logprobs["old"], torch.from_numpy(microbatch.pack.targets).long()
    return {
        "hidden": given[0].reshape(-1, policy.shape.hidden).float().numpy(),
        "weight": weight.detach().float().numpy()[: policy.chunks[-1].valid_cols],
        "logprobs": (logprobs if rows is None else logprobs[rows]).numpy(),
        "targets": (targets if rows is None else targets[rows]).numpy(),
        "ranks": np.array([policy.coordinate.tensor, policy.coordinate.context]),
    }


def blended(model_dir: str, dtype: str, alpha: float, times: int) -> dict[str, float]:
    """A policy moved towards one that is 1 larger everywhere, a little at a time: how far, and how far from the formula."""
    from mgrpo.policy.untrained_policy import UntrainedPolicy

    policy = make_policy(model_dir, {"tensor": 2}, dtype=getattr(torch, dtype))
    reference = UntrainedPolicy(policy.shape, policy.layout, dtype=policy.dtype, seed=1, temperature=policy.temperature)
    reference.load({box: values for box, values in policy.boxes()}.__getitem__)
    start = {name: parameter.detach().float().clone() for name, parameter in reference.parameters.live.items()}
    for parameter in policy.parameters.live.values():
        parameter.data.add_(1)
    for _ in range(times):
        reference.move_towards(policy, alpha)
    share = 1 - (1 - alpha) ** times
    error, moved = 0.0, []
    for name, parameter in reference.parameters.live.items():
        expected = start[name] + share * (policy.parameters.live[name].detach().float() - start[name])
        error = max(error, float((parameter.detach().float() - expected).abs().max()))
        moved.append(float((parameter.detach().float() - start[name]).mean()))
    return {"error": error, "moved": sum(moved) / len(moved)}


def decayed(model_dir: str, weight_decay: float, on_vectors: bool = False) -> dict[str, float]:
    """Largest relative change of matrices and of vectors by one step without any gradient."""
    policy = make_policy(model_dir, {})
    settings = Optimizer(learning_rate=0.1, weight_decay=weight_decay, set_weight_decay_on_bias_and_norm=on_vectors)
    policy.prepare_training(settings, num_optimizer_steps=1)
    before = {name: p.detach().clone() for name, p in policy.parameters.live.items()}
    packs, _ = own_packs(policy, random_samples(seed=0), share_prompts=True, pack_length=512)
    policy.train_step(policy.microbatches(packs), lambda logprobs, entropy, batch: (logprobs.sum() * 0.0, None))
    change = {
        n: ((policy.parameter(n) - weights).abs().max() / weights.abs().max()).item() for n, weights in before.items()
    }
    vectors = [c for n, c in change.items() if before[n].dim() == 1]
    return {"vectors": max(vectors), "matrices": min(c for n, c in change.items() if before[n].dim() == 2)}


def train_steps(
    model_dir: str,
    layout: dict[str, Any],
    samples: list[TrainSample],
    steps: int = 5,
    settings: dict[str, Any] | None = None,
    dtype: str = "float32",
    save_to: str | None = None,
    save_after: int = 0,
    resume_from: str | None = None,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Losses and gradient norms of several optimizer steps, and the bytes this rank holds after them.

    With `save_to` the state is saved after `save_after` steps; with `resume_from` the run continues after a saved step.
    """
    from mgrpo.checkpoint.reader import open_checkpoint
    from mgrpo.checkpoint.saver import Saver
    from mgrpo.checkpoint.train_state import MASTER, TrainState

    checkpoint = open_checkpoint(resume_from) if resume_from else None
    policy = make_policy(
        model_dir,
        layout,
        dtype=getattr(torch, dtype),
        settings=settings,
        checkpoint=checkpoint and (checkpoint, MASTER),
        lora=lora,
    )
    # A large epsilon keeps Adam from blowing up the rounding of gradients near 0.
    policy.prepare_training(Optimizer(learning_rate=1e-2, adam_epsilon=1e-2), num_optimizer_steps=steps)
    group = host_group()
    state = TrainState(policy, {}, group=group)
    done = 0
    if checkpoint:
        done = policy.optimizer_steps = checkpoint.step
        policy.num_updates = done
        state.restore_optimizer(checkpoint, num_updates=done)
        state.restore_random(checkpoint)
    packs, num_trained = own_packs(policy, samples, share_prompts=True, pack_length=64)

    def loss(logprobs, entropy, batch):
        own = -(logprobs * batch.loss_inputs.loss_mask).sum() / num_trained
        return own, float(own.detach())

    losses, norms, scales = [], [], []
    for step in range(done, steps):
        result = policy.train_step(policy.microbatches(packs), loss)
        total = torch.tensor(sum(result.measured) if policy.reports_metrics else 0.0, dtype=torch.float64)
        dist.all_reduce(total, group=group)
        losses.append(float(total))
        norms.append(result.grad_norm)
        scales.append(result.loss_scale)
        if save_to and step + 1 == save_after:
            saver = Saver(save_to, dist.get_rank(), dist.get_world_size(), keep_last_n=3)
            saver.save(step + 1, state.parts(), {"step": step + 1}, state.full_shapes(), "0123456789abcdef")
            dist.barrier()
    return {"losses": losses, "grad_norms": norms, "loss_scales": scales, "bytes": held_bytes(policy)}


def held_bytes(policy) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states that this rank keeps between steps."""
    from torch.distributed.tensor import DTensor

    def size(tensors) -> int:
        storages = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return sum(storages.values())

    parameters, gradients, states = [], [], []
    for chunk in policy.chunks:
        parameters += list(chunk.parameters())
        if policy.layout.sharding < 2:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                gradients.append(buffer.grad_data)
        else:
            for group in chunk.param_and_grad_buffer.parameter_groups:
                gradients.append(group.main_grad_buffer.data)
                if group.model_weight_buffer is not None:
                    parameters.append(group.model_weight_buffer.data)
    live = [tensor for tensor in parameters if not isinstance(tensor, DTensor)]
    kept = {tensor.untyped_storage().data_ptr() for tensor in live}
    for shard in policy.shards:
        states += [shard.moment("exp_avg"), shard.moment("exp_avg_sq")]
        if shard.main.untyped_storage().data_ptr() not in kept:
            states.append(shard.main)
    return {"parameters": size(live), "gradients": size(gradients), "optimizer": size(states)}


def sabotaged_gradients(sabotage: str, **arguments: Any) -> dict[str, Any]:
    """`gradients` with one thing broken."""
    from unittest.mock import patch

    from megatron.core.tensor_parallel import layers

    from mgrpo.models.placement.layout_rules import Stacked
    from mgrpo.parallel.packed import context, delta_rule
    from mgrpo.parallel.packed.attention import PackedAttention
    from mgrpo.policy import microbatch, model
    from mgrpo.policy.layers import latent_attention
    from mgrpo.policy.optimizer import PolicyOptimizer

    def doubled(*args, **kwargs):
        return reduce(*args, **kwargs) * 2

    def swapped(self, tensors, rank, size):
        return place(Stacked(self.names[::-1], self.dim), tensors, rank, size)

    def own_only(x, group=None):
        return gather(x, tensor_parallel_output_grad=False, group=group)

    def without_first(values, places, num_responses):
        cut = values.detach().clone()
        cut[:, 1:] = values[:, 1:]
        return whole(cut, places, num_responses)

    def with_own_epsilon(config, size, eps):
        return norm(config, size, config.layernorm_epsilon)

    def with_larger_sinks(self, *args):
        return attend(self, *args[:-1], args[-1] * 1.0003)

    def with_late_branch(cu_seqlens, positions, branches, **place):
        is_late = (branches == 2) & (np.cumsum(branches == 2) > 3)
        is_late[cu_seqlens[1 + np.searchsorted(cu_seqlens[1:], is_late.argmax(), "right")] :] = False
        return describe(cu_seqlens, positions + is_late, branches, **place)

    # The package has a function of the module's name.
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    reduce, place = layers.reduce_from_tensor_model_parallel_region, Stacked.place
    gather, whole = context.gather_from_sequence_parallel_region, model.whole_responses
    norm, attend, describe = latent_attention.RMSNorm, PackedAttention.attend, microbatch.describe
    broken = {
        "doubled_all_reduce": patch.object(layers, "reduce_from_tensor_model_parallel_region", doubled),
        "missing_sequence_parallel_sum": patch.object(
            finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *args: None
        ),
        "swapped_gate_and_up": patch.object(Stacked, "place", swapped),
        "missing_context_sum": patch.object(context, "gather_from_sequence_parallel_region", own_only),
        "boundary_token_untrained": patch.object(model, "whole_responses", without_first),
        "missing_tied_sum": patch.object(PolicyOptimizer, "_sum_tied_gradients", lambda self: None),
        "other_latent_epsilon": patch.object(latent_attention, "RMSNorm", with_own_epsilon),
        "larger_sinks": patch.object(PackedAttention, "attend", with_larger_sinks),
        "late_branch": patch.object(microbatch, "describe", with_late_branch),
        "undecayed_states": _altered(delta_rule.chunked_delta_rule, "state * kept_ +", "state +"),
    }[sabotage]
    with broken:
        return gradients(**arguments)


def _altered(function: Callable[..., Any], statement: str, other: str) -> Any:
    """A patch of a module's function in which one statement is another."""
    from unittest.mock import patch

    source, module = inspect.getsource(function), sys.modules[function.__module__]
    assert statement in source
    made: dict[str, Any] = {}
    exec(source.replace(statement, other), vars(module).copy(), made)
    return patch.object(module, function.__name__, made[function.__name__])


def gradients_by_deep_ep(**arguments: Any) -> dict[str, Any]:
    """`gradients` where tokens reach their experts by DeepEP, and the rows that it sent."""
    from tests.ranks.deep_ep_on_gloo import Buffer, installed

    before = Buffer.dispatched
    with installed():
        arguments["settings"] = {"moe_token_dispatcher_type": "deepep"} | (arguments.get("settings") or {})
        found = gradients(**arguments)
    return found | {"dispatched": Buffer.dispatched - before}


def routing(model_dir: str, layout: dict[str, Any], samples: list[TrainSample], replays: bool) -> dict[str, Any]:
    """How many choices of experts differ between the score before an update and the training pass after it."""
    policy = make_policy(model_dir, layout, settings={"routing_replay": "learner"})
    policy.prepare_training(Optimizer(learning_rate=0.05), num_optimizer_steps=2)
    packs, num_trained = own_packs(policy, samples, share_prompts=True, pack_length=512)
    microbatches = policy.microbatches(packs)
    chosen: list[torch.Tensor] = []
    routers = [module for chunk in policy.chunks for module in chunk.modules() if hasattr(module, "router_replay")]
    for router in routers:
        router.register_forward_hook(lambda module, args, output: chosen.append(output[1].clone()))

    def loss(logprobs, entropy, batch):
        return -logprobs.sum() / num_trained, float(logprobs.detach().sum())

    policy.score(microbatches, "old", replays_routing=True)
    before, chosen[:] = list(chosen), []
    if not replays:
        for microbatch in microbatches:
            microbatch.routing.clear()
    policy.train_step(microbatches, loss)
    chosen.clear()
    result = policy.train_step(microbatches, loss)
    changed = sum(int((a != b).sum()) for a, b in zip(before, chosen, strict=True))
    return {"changed": changed, "loss": sum(result.measured)}


def replayed_scores(model_dir: str, layout: dict[str, Any], samples: list[TrainSample]) -> dict[str, Any]:
    """How scores of the policy and of a reference differ from those in training, under experts that engines chose."""
    policy = make_policy(model_dir, layout, settings={"routing_replay": "rollout"})
    policy.prepare_training(Optimizer(learning_rate=0.0), num_optimizer_steps=1)
    packs, num_trained = own_packs(policy, samples, share_prompts=True, pack_length=64)
    microbatches = policy.microbatches(packs)
    policy.score(microbatches, "old", replays_routing=True)
    policy.score(microbatches, "ref")

    def loss(logprobs, entropy, batch):
        ratio = (logprobs.detach() - batch.logprobs["old"]).exp()
        return -logprobs.sum() / num_trained, (ratio, (logprobs.detach() - batch.logprobs["ref"]).abs())

    measured = policy.train_step(microbatches, loss).measured
    fixed, differing = policy.routing.take_counts()
    ratios, distances = (torch.cat(parts) for parts in zip(*measured, strict=True))
    return {
        "ratio": float(ratios[(ratios - 1).abs().argmax()]),
        "reference": float(distances.max()),
        "fixed": fixed,
        "differing": differing,
    }


def expert_loads(
    model_dir: str, layout: dict[str, Any], samples: list[TrainSample], settings: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    """Choices of the experts of each layer: of a batch that is scored and trained, and of what was trained since (nothing)."""
    policy = make_policy(model_dir, layout, settings=settings)
    policy.prepare_training(Optimizer(learning_rate=0.0), num_optimizer_steps=1)
    packs, _ = own_packs(policy, samples, share_prompts=False, pack_length=64)
    microbatches = policy.microbatches(packs)
    policy.score(microbatches, "old")
    policy.train_step(microbatches, lambda logprobs, entropy, batch: (-logprobs.sum(), 0.0))
    assert policy.expert_loads
    group = host_group()
    return policy.expert_loads.take(group).tolist(), policy.expert_loads.take(group).tolist()


def visible_gpus() -> str | None:
    """What the environment lets this rank see."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
