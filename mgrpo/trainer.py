"""One GRPO run: open this file first.

Every learner rank runs `Trainer.fit`; rank 0 also has the `Head` with the controller, and hands each step to the others.

    data -> prompts -> rollout -> rewards -> advantages -> packs          (controller, rank 0)
                          ^                                  |
                          |                                  v
              engines <- sync <- shards of <- policy.train_step(packs, loss)   (all learners)
              version + 1      the policy
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mgrpo import algo, ops, packing
from mgrpo.algo.samples import train_samples
from mgrpo.checkpoint.hf_export import export_hf
from mgrpo.config import Config
from mgrpo.config.validate import layout_of
from mgrpo.evaluation import mean_score, summarise
from mgrpo.head import Head
from mgrpo.layout import InferLayout
from mgrpo.models.family import read_hf_config, shape_of
from mgrpo.parallel import backend
from mgrpo.parallel.attention import shares_prompts
from mgrpo.parallel.broadcast import Action, Channel
from mgrpo.planner.memory import choose_logits_chunk
from mgrpo.policy.policy import Microbatch, Policy, StepResult
from mgrpo.rollout.controller import Rollouts
from mgrpo.sync.channel import Sender, connect_store, open_store
from mgrpo.telemetry.curve import draw_reward_curve
from mgrpo.telemetry.versions import found

HEARTBEAT_S = 5.0
PATIENCE_S = 60.0
"""A learner that hears nothing from rank 0 for this long, heartbeats included, gives up."""
MAX_SKIPPED = 3
"""Steps with a non-finite gradient in a row that end the run."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to."""

    output_dir: Path
    steps: int
    before: dict[str, float]
    """Metrics of the evaluation before training; empty without held-out data."""
    after: dict[str, float]
    """The same after training."""
    exported: Path | None
    """Folder of the trained model in Hugging Face format."""


