"""What the ranks of a distributed test run. Module-level functions with plain arguments and results."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from mgrpo import algo, packing
from mgrpo.config.loss import LossConfig
from mgrpo.config.schema import Optimizer
from mgrpo.layout import Layout
from mgrpo.models.family import read_hf_config, shape_of
from mgrpo.types import TrainSample


def make_policy(
    model_dir: str,
    layout: dict[str, Any],
    temperature: float = 0.8,
    logits_chunk: int = 0,
    dtype: torch.dtype = torch.float32,
):
    """A policy on `layout`, after clearing the groups of the case before."""
    from megatron.core import parallel_state

    from mgrpo.policy.policy import Policy

    parallel_state.destroy_model_parallel()
    policy = Policy(
        shape_of(read_hf_config(model_dir)),
        Layout(world_size=dist.get_world_size(), **layout),
        dtype=dtype,
        seed=1,
        temperature=temperature,
        logits_chunk=logits_chunk,
    )
    policy.load(model_dir)
    return policy


def own_packs(policy, samples: list[TrainSample], *, share_prompts: bool, pack_length: int):
    """Packs of this rank for one mini-batch, and the tokens trained over all ranks."""
    packs = packing.pack_step(
        samples,
        pack_length=pack_length,
        dp=policy.layout.data,
        num_mini_batches=1,
        multiple_of=policy.layout.tensor if policy.layout.sequence_parallel else 1,
        share_prompts=share_prompts,
    )
    arrays = packing.to_arrays(packs)
    return packing.from_arrays(arrays, policy.place.data)[0], int(arrays["num_trained_tokens"][0])


def gradients(
    model_dir: str,
    layout: dict[str, Any],
    samples: list[TrainSample],
    loss: dict[str, Any],
    share_prompts: bool = True,
    pack_length: int = 64,
    logits_chunk: int = 0,
) -> dict[str, Any]:
    """One training step: loss, logprobs by sample, gradient norm and every gradient as boxes of HF tensors."""
    policy = make_policy(model_dir, layout, logits_chunk=logits_chunk)
    head_calls = []
    if policy.is_last_stage:
        policy.model.output_layer.register_forward_hook(lambda *call: head_calls.append(1))
    policy.prepare_training(Optimizer(learning_rate=0.0, max_grad_norm=0.0), num_optimizer_steps=1)
    packs, num_trained = own_packs(policy, samples, share_prompts=share_prompts, pack_length=pack_length)
    microbatches = policy.microbatches(packs)
    settings = LossConfig(**loss)
    denominator = algo.loss_denominator(num_trained, settings)

    def grpo_loss(logprobs, entropy, batch):
        old = torch.from_numpy(batch.pack.rollout_logprobs.copy())
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
        return result.loss, (float(result.loss), by_sample)

    result = policy.train_step(microbatches, grpo_loss)
    gather_gradient_shards(policy.model)
    boxes = [
        (box, policy.parameters.live[name].main_grad[piece.region].clone().numpy())
        for name, place in policy.parameters.places.items()
        for piece, box in ((piece, piece.box) for piece in place.pieces)
    ]
    return {
        "loss": sum(loss for loss, _ in result.measured),
        "samples": {k: v for _, by_sample in result.measured for k, v in by_sample.items()},
        "grad_norm": result.grad_norm,
        "gradients": boxes,
        "place": policy.place,
        "is_last_stage": policy.is_last_stage,
        "head_calls": len(head_calls),
    }


def gather_gradient_shards(model) -> None:
    """Under the distributed optimizer each data-parallel rank holds one reduced shard of every bucket: complete them."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(shards, shards[group.rank()].clone(), group=group)


def trained_export(model_dir: str, layout: dict[str, Any], samples: list[TrainSample], folder: str, steps: int) -> None:
    """A few optimizer steps, then the model in HF format."""
    from mgrpo.checkpoint.hf_export import export_hf

    policy = make_policy(model_dir, layout)
    # A large epsilon keeps Adam from blowing up the rounding of gradients near 0.
    policy.prepare_training(Optimizer(learning_rate=1e-2, adam_epsilon=1e-2), num_optimizer_steps=steps)
    packs, num_trained = own_packs(policy, samples, share_prompts=True, pack_length=64)
    for _ in range(steps):
        policy.train_step(
            policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.sum() / num_trained, None)
        )
    export_hf(policy, model_dir, folder, group=dist.new_group(backend="gloo"))


def send_weights(
    model_dir: str, layout: dict[str, Any], port: int, generation: int, version: int, bucket_bytes: int = 1 << 14
) -> dict[str, Any]:
    """Join engine 0's transfer group, send it the model's weights once, and say what was sent."""
    from mgrpo.layout import InferLayout
    from mgrpo.sync.channel import Sender, connect_store

    policy = make_policy(model_dir, layout)
    sender = Sender(
        policy.parameters.boxes(),
        model=policy.shape,
        train_layout=policy.layout,
        infer_layout=InferLayout(engines=1, tensor=1),
        rank=policy.rank,
        dtype=torch.float32,
        store=connect_store("127.0.0.1", port, 30),
        host="127.0.0.1",
        port=port,
        bucket_bytes=bucket_bytes,
        timeout_s=30,
    )
    sender.join(0, generation)
    sent = sender.send(version)
    digests = sender.digests()
    dist.all_reduce(digests)
    return {
        "sent": sent,
        "bytes_moved": sender.plan.bytes_moved,
        "lower_bound": sender.plan.lower_bound,
        "digests": digests.tolist(),
    }


