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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mgrpo import ops, packing
from mgrpo.algo.samples import train_samples
from mgrpo.config import Config
from mgrpo.config.derived import layout_of
from mgrpo.layout import InferLayout
from mgrpo.model_io.hf_export import export_hf
from mgrpo.models.family import read_hf_config, shape_of
from mgrpo.parallel import backend
from mgrpo.parallel.attention import shared_prompts_pay
from mgrpo.parallel.broadcast import Action, Channel
from mgrpo.policy.policy import StepResult
from mgrpo.rollout.controller import Rollouts
from mgrpo.run.head import Head
from mgrpo.run.learner import Learner
from mgrpo.run.resume import States
from mgrpo.sync.channel import Sender, connect_store, open_store
from mgrpo.telemetry.batch import batch_metrics
from mgrpo.telemetry.curve import draw_reward_curve
from mgrpo.telemetry.versions import found
from mgrpo.types import PackedBatch, TrainSample

HEARTBEAT_S = 5.0
PATIENCE_S = 60.0
"""A learner that hears nothing from rank 0 for this long, heartbeats included, gives up."""
MAX_SKIPPED = 3
"""Steps with a non-finite gradient in a row that end the run."""


class Stopped(Exception):
    """The run was asked to end (SIGTERM), and its state is saved."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What rank 0 knows of a step before it trains."""

    rollouts: Rollouts
    samples: list[TrainSample]
    packs: list[PackedBatch]
    """Of one pass over the samples."""
    arrays: dict[str, np.ndarray]
    """Every pass's packs, to broadcast."""