class Trainer:
    """One learner rank's part in a run. Every rank makes one; `head` is None except on rank 0."""

    def __init__(self, config: Config, head: Head | None) -> None:
        self.config, self.head = config, head
        self.channel = Channel(timeout_s=PATIENCE_S)
        self.host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.experiment.backend_timeout))
        self.layout = layout_of(config, dist.get_world_size())
        self.shape = shape_of(read_hf_config(config.model.model_name_or_path))
        self.logits_chunk = self._choose_logits_chunk()
        self.policy = self._load_policy()
        self.policy.prepare_training(config.optimizer, num_optimizer_steps=config.num_optimizer_steps)
        self.reference = self._load_policy() if config.algorithm.beta != 0 else None
        self.version = 0
        self.skipped = 0
        # Ranks load at their own speed; from here on nobody keeps rank 0 waiting for long.
        dist.barrier(group=self.host_group)

    def _load_policy(self) -> Policy:
        policy = Policy(
            self.shape,
            self.layout,
            dtype=DTYPES[self.config.model.model_dtype],
            seed=self.config.experiment.seed,
            temperature=self.config.rollout.temperature,
            logits_chunk=self.logits_chunk,
        )
        policy.load(self.config.model.model_name_or_path)
        return policy

    def _choose_logits_chunk(self) -> int:
        # The smallest device decides for all: ranks that differ would meet in different collectives.
        device_bytes = torch.tensor(backend.device_bytes())
        dist.all_reduce(device_bytes, dist.ReduceOp.MIN, group=self.host_group)
        return choose_logits_chunk(
            self.config.parallel.logits_chunk,
            shape=self.shape,
            layout=self.layout,
            dtype_bytes=DTYPES[self.config.model.model_dtype].itemsize,
            pack_length=self.config.parallel.pack_length,
            has_reference=self.config.algorithm.beta != 0,
            device_bytes=int(device_bytes),
        )

    def fit(self) -> TrainResult:
        """The whole run."""
        config = self.config
        self.wait_for(self.head and self.head.get_ready())
        self.connect_engines()
        self.sync()
        before = self.evaluate("before training")
        for step in range(1, config.num_training_steps + 1):
            self.step(step)
            if self.evaluates_after(step):
                self.evaluate(f"step {step}", before, step)
            if _is_due(step, config.checkpoint.save_freq) and step < config.num_training_steps:
                self.export(step)
        after = self.evaluate("after training", before, config.num_training_steps)
        exported = self.export(config.num_training_steps) if config.checkpoint.save_final else None
        if self.head:
            self.head.writer.close()
            draw_reward_curve(
                self.output_dir / "metrics.jsonl",
                self.output_dir / "reward_curve.png",
                title=f"{config.experiment.exp_name}: reward during training",
            )
            self.head.progress.finish(before=before or None, after=after or None)
        return TrainResult(
            output_dir=self.output_dir,
            steps=config.num_training_steps,
            before=before,
            after=after,
            exported=exported,
        )

    def step(self, step: int) -> None:
        """Sample, score, train on every mini-batch and epoch, and give the engines the new weights."""
        clock = _Clock()
        rollouts, packs = self.wait_for(self.head and self.head.controller.next_batch(), self.pack) or (None, None)
        if self.head and step < self.config.num_training_steps and not self.evaluates_after(step):
            self.head.controller.prepare()
        arrays = self.channel.arrays(packs)
        clock.split("wait")
        results = self.learn(arrays)
        measured = self.reduce(results)
        clock.split("train")
        if any(result.is_finite for result in results):
            self.version += 1
            self.sync(check=self.version == 1 or _is_due(step, self.config.engine.weight_sync_check_every))
        clock.split("sync")
        if self.head:
            self.report(step, rollouts, arrays, results, measured, clock)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows training step `step`, the last one's apart."""
        return _is_due(step, self.config.experiment.local_eval_every) and step < self.config.num_training_steps

    def wait_for(self, future: Future | None, then: Callable[[Any], Any] = lambda result: result) -> Any:
        """Wait for rank 0's `future`; returns `then` of its result there, None on the others.

        While it lasts rank 0 tells the others that it is alive; when it or `then` fails, all ranks end with its message.
        """
        if self.head is None:
            while self.channel.action() is Action.HEARTBEAT:
                pass
            return None
        while not wait([future], timeout=HEARTBEAT_S).done:
            self.channel.action(Action.HEARTBEAT)
        try:
            result = then(future.result())
        except Exception as err:
            self.channel.action(Action.ERROR, f"rank 0: {err}")
            raise
        self.channel.action(Action.RUN)
        return result

    def pack(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, np.ndarray]]:
        """Advantages, then packs for every mini-batch and data-parallel rank, as arrays to broadcast."""
        config = self.config
        share = config.parallel.share_prompts
        # Under sequence parallelism the tokens of a pack are split over the tensor ranks.
        multiple = self.layout.tensor if self.layout.sequence_parallel else 1
        packs = packing.pack_step(
            train_samples(rollouts.groups, normalization=config.algorithm.advantage_normalization_type),
            pack_length=-(-config.parallel.pack_length // multiple) * multiple,
            dp=self.layout.data,
            num_mini_batches=config.algorithm.num_mini_batches,
            multiple_of=multiple,
            share_prompts=shares_prompts() if share == "auto" else share,
        )
        return rollouts, packing.to_arrays(packs)

    def learn(self, arrays: dict[str, np.ndarray]) -> list[StepResult]:
        """One optimizer step for each mini-batch and epoch; mini-batches without a trained token are passed over."""
        algorithm = self.config.algorithm
        mini_batches = [
            (self.policy.microbatches(packs), int(num_trained))
            for packs, num_trained in zip(
                packing.from_arrays(arrays, self.policy.place.data), arrays["num_trained_tokens"], strict=True
            )
            if num_trained
        ]
        for microbatches, _ in mini_batches:
            if self.reference:
                self.reference.score(microbatches, "ref")
            if algorithm.num_epochs * algorithm.num_mini_batches > 1:
                self.policy.score(microbatches, "old")
        return [
            self.policy.train_step(microbatches, self.loss(num_trained))
            for _ in range(algorithm.num_epochs)
            for microbatches, num_trained in mini_batches
        ]

    def loss(self, num_trained: int) -> Any:
        """The GRPO loss of one micro-batch, divided by the denominator of its whole mini-batch."""
        config = self.config.loss
        denominator = algo.loss_denominator(num_trained, config)

        def grpo_loss(
            logprobs: torch.Tensor, entropy: torch.Tensor, batch: Microbatch
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
            pack = batch.loss_inputs
            result = algo.policy_loss(
                logprobs,
                batch.logprobs.get("old", logprobs.detach()),
                pack.advantages,
                pack.loss_mask,
                pack.response_cu_seqlens,
                config=config,
                ref_logprobs=batch.logprobs.get("ref"),
                rollout_logprobs=pack.rollout_logprobs,
                denominator=denominator,
            )
            entropy_sum = torch.stack((entropy.where(pack.loss_mask, 0.0).sum(), pack.loss_mask.sum()))
            return result.loss, (
                torch.stack([*result.metrics.values(), entropy_sum.float()]),
                torch.stack(list(result.maxima.values())),
            )

        return grpo_loss

    def reduce(self, results: Sequence[StepResult]) -> dict[str, float]:
        """Metrics over all mini-batches and ranks; every trained token counts once."""
        config = self.config.loss
        names = [*algo.metric_names(config), "policy/entropy_avg"]
        sums = torch.zeros(len(names), 2, dtype=torch.float64)
        maxima = torch.full((len(algo.maxima_names(config)),), -torch.inf, dtype=torch.float64)
        if self.policy.is_last_stage and self.policy.place.tensor == 0:
            for own_sums, own_maxima in (measured for result in results for measured in result.measured):
                sums += own_sums.to(sums)
                maxima = torch.maximum(maxima, own_maxima.to(maxima))
        dist.all_reduce(sums, group=self.host_group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.host_group)
        self.skipped = 0 if all(result.is_finite for result in results) else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise RuntimeError(
                f"{MAX_SKIPPED} steps in a row had a gradient that is not finite, and were skipped; lower learning_rate="
                f"{self.config.optimizer.learning_rate:g} or look at the rewards; exports lie in {self.output_dir / 'hf'}"
            )
        return algo.reduce_metrics(
            dict(zip(names, sums, strict=True)), dict(zip(algo.maxima_names(config), maxima, strict=True))
        )

    def connect_engines(self) -> None:
        """Plan the weight sync and form one transfer group with each engine."""
        settings = self.config.engine
        one_machine = settings.ray_address is None and _num_machines() == 1
        host = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]
        if self.head:
            store, port = open_store(host, settings.weight_sync_timeout)
            self.channel.arrays({"port": np.array(port)})
        else:
            port = int(self.channel.arrays()["port"])
            store = connect_store(host, port, settings.weight_sync_timeout)
        self.sender = Sender(
            self.policy.parameters.boxes(),
            model=self.shape,
            train_layout=self.layout,
            infer_layout=InferLayout(engines=settings.vllm_num_engines, tensor=settings.vllm_tensor_parallel_size),
            rank=self.policy.rank,
            dtype=self.policy.dtype,
            store=store,
            host=host,
            port=port,
            bucket_bytes=settings.weight_sync_bucket_mb << 20,
            timeout_s=settings.weight_sync_timeout,
        )
        for engine in range(settings.vllm_num_engines):
            joining = self.head and self.head.cluster.join(engine, self.sender.invitation(engine, generation=0))
            with self.engines_first(joining):
                self.sender.join(engine, generation=0)
            self.wait_for(self.head and self.head.finish(joining, "join the weight-transfer group"))
        if self.head:
            self.head.progress.say(found(is_extension_compiled=ops.build_info()["compiled"]))
            if self.logits_chunk:
                self.head.progress.say(f"LM head: {self.logits_chunk} columns at a time, whole logits never exist")
            plan = self.sender.plan
            self.head.progress.say(
                f"weight sync: {len(plan.transfers)} slices, {plan.bytes_moved / 1e6:.2f} MB a step "
                f"(lower bound {plan.lower_bound / 1e6:.2f} MB)"
            )

    def sync(self, *, check: bool = False) -> None:
        """Give every engine the present weights; with `check`, prove by digests that it holds exactly these."""
        receiving = self.head and self.head.cluster.receive_weights(self.version, check)
        with self.engines_first(receiving):
            self.sender.send(self.version)
        if check:
            truth = self.sender.digests()
            dist.all_reduce(truth, group=self.host_group)
        self.wait_for(self.head and self.head.finish(receiving, f"receive weights, version {self.version}"))
        if self.head and check:
            self.sender.compare(self.version, truth)

    @contextmanager
    def engines_first(self, calls: list[Any] | None) -> Iterator[None]:
        """When the learners' end of a sync fails, an engine's own words come before the learners' time-out."""
        try:
            yield
        except RuntimeError:
            if self.head:
                self.head.cluster.finish(calls, "take part in the weight sync", timeout_s=1)
            raise

    def evaluate(self, when: str, before: dict[str, float] | None = None, step: int = 0) -> dict[str, float]:
        """Sample the held-out prompts; metrics on rank 0, nothing elsewhere or without held-out data."""
        if not self.config.data.dataset_mixer_eval_list:
            return {}
        rollouts: Rollouts | None = self.wait_for(self.head and self.head.evaluation())
        if self.head is None:
            return {}
        metrics = summarise(rollouts.groups)
        self.head.writer.write(step, {"policy_version": self.version, **metrics, "time/eval": rollouts.generate_s})
        self.head.progress.evaluation(metrics, when=when, before=before)
        return metrics

    def export(self, step: int) -> Path:
        """Write the model in Hugging Face format."""
        folder = self.output_dir / "hf" / f"step_{step}"
        export_hf(self.policy, self.config.model.model_name_or_path, folder, group=self.host_group)
        return folder

    def report(
        self,
        step: int,
        rollouts: Rollouts,
        arrays: dict[str, np.ndarray],
        results: Sequence[StepResult],
        measured: dict[str, float],
        clock: _Clock,
    ) -> None:
        """One line of metrics, names as in Open Instruct."""
        groups = rollouts.groups
        completions = [completion for scored in groups for completion in scored.group.completions]
        rewards = np.stack([scored.rewards for scored in groups])
        parts = [score.parts for scored in groups for score in scored.scores]
        names = sorted({name for part in parts for name in part})
        lengths = np.array([len(completion.tokens) for completion in completions])
        seconds = clock.seconds
        metrics = {
            "policy_version": self.version,
            "episode": step * self.config.batch_size,
            "scores": mean_score(rewards),
            "val/no_score_rate": float(np.isnan(rewards).mean()),
            **{f"objective/{name}_reward": mean_score([p[name] for p in parts if name in p]) for name in names},
            **measured,
            "val/sequence_lengths": float(lengths.mean()),
            "val/stop_rate": float(np.mean([completion.finish_reason == "stop" for completion in completions])),
            "val/num_step_tokens": int(arrays["sizes"][:, 0].sum()),
            "optim/grad_norm": results[-1].grad_norm if results else 0.0,
            "lr": results[-1].learning_rate if results else 0.0,
            "optim/steps": len(results),
            "optim/skipped_steps": sum(not result.is_finite for result in results),
            "sync/bytes": self.sender.plan.bytes_moved,
            "learner_tokens_per_second_step": int(lengths.sum()) / sum(seconds.values()),
            "time/generate": rollouts.generate_s,
            "time/score": rollouts.score_s,
            "time/train": seconds["train"] + seconds["wait"] - rollouts.generate_s - rollouts.score_s,
            "time/sync": seconds["sync"],
            "time/total": sum(seconds.values()),
        }
        self.head.writer.write(step, metrics)
        self.head.progress.update(step, metrics)

    def close(self) -> None:
        """Leave all process groups; every rank must call."""
        dist.barrier(group=self.host_group)
        backend.leave_process_groups()

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.experiment.output_dir)


class _Clock:
    """Seconds between the splits of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def split(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now


def _num_machines() -> int:
    """torchrun's nodes."""
    return dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
