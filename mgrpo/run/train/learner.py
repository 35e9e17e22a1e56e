"""One learner rank's optimizer steps: scores before them, the loss, the updates, and their measurements.

It connects the algorithm, which is independent of ranks, with the policy, which is independent of GRPO. Methods are collective
over all learner ranks unless noted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mgrpo import algo, packing
from mgrpo.checkpoint.reader import StoredCheckpoint
from mgrpo.checkpoint.train_state import TrainState
from mgrpo.config import Config
from mgrpo.layout import Layout
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.gather import gather_json, gather_values
from mgrpo.parallel.moe.expert_loads import load_metrics
from mgrpo.policy.policy import Microbatch, MicrobatchLoss, StepResult
from mgrpo.policy.weights import Read
from mgrpo.run.records import Learned, is_due
from mgrpo.run.train.finite import not_finite
from mgrpo.run.train.held_models import HeldModels
from mgrpo.run.train.mismatch import SCORE, Mismatch, differences, mismatch_of
from mgrpo.types import PackedBatch

Measured = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""The measurements of a micro-batch, see `algo.PolicyLoss`: metrics as (sum, count), and maxima."""

ENTROPY = "policy/entropy_avg"
BONUS = "loss/entropy_avg"
ROUTING = "policy/routing_differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The batch of one optimizer step: this rank's packs, and figures over all ranks."""

    microbatches: list[Microbatch]
    num_trained_tokens: int
    denominators: float | np.ndarray
    """The loss's denominators: a number, or one for each sample of the step, see `algo.denominators`."""
    asked: Mapping[int, Sequence[PackedBatch]]
    """Packs, one for each micro-batch, of every teacher that any rank uses, by the teacher's number."""

    def denominator(self, batch: Microbatch) -> float | torch.Tensor:
        """The denominator of one of the micro-batches: a number, or one for each of its sequences."""
        if isinstance(self.denominators, float):
            return self.denominators
        return torch.from_numpy(self.denominators[batch.pack.samples]).to(batch.loss_inputs.advantages.device)