class Trainer:
    """One learner rank's part in a run. Every rank makes one; `head` is None except on rank 0."""

    def __init__(self, config: Config, head: Head | None) -> None:
        self.config, self.head = config, head
        self.channel = Channel(timeout_s=PATIENCE_S)
        self.host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.experiment.backend_timeout))
        self.layout = layout_of(config, dist.get_world_size())
        self.shape = shape_of(read_hf_config(config.model.model_name_or_path))
        self.states = States(config, self.channel, self.host_group)
        checkpoint = self.states.open(head and head.resume_from, self.shape)
        self.learner = Learner(
            config, shape=self.shape, layout=self.layout, host_group=self.host_group, checkpoint=checkpoint
        )
        self.policy = self.learner.policy
        self.done = 0
        """Training steps."""
        self.is_followed_up = False
        """Whether evaluation and export after step `done` are done, too."""
        self.version = 0
        self.skipped = 0
        self.num_excluded = 0
        self.before: dict[str, float] = {}
        self.saved = 0
        """The step of the newest saved state."""
        self.resumed = checkpoint and checkpoint.state
        if self.resumed:
            self.load_state_dict(self.resumed)
            checkpoint.close()
        # Ranks load at their own speed; from here on nobody keeps rank 0 waiting for long.
        dist.barrier(group=self.host_group)

    def fit(self) -> TrainResult:
        """The whole run, or the rest of a run that left a checkpoint.

        Raises:
            Stopped: after SIGTERM, when the state has been saved.
        """
        config = self.config
        self.wait_for(self.head and self.head.get_ready(self.resumed))
        self.connect_engines()
        self.sync(check=True)
        if self.head:
            self.head.is_training = True
        if self.head and self.resumed:
            self.head.progress.say(
                f"continues from {self.head.resume_from}, {self.done} of {config.num_training_steps} steps are done"
            )
        try:
            if not self.resumed:
                self.before = self.evaluate("before training")
            elif not self.is_followed_up:
                self.follow_up(self.done)
            for step in range(self.done + 1, config.num_training_steps + 1):
                if not self.step(step):
                    break
                self.follow_up(step)
                if _is_due(step, config.checkpoint.checkpoint_state_freq):
                    self.save()
            after = self.evaluate("after training", self.before, self.done)
        except Stopped:
            # That optimizer's state cannot be saved, with SIGTERM as little as without.
            if self.done > self.saved and not self.config.parallel.use_precision_aware_optimizer:
                self.save()
            raise
        exported = self.export(self.done) if config.checkpoint.save_final else None
        if self.head:
            self.head.writer.close()
            draw_reward_curve(
                self.output_dir / "metrics.jsonl",
                self.output_dir / "reward_curve.png",
                title=f"{config.experiment.exp_name}: reward during training",
            )
            self.head.write_report()
            self.head.progress.finish(before=self.before or None, after=after or None)
        return TrainResult(
            output_dir=self.output_dir,
            steps=self.done,
            before=self.before,
            after=after,
            exported=exported,
        )

    def follow_up(self, step: int) -> None:
        """What is due after a training step: an evaluation, an export."""
        if self.evaluates_after(step):
            self.evaluate(f"step {step}", self.before, step)
        if _is_due(step, self.config.checkpoint.save_freq) and step < self.config.num_training_steps:
            self.export(step)
        self.is_followed_up = True

    def step(self, step: int) -> bool:
        """Sample, score, train on every mini-batch and epoch, and give the engines the new weights.

        False when there was nothing to sample: every prompt is solved for good (`no_resampling_pass_rate`).
        """
        clock = _Clock()
        if self.head:
            self.head.scoring.done = step - 1
        batch = self.wait_for(self.head and self.head.next_batch(), self.pack, may_stop=True)
        if self.head:
            self.head.prepare(is_next=step < self.config.num_training_steps and not self.evaluates_after(step))
        arrays = self.channel.arrays(batch and batch.arrays)
        if not arrays["num_sampled"]:
            if self.head:
                self.head.progress.say(f"step {step}: every prompt is solved, nothing is left to sample; training ends")
            return False
        clock.split("wait")
        results = self.learner.learn(arrays)
        measured = self.learner.reduce(results)
        self.end_if_stuck(results)
        if _is_due(step, self.config.algorithm.ref_policy_update_freq or 0):
            self.learner.update_reference()
        clock.split("train")
        self.done, self.is_followed_up = step, False
        if any(result.is_finite for result in results):
            self.version += 1
            self.sync(check=_is_due(step, self.config.engine.weight_sync_check_every))
        else:
            self.wait_for(self.head and self.head.reseed(step + 1))
        clock.split("sync")
        if self.head:
            self.report(step, batch, results, measured, clock)
        return True

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows training step `step`, the last one's apart."""
        return _is_due(step, self.config.experiment.local_eval_every) and step < self.config.num_training_steps

    def wait_for(
        self, future: Future | None, then: Callable[[Any], Any] = lambda result: result, *, may_stop: bool = False
    ) -> Any:
        """Wait for rank 0's `future`; returns `then` of its result there, None on the others.

        While it lasts rank 0 tells the others that it is alive; when it or `then` fails, all ranks end with its message.
        With `may_stop` all ranks raise Stopped when rank 0 has been asked to end.
        """
        if self.head is None:
            while (action := self.channel.action()) is Action.HEARTBEAT:
                pass
            if action is Action.STOP:
                raise Stopped
            return None
        done = self.head.after(future, then)
        while not wait([done], timeout=HEARTBEAT_S).done:
            if may_stop and self.head.stopping.is_set():
                break
            self.channel.action(Action.HEARTBEAT)
        if may_stop and self.head.stopping.is_set():
            self.channel.action(Action.STOP)
            raise Stopped
        try:
            result = done.result()
        except Exception as err:
            self.channel.action(Action.ERROR, f"rank 0: {err}")
            raise
        self.channel.action(Action.RUN)
        return result

    def pack(self, rollouts: Rollouts) -> Batch:
        """Advantages, then packs for every mini-batch and data-parallel rank."""
        algorithm, parallel = self.config.algorithm, self.config.parallel
        samples = train_samples(
            rollouts.groups,
            dropped=rollouts.dropped,
            normalization=algorithm.advantage_normalization_type,
            ddof=algorithm.advantage_ddof,
            eps=algorithm.advantage_eps,
            reward_weights=self.head.scoring.weights,
            mask_truncated=algorithm.mask_truncated_completions,
        )
        share_prompts = parallel.shared_prompt_packing
        if share_prompts == "auto" and not shared_prompts_pay():
            share_prompts = False
        packs = [
            mini_batch
            for epoch in range(algorithm.num_epochs if algorithm.reshuffle_mini_batches else 1)
            for mini_batch in packing.pack_step(
                samples,
                pack_length=self.layout.round_up(parallel.pack_length),
                dp=self.layout.data,
                num_mini_batches=algorithm.num_mini_batches,
                multiple_of=self.layout.pack_multiple_of,
                document_multiple_of=self.layout.document_multiple_of,
                micro_batches_multiple_of=self.layout.micro_batches_multiple_of,
                share_prompts=share_prompts,
                cost=packing.Cost.of_width(self.shape.hidden),
                epoch=epoch,
                seed=self.config.experiment.seed + self.version,
            )
        ]
        first_pass = [pack for ranks in packs[: algorithm.num_mini_batches] for row in ranks for pack in row]
        num_sampled = np.array([len(rollouts.groups) + len(rollouts.dropped)])
        arrays = {"num_sampled": num_sampled, **packing.to_arrays(packs)}
        return Batch(rollouts=rollouts, samples=samples, packs=first_pass, arrays=arrays)

    def end_if_stuck(self, results: Sequence[StepResult]) -> None:
        """End the run after a few steps in a row with a gradient that is not finite."""
        if results:
            self.skipped = 0 if all(result.is_finite for result in results) else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise RuntimeError(
                f"{MAX_SKIPPED} steps in a row had a gradient that is not finite, and were skipped; lower learning_rate="
                f"{self.config.optimizer.learning_rate:g} or look at the rewards; {self.states.last_good()}"
            )

    def save(self) -> None:
        """Write the state of the whole run."""
        place = self.states.save(self.done, self.learner, self.state_dict() if self.head else {})
        self.saved = self.done
        if self.head:
            self.head.progress.say(f"state of step {self.done}: {place}")

    def state_dict(self) -> dict[str, Any]:
        """Rank 0: all that is no tensor, in JSON."""
        return {
            "step": self.done,
            "is_followed_up": self.is_followed_up,
            "policy_version": self.version,
            "skipped": self.skipped,
            "num_excluded": self.num_excluded,
            "before": self.before,
            "model": asdict(self.shape),
            "model_name_or_path": str(Path(self.config.model.model_name_or_path).absolute()),
            "learner": self.learner.state_dict(),
            "head": self.head.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.done, self.is_followed_up = state["step"], state["is_followed_up"]
        self.saved = self.done
        self.version, self.skipped = state["policy_version"], state["skipped"]
        self.num_excluded, self.before = state["num_excluded"], state["before"]

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
            self.policy.boxes(),
            holdings=self.policy.holdings(self.host_group),
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
            for remark in self.learner.remarks():
                self.head.progress.say(remark)
            plan = self.sender.plan
            self.head.progress.say(
                f"weight sync: {len(plan.transfers)} slices, {plan.bytes_moved / 1e6:.2f} MB a step "
                f"(lower bound {plan.lower_bound / 1e6:.2f} MB)"
            )

    def sync(self, *, check: bool = False) -> None:
        """Give every engine the present weights; with `check`, prove by digests that it holds exactly these."""
        receiving = self.head and self.head.cluster.receive_weights(self.version, check, step=self.done + 1)
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
        rollouts: Rollouts | None = self.wait_for(
            self.head and self.head.evaluation(next_step=self.done + 1), may_stop=True
        )
        if self.head is None:
            return {}
        metrics = self.head.record_evaluation(step, rollouts, policy_version=self.version)
        self.head.progress.evaluation(metrics, when=when, before=before)
        return metrics

    def export(self, step: int) -> Path:
        """Write the model in Hugging Face format."""
        folder = self.output_dir / "hf" / f"step_{step}"
        export_hf(self.policy, self.config.model.model_name_or_path, folder, group=self.host_group)
        if self.head:
            self.head.save_tokenizer(folder)
        return folder

    def report(
        self, step: int, batch: Batch, results: Sequence[StepResult], measured: dict[str, float], clock: _Clock
    ) -> None:
        """One line of metrics; docs/metrics.md says what each means."""
        rollouts, seconds, num_excluded = batch.rollouts, clock.seconds, self.head.sampler.num_excluded
        sampled = batch_metrics(
            rollouts.groups,
            rollouts.dropped,
            samples=batch.samples,
            packs=batch.packs,
            batch_size=self.config.batch_size,
            policy_version=self.version - any(result.is_finite for result in results),
            num_excluded_prompts=num_excluded - self.num_excluded,
            generate_s=rollouts.generate_s,
            scale=self.head.scoring.scale,
        )
        self.num_excluded = num_excluded
        metrics = {
            "policy_version": self.version,
            "episode": step * self.config.batch_size,
            **sampled,
            **self.head.scoring.metrics(),
            **measured,
            "val/num_step_tokens": sum(len(pack.tokens) for pack in batch.packs),
            "optim/grad_norm": results[-1].grad_norm if results else 0.0,
            **({"lr": results[-1].learning_rate} if results else {}),
            "optim/steps": len(results),
            "optim/skipped_steps": sum(not result.is_finite for result in results),
            "sync/bytes": self.sender.plan.bytes_moved,
            "time/learner_tokens_per_second_step": sum(len(sample.tokens) for sample in batch.samples)
            / sum(seconds.values()),
            "time/generate": rollouts.generate_s,
            "time/score": rollouts.score_s,
            "time/train": seconds["train"] + seconds["wait"] - rollouts.generate_s - rollouts.score_s,
            "time/sync": seconds["sync"],
            "time/total": sum(seconds.values()),
        }
        self.head.writer.write(step, metrics)
        if self.head.traces:
            advantages = [sample.advantage for sample in batch.samples]
            self.head.traces.write(step, rollouts.groups, rollouts.dropped, advantages)
        self.head.progress.update(step, metrics)

    def close(self) -> None:
        """Leave all process groups; every rank must call."""
        self.states.close()
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
