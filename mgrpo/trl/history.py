"""A run as transformers' Trainer records it: `TrainerState` with its log, which callbacks receive."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mgrpo.config import Config
from mgrpo.rewards.trajectory_rewards import is_lost
from mgrpo.run.ranks.process import rank
from mgrpo.run.report.listener import RunListener
from mgrpo.trl.callbacks import Callbacks
from mgrpo.trl.held_out import by_set
from mgrpo.trl.metric_names import mean, of_step

if TYPE_CHECKING:
    from transformers import TrainerState

    from mgrpo.run.records import Evaluation, Rollouts
    from mgrpo.run.report.best import Best
    from mgrpo.run.report.result import TrainResult

LAST = ("grad_norm", "learning_rate", "entropy_coef")
"""Metrics of which a line of the log has the last value; the mean of all others."""

_log = logging.getLogger(__name__)


class TrainOutput(NamedTuple):
    """The outcome of `GRPOTrainer.train`, as that of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class RunHistory(RunListener):
    """Records runs and evaluations of one trainer. Complete on rank 0; the other ranks hold the number of steps."""

    def __init__(self, config: Config, callbacks: Callbacks, *, num_rows: int | None) -> None:
        """
        Args:
            config: of the training run, perhaps without its length.
            num_rows: training rows, for the part of an epoch; None: not known.
        """
        self.config, self.callbacks, self.num_rows = config, callbacks, num_rows
        self.evaluated: dict[str, float] = {}
        """Metrics of the newest evaluation."""
        self.prefix, self.has_sets = "eval", False
        """Form of an evaluation's metrics, see `held_out.by_set`."""
        self._values: dict[str, list[float]] = defaultdict(list)
        self._losses: list[float] = []
        self._is_training = self._has_warned = False

    @cached_property
    def state(self) -> TrainerState:
        """State for scripts and callbacks."""
        # It imports torch, before which Ray should start.
        from transformers import TrainerState

        return TrainerState(is_local_process_zero=rank() == 0, is_world_process_zero=rank() == 0)

    def begin(self, config: Config, *, done: int) -> None:
        self.config, self.wants_end, self._is_training = config, False, True
        self._values.clear()
        self._losses.clear()
        # Each run has its own state.
        vars(self).pop("state", None)
        state = self.state
        state.max_steps = config.num_optimizer_steps
        self._reach(done)
        self.callbacks.control.should_training_stop = False
        self.callbacks.call("on_train_begin", state)

    def step(self, step: int, metrics: Mapping[str, float | list[int]], rollouts: Rollouts) -> None:
        before = self.state.global_step
        self._reach(step)
        values = {"loss": 0.0, **dict(of_step(metrics))}
        algorithm = self.config.algorithm
        if algorithm.entropy_coef or algorithm.use_adaptive_entropy:
            values = {"policy_loss": values["loss"], "entropy_coef": algorithm.entropy_coef} | values
            values["loss"] -= float(metrics.get("loss/entropy_avg", 0.0))  # type: ignore[arg-type]
        for name, value in values.items():
            self._values[name].append(value)
        self._losses.append(values["loss"])
        self.state.num_input_tokens_seen += _num_tokens(rollouts)
        self._values["num_tokens"] = [self.state.num_input_tokens_seen]
        self._warn_of_unscored(rollouts)
        self.callbacks.call("on_step_end", self.state)
        if self._logs_after(before):
            self.log({})
        self.wants_end = self.callbacks.wants_end

    def evaluation(self, step: int, metrics: Mapping[str, float], evaluation: Evaluation) -> None:
        found = by_set(self.config, metrics, evaluation, prefix=self.prefix, has_sets=self.has_sets)
        self.evaluated = found | {"epoch": self.state.epoch}
        self._write(dict(found))
        own = self.config.checkpoint
        self.callbacks.call("on_evaluate", self.state, metrics=self.evaluated)
        if self._is_training:
            self._compare(metrics.get(own.best_metric, math.nan), is_greater_better=own.greater_is_better)
        self.wants_end = self.callbacks.wants_end

    def exported(self, step: int, folder: Path, best: Best | None) -> None:
        if best is not None:
            self.state.best_model_checkpoint = str(folder.with_name(f"step_{best.step}"))
        self.callbacks.call("on_save", self.state)
        self.wants_end = self.callbacks.wants_end

    def report_sets(self, rows: object, prefix: str) -> None:
        """Report the evaluations that follow by set, if `rows` are several sets by name, with names that begin with `prefix`."""
        self.prefix, self.has_sets = prefix, isinstance(rows, Mapping)

    def finish(self, result: TrainResult, seconds: float) -> TrainOutput:
        """Write the last line of the log, and return the outcome of the run."""
        self._is_training = False
        self._reach(result.steps)
        steps, loss = max(len(self._losses), 1), mean(self._losses) or 0.0
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": len(self._losses) * self.config.batch_size / seconds,
            "train_steps_per_second": steps * self._updates / seconds,
            "train_loss": loss,
        }
        self.log(metrics)
        self.callbacks.call("on_train_end", self.state)
        return TrainOutput(self.state.global_step, loss, metrics | {"epoch": self.state.epoch})

    def log(self, more: Mapping[str, float]) -> None:
        """Write a line of the means since the last one, and `more`."""
        means = {name: values[-1] if name in LAST else mean(values) for name, values in self._values.items()}
        self._values.clear()
        self._write({**means, **more})

    def _write(self, logs: dict[str, Any]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callbacks.call("on_log", self.state, logs=logs)

    @property
    def _updates(self) -> int:
        """Optimizer steps of a training step."""
        return self.config.algorithm.num_epochs * self.config.algorithm.num_mini_batches

    def _reach(self, done: int) -> None:
        self.state.global_step = done * self._updates
        if self.num_rows:
            self.state.epoch = done * self.config.rollout.num_unique_prompts_rollout / self.num_rows

    def _logs_after(self, before: int) -> bool:
        """True if a line is due after the steps since `before`."""
        args, now = self.callbacks.args, self.state.global_step
        if args.logging_strategy == "epoch":
            return math.floor(self.state.epoch) > math.floor(self.state.epoch * before / now)
        every = args.logging_steps
        every = math.ceil(every * self.state.max_steps) if every < 1 else int(every)
        is_first = args.logging_first_step and before == 0
        return args.logging_strategy == "steps" and (is_first or now // every > before // every)

    def _compare(self, value: float, *, is_greater_better: bool) -> None:
        best = self.state.best_metric
        sign = 1 if is_greater_better else -1
        if not math.isnan(value) and (best is None or sign * value > sign * best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _warn_of_unscored(self, rollouts: Rollouts) -> None:
        """Warn, once where TRL does at each batch: a completion that no function has scored is not trained on."""
        for scored in () if self._has_warned else (*rollouts.groups, *rollouts.dropped):
            prompt = scored.group.prompt
            for completion, reward in zip(scored.group.completions, scored.rewards, strict=True):
                if math.isnan(reward) and not is_lost(completion):
                    self._has_warned = True
                    given = {"prompt": prompt.source or prompt.text, "completion": completion.scored_text}
                    _log.warning(
                        "All reward functions returned None for the following kwargs: %s; such completions are not trained "
                        "on, and val/no_score_rate counts them; this warning appears once",
                        given | dict(prompt.columns),
                    )
                    return


def _num_tokens(rollouts: Rollouts) -> int:
    """Tokens of prompts and completions, a prompt for each of its completions."""
    return sum(
        len(scored.group.prompt.tokens) + len(completion.tokens)
        for scored in (*rollouts.groups, *rollouts.dropped)
        for completion in scored.group.completions
    )