def random_samples(seed: int, groups: int = 5, group_size: int = 3, vocab: int = 125) -> list[TrainSample]:
    """Groups with prompts and responses of different lengths, some tokens masked, old logprobs off-policy."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(3, vocab, rng.integers(1, 9)).astype(np.int32)
        for _ in range(group_size):
            length = int(rng.integers(1, 9))
            mask = np.ones(length, dtype=bool)
            mask[: int(rng.integers(0, length))] = rng.random() < 0.7
            samples.append(
                TrainSample(
                    prompt_tokens=prompt,
                    tokens=rng.integers(3, vocab, length).astype(np.int32),
                    loss_mask=mask,
                    rollout_logprobs=rng.normal(-4.8, 0.3, length).astype(np.float32),
                    advantage=float(rng.normal()),
                    group=group,
                )
            )
    return samples


def response_logits(model_dir: str, layout: dict[str, Any], samples: list[TrainSample]) -> dict[str, Any]:
    """This rank's vocabulary shard of the logits of every response row, by sample, in one pack."""
    policy = make_policy(model_dir, layout)
    packs, _ = own_packs(policy, samples, share_prompts=True, pack_length=4096)
    (microbatch,) = policy.microbatches(packs)
    captured = []
    if policy.is_last_stage:
        policy.model.output_layer.register_forward_hook(lambda layer, args, output: captured.append(output[0][:, 0]))
    policy.score([microbatch], "old")
    cuts = microbatch.pack.response_cu_seqlens
    by_sample = {
        int(sample): captured[0][a:b].numpy()
        for sample, a, b in zip(microbatch.pack.samples, cuts[:-1], cuts[1:], strict=True)
        if captured
    }
    return {"logits": by_sample, "tensor_rank": policy.place.tensor}


def broadcast_messages(message: str) -> list[Any]:
    """What a rank hears over the channel: arrays, heartbeats, and an error."""
    from mgrpo.parallel.broadcast import Action, Channel

    channel = Channel(timeout_s=20)
    is_head = dist.get_rank() == 0
    sent = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((0, 4), np.float32), "c": np.array([True])}
    heard = [channel.action(Action.HEARTBEAT if is_head else None), channel.action(Action.RUN if is_head else None)]
    heard += [{name: array.tolist() for name, array in channel.arrays(sent if is_head else None).items()}]
    try:
        channel.action(Action.ERROR if is_head else None, message if is_head else "")
        heard.append("")
    except RuntimeError as err:
        heard.append(str(err))
    return heard


class FakeHead:
    """Stands for rank 0's other half where a test hands the trainer its rollouts itself."""

    reward_weights: ClassVar[dict] = {}


def learn(
    model_dir: str,
    settings: dict[str, Any],
    groups: list,
    folder: str,
    steps: int = 2,
) -> dict[str, float]:
    """`Learner.learn` on given rollouts: metrics of the last step, and the model in `folder`."""
    from megatron.core import parallel_state

    from mgrpo.checkpoint.hf_export import export_hf
    from mgrpo.config import from_values
    from mgrpo.rollout.controller import Rollouts
    from mgrpo.trainer import Trainer

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    config = from_values(settings | {"model_name_or_path": model_dir, "model_dtype": "float32"})
    is_head = dist.get_rank() == 0
    trainer = Trainer(config, FakeHead() if is_head else None)
    for _ in range(steps):
        rollouts = Rollouts(groups=groups, dropped=[], generate_s=0, score_s=0)
        arrays = trainer.channel.arrays(trainer.pack(rollouts).arrays if is_head else None)
        results = trainer.learner.learn(arrays)
        metrics = trainer.learner.reduce(results)
    export_hf(trainer.policy, model_dir, folder, group=trainer.host_group)
    return metrics | {"steps": len(results), "grad_norm": results[-1].grad_norm if results else 0.0}


def rates(model_dir: str, settings: dict[str, Any], is_empty: list[int]) -> list[float]:
    """Learning rate at the start of each step that trains, given which steps have no group to train on."""
    from megatron.core import parallel_state

    from mgrpo.config import from_values
    from mgrpo.rollout.controller import Rollouts
    from mgrpo.trainer import Trainer
    from tests.dist.test_learning import scored_groups

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    trainer = Trainer(from_values(settings | {"model_name_or_path": model_dir, "model_dtype": "float32"}), FakeHead())
    found = []
    for empty in is_empty:
        batch = trainer.pack(Rollouts(groups=[] if empty else scored_groups(), dropped=[], generate_s=0, score_s=0))
        found += [result.learning_rate for result in trainer.learner.learn(batch.arrays)[:1]]
    return found


def blended(model_dir: str, dtype: str, alpha: float, times: int) -> dict[str, float]:
    """A policy moved towards one that is 1 larger everywhere, a little at a time: how far, and how far from the formula."""
    policies = [make_policy(model_dir, {"tensor": 2}, dtype=getattr(torch, dtype)) for _ in range(2)]
    reference, policy = policies
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
        n: ((p.detach() - before[n]).abs().max() / before[n].abs().max()).item()
        for n, p in policy.parameters.live.items()
    }
    vectors = [c for n, c in change.items() if before[n].dim() == 1]
    return {"vectors": max(vectors), "matrices": min(c for n, c in change.items() if before[n].dim() == 2)}
