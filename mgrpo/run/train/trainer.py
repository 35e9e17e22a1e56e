"""One GRPO run: open this file first.

Every learner rank runs `Trainer.fit`. A step is four sentences: take a batch, learn, send the weights when due, report.

    prompts -> rollout -> rewards -> advantages -> packs     source: rank 0 produces, every rank receives its own
                 ^                                  |
                 |                                  v
              engines  <-  weights  <-  learner: reference and old logprobs, loss, optimizer steps
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mgrpo.checkpoint.saving.schedule import Due, Schedule
from mgrpo.checkpoint.space import OutputError, wait_for_room
from mgrpo.config import Config
from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import flat
from mgrpo.model_io.hf_export import export_bytes, export_hf
from mgrpo.parallel import backend
from mgrpo.run.inputs.snapshots import origin
from mgrpo.run.produce.source import SilentSource, Source
from mgrpo.run.ranks.lead import Lead, Stopped
from mgrpo.run.records import Batch, evaluates_after, is_due, pauses_after, syncs_after
from mgrpo.run.report.reporter import Reporter, SilentReporter
from mgrpo.run.report.result import TrainResult
from mgrpo.run.report.step_metrics import Clock
from mgrpo.run.train.engine_weights import EngineWeights
from mgrpo.run.train.gpu_turns import GpuTurns
from mgrpo.run.train.health import Health
from mgrpo.run.train.learner import Learner
from mgrpo.run.train.mismatch import fatal_of, limit_of, sentence
from mgrpo.run.train.profile import Profiler
from mgrpo.run.train.resume import States


class Trainer:
    """One learner rank's part in a run. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        config: Config,
        *,
        lead: Lead,
        learner: Learner,
        source: Source | SilentSource,
        weights: EngineWeights,
        reporter: Reporter | SilentReporter,
        states: States,
        turns: GpuTurns | None = None,
        has_held_out: bool,
    ) -> None:
        """
        Args:
            turns: memory turns of learners and engines; None: both have memory of their own.
        """
        self.config, self.lead, self.learner, self.source = config, lead, learner, source
        self.weights, self.reporter, self.states, self.turns = weights, reporter, states, turns
        self.has_held_out = has_held_out
        self.health = Health(config, states)
        self.profiler = Profiler(config, rank=dist.get_rank(), say=reporter.say)
        self.output_dir = Path(config.experiment.output_dir)
        self.exports = self.output_dir / "hf"
        self.done = 0
        """Training steps done."""
        self.is_followed_up = False
        """True if evaluation and export after step `done` are done."""
        self.version = 0
        """The version of the policy's weights: updates so far."""
        self.resumed_at = 0
        """Step after which this run began."""
        self.saved = 0
        """The step of the newest state on storage."""
        self.before: dict[str, float] = {}
        """Metrics of the evaluation before training."""
        self.evaluated: tuple[int, dict[str, float]] | None = None
        """The step of this run's newest evaluation, and its metrics."""
        self.exported: int | None = None
        """The step of this run's newest export."""
        self.clock = Clock()
        """The clock of the present step."""
        own = config.checkpoint
        self.schedule = Schedule(
            every_steps=own.checkpoint_state_freq,
            every_s=60 * (own.save_every_minutes or 0),
            has_near=own.checkpoint_local_dir is not None,
        )
        """Schedule of saved states; rank 0's is used."""

    def fit(self) -> TrainResult:
        """Train from the first step, or from the checkpoint that the run continues.

        Raises:
            Stopped: after SIGTERM, or if files could not be written (the message names them); the state has been saved if
                possible.
        """
        try:
            result = self._fit()
        except OutputError as err:
            clauses, _ = self.keep()
            raise Stopped("; ".join(dict.fromkeys((str(err), *clauses)))) from err
        except Stopped as err:
            clauses, is_kept = self.keep()
            failure = self.reporter.failure
            if failure or not is_kept:
                raise Stopped("; ".join((failure, *clauses) if failure else clauses)) from err
            self.reporter.say("; ".join((f"stopped after step {self.done}", *clauses)))
            raise
        if self.reporter.failure:
            raise Stopped(f"{self.reporter.failure}; the trained model is in {result.exported or 'no folder'}")
        return result

    def _fit(self) -> TrainResult:
        self.reporter.begin(self.done)
        if not self.done:
            self.before = self.evaluate("before training")
        elif not self.is_followed_up:
            self.follow_up()
        for step in range(self.done + 1, self.config.num_training_steps + 1):
            if not self.step(step):
                break
            if not self.follow_up():
                self.reporter.say(f"step {step}: the caller wants no more; training ends")
                break
        after = self.evaluate("after training")
        exported = self.export() if self.config.checkpoint.save_final else None
        self.states.wait()
        best = self.lead.share(lambda: self.reporter.best_step)
        self.reporter.finish(before=self.before, after=after)
        self.states.finish()
        return TrainResult(
            output_dir=self.output_dir,
            steps=self.done,
            before=self.before,
            after=after,
            exported=exported,
            best=self.exports / f"step_{best}" if best else None,
            has_trained=self.health.has_trained or self.done == self.resumed_at,
            tracked=self.reporter.tracked,
        )

    def keep(self) -> tuple[list[str], bool]:
        """Save the state of the last step, or at least the model if the state cannot be saved.

        Returns:
            Clauses for messages about the saved files, and True if the state is saved.
        """
        # The state of a precision-aware optimizer cannot be saved.
        if self.done == self.saved or self.config.parallel.use_precision_aware_optimizer:
            return [self.states.how_to_go_on(self.saved)], True
        try:
            self.save()
            self.states.wait()
        except OutputError as err:
            clauses = [str(err)]
            with suppress(OutputError):
                clauses.append(f"the model of step {self.done} is in {self._export()}")
            return clauses, False
        clauses = [self.states.how_to_go_on(self.saved)]
        if not syncs_after(self.config, self.done):
            steps = self.config.engine.weight_sync_steps
            clauses.append(
                f"weight_sync_steps={steps}: its engines then begin with the weights of step {self.done}, and not with older ones as in a "
                "run that was not stopped"
            )
        return clauses, True

    def step(self, step: int) -> bool:
        """Sample, score, train on every mini-batch and epoch, and send the engines the new weights.

        Returns False if nothing is left to sample: every prompt is solved for good (`no_resampling_pass_rate`).
        """
        self.clock = Clock()
        if self.turns:
            self.send_weights()
        with self.part(f"step {step}, sampling", "wait"), self.health.sampling():
            batch = self.source.next(step, self.version)
            if self.turns:
                self.turns.learners()
        if batch is None:
            self.reporter.say(f"step {step}: every prompt is solved, nothing is left to sample; training ends")
            return False
        with self.profiler.step(step):
            with self.part(f"step {step}, training", "train"):
                if not self.version:
                    self.compare_with_engines(batch)
                learned = self.learner.learn(batch.index, batch.slice, step=step)
                self.health.check(learned, step)
            self.done, self.is_followed_up = step, False
            self.version += learned.has_updated
            with self.part(f"step {step}, waiting for the engines", "drain"):
                # If sampling and training take turns, the engines have paused already.
                pauses = self.config.steps_ahead > 0 and pauses_after(self.config, step)
                goes_on = self.source.pause() if pauses else True
            with self.part(f"step {step}, weight sync", "sync"):
                goes_on = goes_on and self.hand_over()
        sync_bytes = self.weights.bytes_moved
        self.reporter.step(batch, learned, step=step, version=self.version, sync_bytes=sync_bytes, clock=self.clock)
        if self.reporter.failure:
            self.lead.stop.set()
        if not goes_on:
            raise Stopped
        return True

    def compare_with_engines(self, batch: Batch) -> None:
        """Before the first update, warn or end the run if learner and engines compute different models.

        Raises:
            ConfigError: they differ by more than `max_initial_mismatch`.
        """
        found = self.learner.mismatch(batch.index, batch.slice)
        limit = limit_of(self.config, has_experts=self.learner.shape.experts is not None)
        if found is None or not found.exceeds(limit):
            return
        message = sentence(found, limit, self.reporter.pieces)
        if found.exceeds(fatal_of(self.config, limit)):
            raise ConfigError([f"{message}; max_initial_mismatch=none trains nevertheless"])
        self.reporter.say(f"warning: {message}")

    @contextmanager
    def part(self, name: str, split: str) -> Iterator[None]:
        """Part of a step: `name` is reported to other ranks, its seconds are the clock's `split`."""
        self.lead.pulse.at(name)
        yield
        self.clock.split(split)

    def hand_over(self) -> bool:
        """Resume the engines after step `done`, with its weights if these are due; returns False if the run was stopped meanwhile."""
        settings = self.config.engine
        every = settings.weight_sync_check_every
        try:
            self.send_weights(
                are_due=syncs_after(self.config, self.done),
                check=every > 0 and self.done % every < settings.weight_sync_steps,
            )
        except Stopped:
            return False
        if not self.turns:
            self.source.begin(self.done)
        return True

    def send_weights(self, *, are_due: bool = True, check: bool = False) -> None:
        """Send the engines the next step's random stream, and the weights if these are due and newer.

        If learners and engines take turns, engines always get the weights, and have the memory afterwards.
        """
        send = partial(self.weights.send, self.version, step=self.done + 1, check=check)
        if self.turns:
            self.turns.engines(send)
        elif are_due and self.weights.version != self.version:
            send()
        else:
            self.weights.keep(self.version, step=self.done + 1, reseed=pauses_after(self.config, self.done))

    def follow_up(self) -> bool:
        """Evaluate, export and save the state where due after step `done`; returns False if the caller ended the run."""
        config, checkpoint = self.config, self.config.checkpoint
        if evaluates_after(config, self.done):
            self.evaluate(f"step {self.done}")
        if is_due(self.done, checkpoint.save_freq) and self.done < config.num_training_steps:
            self.export()
        self.is_followed_up = True
        may_save = syncs_after(config, self.done)
        due, ends = self.lead.share(
            lambda: [self.schedule.due(self.done, may_wait=not may_save).value, self.reporter.wants_end]
        )
        if self.done > self.saved and Due(due) is not Due.NOTHING:
            self.save(near_only=Due(due) is Due.NEAR)
        return not ends

    def evaluate(self, when: str) -> dict[str, float]:
        """Sample the held-out prompts; metrics on rank 0, nothing elsewhere or without held-out data."""
        if not self.has_held_out:
            return {}
        # A run that ends before its last step may have evaluated there.
        if self.evaluated and self.evaluated[0] == self.done:
            return self.evaluated[1]
        if self.turns:
            self.send_weights()
        elif self.weights.version != self.version:
            # The run ends earlier than it was to, between two weight syncs.
            if not self.source.pause():
                raise Stopped
            self.send_weights()
        self.lead.pulse.at(f"the evaluation {when}")
        with self.health.sampling():
            evaluation = self.source.evaluate(self.done)
        metrics = self.reporter.evaluation(
            evaluation, step=self.done, policy_version=self.version, when=when, before=self.before
        )
        self.evaluated = self.done, metrics
        return metrics

    def export(self) -> Path:
        """Write the model in Hugging Face format; raises OutputError on all ranks if that fails.

        Waits for room on a full disk if this step's weights are saved nowhere else.
        """
        if self.exported == self.done:
            return self._export()
        self.lead.pulse.at(f"the export of step {self.done}")
        if self.done > self.saved:
            num_bytes, stop = export_bytes(self.learner.policy), self.lead.stop
            self.lead.run(partial(wait_for_room, self.output_dir, num_bytes, say=self.reporter.say, stop=stop))
        folder = self._export()
        self.reporter.exported(self.done)
        return folder

    def _export(self) -> Path:
        folder, add = self.exports / f"step_{self.done}", self.source.save_tokenizer
        # Another export would delete the folder first, and an upload may still be reading it.
        if self.exported == self.done:
            return folder
        if self.turns:
            self.turns.learners()
        base, group = origin(self.config)["model_name_or_path"], self.learner.host_group
        make_way = self.reporter.make_way
        export_hf(
            self.learner.policy, self.config.model_path, folder, group=group, base=base, add=add, make_way=make_way
        )
        self.exported = self.done
        return folder

    def save(self, *, near_only: bool = False) -> None:
        """Write the state of the whole run; `near_only`: to the nodes' disks, which may be gone after the run."""
        self.lead.pulse.at(f"saving the state of step {self.done}")
        if self.turns:
            self.turns.learners()
        began = time.monotonic()
        self.schedule.saved()
        state, rollouts = self.state_dict()
        place = self.states.save(self.done, self.learner, state, rollouts, near_only=near_only)
        self.reporter.saved(time.monotonic() - began)
        self.reporter.say(f"state of step {self.done}: {place}")
        self.saved = self.saved if near_only else self.done

    def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Everything except tensors, in JSON, and the arrays of rollouts that were not trained on. Complete on rank 0."""
        sampled = self.source.state_dict()
        rollouts = sampled.pop("rollouts", {})
        state = {
            "step": self.done,
            "is_followed_up": self.is_followed_up,
            "policy_version": self.version,
            "skipped": self.health.skipped,
            "before": self.before,
            "config": flat(self.config),
            "model": asdict(self.learner.shape),
            **origin(self.config),
            "learner": self.learner.state_dict(),
            "source": sampled,
            "reporter": self.reporter.state_dict(),
        }
        return state, rollouts

    def load_state_dict(self, state: Mapping[str, Any], rollouts: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`; the learner has been built from its checkpoint already.

        Args:
            state: in the form of `Continued.state`.
        """
        self.done, self.is_followed_up = state["step"], state["is_followed_up"]
        self.saved = 0 if self.states.is_near else self.done
        self.resumed_at, self.before = self.done, state["before"]
        self.version, self.health.skipped = state["policy_version"], state["skipped"]
        self.health.has_trained = self.version > 0
        self.source.load_state_dict({"step": state["step"], **state["source"], "rollouts": rollouts})

    def close(self, cause: str = "") -> None:
        """Leave all process groups. Collective; `cause` as for the reporter."""
        self.reporter.close(cause)
        dist.barrier(group=self.learner.host_group)
        self.lead.close()
        backend.leave_process_groups()