class Learner:
    """The policy, its reference and its teachers, and their training on a step's packs."""

    def __init__(
        self,
        config: Config,
        *,
        shape: ModelShape,
        layout: Layout,
        host_group: dist.ProcessGroup,
        checkpoint: StoredCheckpoint | None = None,
        weights: Read | None = None,
        teacher_shapes: Sequence[ModelShape] = (),
        loss: algo.LossFunction | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            checkpoint: the open state that the run continues.
            weights: reads the weights of the model and of its teachers, by default from their folders.
            teacher_shapes: shapes of the teachers with weights of their own, by default read from their folders.
        """
        self.config, self.loss_config, self.host_group = config, config.loss, host_group
        self.on_progress = on_progress
        self.own_loss = loss or algo.load_loss(config.loss)
        self.shape = shape
        self.models = HeldModels(
            config,
            shape=shape,
            layout=layout,
            host_group=host_group,
            teacher_shapes=teacher_shapes,
            on_progress=on_progress,
        )
        self.models.load(checkpoint, weights)
        self.policy, self.reference, self.teachers = self.models.policy, self.models.reference, self.models.teachers
        self.policy.prepare_training(config.optimizer, num_optimizer_steps=config.num_optimizer_steps)
        self.state = TrainState(self.policy, self.models.following, group=host_group)
        algorithm = config.algorithm
        self.entropy_control = None
        if algorithm.use_adaptive_entropy:
            self.entropy_control = algo.AdaptiveEntropy(
                coef=algorithm.entropy_coef,
                target=algorithm.entropy_target,
                delta=algorithm.entropy_coef_delta,
                coef_min=algorithm.entropy_coef_min,
                coef_max=algorithm.entropy_coef_max,
            )
        if checkpoint:
            self._restore(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Counters, in JSON; the tensors are in `state`."""
        return {
            **self.policy.counters(),
            "entropy_control": self.entropy_control and self.entropy_control.state(),
            "adapters": self.models.adapter_record,
        }

    def _restore(self, checkpoint: StoredCheckpoint) -> None:
        saved = checkpoint.state["learner"]
        self.policy.restore_counters(saved)
        if self.entropy_control and saved["entropy_control"]:
            self.entropy_control = self.entropy_control.with_state(saved["entropy_control"])
        self.state.restore_optimizer(checkpoint, num_updates=self.policy.num_updates)
        self.state.restore_random(checkpoint)

    def remarks(self) -> list[str]:
        """Notes for the user about kernels, memory and loss. Not collective."""
        return [*self.models.remarks(), *algo.loss_remarks(self.loss_config, self.own_loss)]

    def learn(self, index: dict[str, np.ndarray], own: np.ndarray, *, step: int) -> Learned:
        """Train on the packs of training step `step`, and move the models that follow the policy if that is due after it.

        Args:
            index: of the packs, equal on all ranks, see `Batch`.
            own: this rank's slice of the packs.
            step: training step, from 1.
        """
        results = self._optimize(index, own)
        metrics = self._reduce(results, beside=algo.MetricSums(self._routing(), backend.peak_memory()))
        if self.policy.expert_loads:
            metrics |= load_metrics(self.policy.expert_loads.take(self.host_group))
        if self.policy.adapters:
            self.policy.wait_for_weights()
            metrics["lora/update_ratio"] = self.policy.adapters.update_ratio(self.host_group)
        if self.entropy_control:
            metrics["policy/entropy_coef"] = self.entropy_control.coef
        if self.reference and is_due(step, self.config.algorithm.ref_policy_update_freq or 0):
            self.reference.move_towards(self.policy, self.config.algorithm.alpha)
        self.teachers.follow()
        return Learned(
            results=results,
            metrics=metrics,
            learning_rate=results[-1].learning_rate if results else self.policy.learning_rate(),
            not_finite=self.not_finite() if results else [],
        )

    def mismatch(self, index: dict[str, np.ndarray], own: np.ndarray) -> Mismatch | None:
        """The difference from the engines in the first mini-batch with a trained token; None if there is none.

        Args:
            index, own: as in `learn`.
        """
        passes = zip(packing.from_slice(index, own), index["num_trained_tokens"].tolist(), strict=True)
        packs = next((packs for packs, num_trained in passes if num_trained), None)
        if packs is None:
            return None
        batches = self.policy.microbatches(packs)
        self.policy.score(batches, SCORE, replays_routing=self.config.parallel.routing_replay == "rollout")
        everyones = gather_json(differences(batches) if self.policy.reports_metrics else [], self.host_group)
        return mismatch_of([part for parts in everyones for part in parts])

    def not_finite(self) -> list[str]:
        """HF tensors of the policy with a value that is not finite on any rank, see `Policy.not_finite`."""
        return not_finite(self.policy, self.host_group)

    def _optimize(self, index: dict[str, np.ndarray], own: np.ndarray) -> list[StepResult]:
        """One optimizer step for each mini-batch and epoch; mini-batches without a trained token are skipped."""
        algorithm = self.config.algorithm
        mini_batches = self._mini_batches(index, own)
        for mini_batch in mini_batches:
            if self.reference:
                self.reference.score(mini_batch.microbatches, "ref")
            elif self.models.has_reference:
                with self.policy.adapters_off():
                    self.policy.score(mini_batch.microbatches, "ref")
            if self.scores_itself:
                self.policy.score(mini_batch.microbatches, "old", replays_routing=True)
            if algorithm.top_entropy_quantile < 1:
                self._choose_uncertain_tokens(mini_batch)
            self.on_progress()
            self.teachers.teach(mini_batch.microbatches, mini_batch.asked)
        results = []
        for mini_batch in itertools.chain.from_iterable(itertools.repeat(mini_batches, algorithm.num_epochs)):
            results.append(self.policy.train_step(mini_batch.microbatches, self._loss(mini_batch)))
            self.on_progress()
            if self.entropy_control:
                mean = self._reduce(results[-1:]).get(ENTROPY, float("nan"))
                self.entropy_control = self.entropy_control.after(mean)
        self.policy.pass_over(algorithm.num_epochs * algorithm.num_mini_batches - len(results))
        return results

    @property
    def scores_itself(self) -> bool:
        """True if the policy scores the batch before the first update; a single update starts from ratio 1."""
        algorithm = self.config.algorithm
        has_several_updates = algorithm.num_epochs * algorithm.num_mini_batches > 1
        return (has_several_updates and not algorithm.use_vllm_logprobs) or algorithm.top_entropy_quantile < 1

    def _routing(self) -> dict[str, list[float]]:
        """Replayed expert choices that differ from those of the policy's routers, and all replayed choices, as a metric sum."""
        fixed, differing = self.policy.routing.take_counts()
        return {ROUTING: [differing, fixed]} if fixed else {}

    def _reduce(self, results: Sequence[StepResult], *, beside: algo.MetricSums | None = None) -> dict[str, float]:
        """Metrics over all mini-batches and ranks; every trained token counts once.

        Args:
            beside: further measurements of this rank.
        """
        # Names, which a user's loss chooses, are sent with the numbers: only measuring ranks have them.
        own = [algo.metric_sums(*part) for result in results for part in result.measured if self.policy.reports_metrics]
        own.append(beside or algo.MetricSums({}, {}))
        everyones = gather_json(algo.add_metrics(own), self.host_group)
        return algo.reduce_metrics(algo.add_metrics(algo.MetricSums(*part) for part in everyones))

    def _mini_batches(self, index: dict[str, np.ndarray], own: np.ndarray) -> list[MiniBatch]:
        counts = index["num_trained_tokens"].tolist()
        return [
            MiniBatch(
                microbatches=self.policy.microbatches(packs),
                num_trained_tokens=num_trained,
                denominators=denominators,
                asked=asked,
            )
            for packs, num_trained, denominators, asked in zip(
                packing.from_slice(index, own),
                counts,
                self._denominators(index),
                self.teachers.packs(index, own),
                strict=True,
            )
            if num_trained
        ]

    def _denominators(self, index: dict[str, np.ndarray]) -> Sequence[float | np.ndarray]:
        """The denominators of each mini-batch over all ranks: its sequences lie in the packs of several."""
        cuts = np.cumsum(index["num_sequences"])[:-1]
        samples, completions, trained = (
            np.split(index[name], cuts) for name in ("samples", "completions", "trained_tokens")
        )
        longest = self.config.rollout.response_length
        return [
            algo.denominators(*part, config=self.loss_config, response_length=longest)
            for part in zip(samples, completions, trained, strict=True)
        ]

    def _choose_uncertain_tokens(self, mini_batch: MiniBatch) -> None:
        """Mark in each micro-batch the tokens with the highest entropy in the mini-batch over all ranks."""
        # Only the last stage has entropies.
        scored = [(batch, batch.entropy) for batch in mini_batch.microbatches if batch.entropy is not None]
        # Selected on the host: on a GPU boolean indexing synchronises for the count.
        own = [entropy.cpu()[batch.pack.loss_mask] for batch, entropy in scored if self.policy.reports_metrics]
        everyones = gather_values(torch.cat([torch.zeros(0), *own]), self.host_group)
        quantile = self.config.algorithm.top_entropy_quantile
        threshold = float(algo.entropy_threshold(everyones, top_entropy_quantile=quantile))
        for batch, entropy in scored:
            batch.keep = algo.top_entropy_keep(entropy, threshold)

    def _loss(self, mini_batch: MiniBatch) -> MicrobatchLoss:
        """The loss of one micro-batch, divided by the denominator of its whole mini-batch."""
        algorithm = self.config.algorithm
        entropy_coef = self.entropy_control.applied if self.entropy_control else algorithm.entropy_coef

        def grpo_loss(
            logprobs: torch.Tensor, entropy: torch.Tensor, batch: Microbatch, candidates: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, Measured]:
            pack, signal = batch.loss_inputs, self._signal(batch)
            mask = pack.loss_mask if signal is None else signal.trained(pack.loss_mask, pack.rollout_logprobs)
            old = pack.rollout_logprobs if algorithm.use_vllm_logprobs else batch.logprobs.get("old")
            result = algo.policy_loss(
                logprobs,
                logprobs.detach() if old is None else old,
                pack.advantages,
                mask,
                pack.response_cu_seqlens,
                config=self.loss_config,
                ref_logprobs=batch.logprobs.get("ref"),
                rollout_logprobs=pack.rollout_logprobs,
                keep=batch.keep,
                denominator=mini_batch.denominator(batch),
                function=self.own_loss,
                signal=signal,
                candidates=candidates,
            )
            loss, num_trained = result.loss, mask.sum()
            entropies = {ENTROPY: torch.stack((entropy.detach().where(mask, 0.0).sum(), num_trained)).float()}
            if entropy_coef:
                rewarded = mask if batch.keep is None else mask * batch.keep
                bonus = algo.entropy_bonus(
                    entropy, rewarded, coef=entropy_coef, num_trained_tokens=mini_batch.num_trained_tokens
                )
                loss = loss - bonus
                entropies[BONUS] = torch.stack((bonus.detach() * mini_batch.num_trained_tokens, num_trained)).float()
            metrics, maxima = agreement(logprobs, batch, is_left_to_loss=not algorithm.use_vllm_logprobs)
            return loss, (result.metrics | entropies | metrics, result.maxima | maxima)

        return grpo_loss

    def _signal(self, batch: Microbatch) -> algo.TeacherSignal | None:
        """Teacher signal of the micro-batch; None: it has no teacher."""
        pack, taught = batch.loss_inputs, batch.taught
        if taught is None or pack.teachers is None:
            return None
        return algo.TeacherSignal(
            settings=self.config.distillation,
            teachers=pack.teachers,
            logprobs=taught.logprobs,
            targets=pack.targets,
            ids=taught.ids,
            likeliest=taught.likeliest,
        )


def agreement(logprobs: torch.Tensor, batch: Microbatch, *, is_left_to_loss: bool) -> Measured:
    """Agreement of trainer and engine. Empty if the loss measures it, which it does without ages and for the policy's old logprobs.

    Args:
        is_left_to_loss: True if the old logprobs are the policy's.
    """
    pack = batch.loss_inputs
    if pack.ages is None and is_left_to_loss:
        return {}, {}
    return algo.agreement(
        logprobs,
        batch.logprobs.get("old", logprobs),
        pack.rollout_logprobs,
        pack.loss_mask,
        ages=pack.ages,
        oldest=int(batch.pack.ages.max(initial=0)),
    )
