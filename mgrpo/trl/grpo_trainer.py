"""TRL's trainer class: a script's arguments, `train`, `evaluate`, and the attributes read afterwards."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mgrpo
from mgrpo.config import Config, ConfigError
from mgrpo.models.hf_files.checksums import SUMS
from mgrpo.moving import grpo_config
from mgrpo.moving.config_doors import with_tools
from mgrpo.moving.trl_config import AsyncGRPOConfig, GRPOConfig
from mgrpo.run.ranks.process import rank, world_size
from mgrpo.run.report.result import NothingTrained, step_of
from mgrpo.run.report.upload import Uploads, token_warning
from mgrpo.trl.arguments import (
    argument_problems,
    function_name,
    is_streamed,
    listed,
    names_verifiers,
    placeholder_rows,
    settle_streaming,
    warnings_of,
)
from mgrpo.trl.callbacks import Callbacks
from mgrpo.trl.history import RunHistory, TrainOutput
from mgrpo.trl.loaded import as_reward_functions, written
from mgrpo.trl.metric_names import evaluated
from mgrpo.trl.policy_model import PolicyModel

if TYPE_CHECKING:
    from transformers import TrainerState

    from mgrpo.run.report.result import TrainResult

Rows = Iterable[Mapping[str, Any]]
_log = logging.getLogger(__name__)


class GRPOTrainer:
    """Trains when `train` is called; under `mgrpo train`'s launcher, torchrun or accelerate every rank makes one."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[object, object] = (None, None),
        quantization_config: object = None,
        peft_config: Any = None,
        tools: Sequence[str | Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        """
        Args:
            model: folder or Hub name, from which the ranks load the weights themselves; or an object of transformers or a
                PeftModel, which rank 0 saves in output_dir/given, and which has the trained weights after `train`.
            reward_funcs: functions, names as in the setting reward_funcs, and reward models: folder, Hub name or object.
            args: a `GRPOConfig` or `AsyncGRPOConfig`, of mgrpo.trl or of TRL, or a mapping.
            train_dataset: rows; None where the environment gives the prompts.
            eval_dataset: held-out rows, or several sets by name; they are sampled before and after training, and by `eval_strategy`.
            processing_class: the tokenizer, which rank 0 saves in output_dir/given for all to load.
            reward_processing_classes: a reward model's tokenizer, or one for each of reward_funcs, None where it is none.
            callbacks: of transformers, called on rank 0 (`callbacks.EVENTS`).
            peft_config: peft's LoraConfig.
        Raises:
            ConfigError: everything that cannot be done here.
        """
        self._policy = PolicyModel(model, peft_config)
        own = {"output_dir": f"{self._policy.name}-GRPO"} | _fields(args)
        self._given = Path(str(own["output_dir"])) / "given"
        settings, problems = self._policy.settings(self._given, has_tokenizer=processing_class is not None)
        functions = listed(reward_funcs)
        tokenizers = listed(reward_processing_classes) or [None] * len(functions)
        by_name = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
        if environment_factory is not None and not functions and not names_verifiers(train_dataset):
            settings["apply_verifiable_reward"] = False
        problems += argument_problems(own, functions, tokenizers, train_dataset, environment_factory)
        try:
            self.config = mgrpo.GRPOConfig.from_trl(own | settings, preset=grpo_config.preset_of(args))
            with_tools(self.config, by_name)
        except ConfigError as err:
            problems += err.problems
        if any(optimizers):
            problems.append(
                "optimizers is not supported: the optimizer is AdamW, which learning_rate, adam_* and lr_scheduler_type describe"
            )
        if quantization_config is not None:
            problems.append("quantization_config is not supported: the base of adapters is not quantised; leave it out")
        if problems:
            raise ConfigError(problems)
        is_object = args is not None and not isinstance(args, Mapping)
        self.args = args if is_object else GRPOConfig(**{"output_dir": own["output_dir"], **(args or {})})
        for warning in warnings_of(self.args):
            _log.warning(warning)
        if is_streamed(train_dataset):
            settle_streaming(self.args)
        self.reward_funcs, self.reward_processing_classes = functions, tokenizers
        self.reward_func_names = [function_name(function) for function in functions]
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        if train_dataset is None and not self.config.data.dataset_mixer_list:
            train_dataset = placeholder_rows(self.config)
        self._brought: dict[str, Any] = {"dataset": train_dataset, "eval_dataset": eval_dataset, **by_name}
        self._callbacks = Callbacks(callbacks or (), args=self.args, processing_class=processing_class)
        num_rows = len(train_dataset) if isinstance(train_dataset, Sized) else None
        self._history = RunHistory(self.config, self._callbacks, num_rows=num_rows)
        self._evaluated: dict[str, float] = {}
        """Metrics of the evaluation after training."""
        self.result: TrainResult | None = None
        """The result of `mgrpo.train`: folders and evaluations."""
        if self._callbacks.callbacks:
            self._callbacks.call("on_init_end", self.state)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput | None:
        """Train, as `mgrpo.train` does. A run in which no step changed the weights ends with a warning, as in TRL.

        Args:
            resume_from_checkpoint: a training state, or true for the newest of output_dir.
        """
        config = self._prepared(writes_model=True)
        if resume_from_checkpoint:
            resume = "auto" if resume_from_checkpoint is True else resume_from_checkpoint
            config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=resume))
        self._history.report_sets(self.eval_dataset, "eval")
        began = time.monotonic()
        try:
            result = mgrpo.train(config, reward_funcs=self._functions(), listener=self._history, **self._brought)
        except NothingTrained as err:
            _log.warning("%s", err)
            result = err.result
        self.result, self._evaluated = result, dict(self._history.evaluated)
        if result is None:
            return None
        if folder := result.best or result.exported:
            self._policy.take(folder)
        return self._history.finish(result, time.monotonic() - began)

    def evaluate(
        self, eval_dataset: Rows | Mapping[str, Rows] | str | None = None, *, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of the evaluation after training; of other rows, and before training, those of a separate evaluation.

        Args:
            eval_dataset: rows, several sets by name, or the name of one of the trainer's sets.
        Returns:
            Values by TRL's names on rank 0, nothing on other ranks, which do not wait.
        Raises:
            ValueError: before training under several ranks, of a PeftModel, or without rows.
        """
        if eval_dataset is None and metric_key_prefix == "eval" and self.result and self.eval_dataset is not None:
            return dict(self._evaluated)
        if world_size() > 1 and self.result is None:
            raise ValueError(
                "evaluate before train needs one rank: rank 0 alone samples, and the others would run ahead into train; train "
                "first, or evaluate in a script of its own with plain python"
            )
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            assert isinstance(self.eval_dataset, Mapping), "only sets have names"
            rows = {rows: self.eval_dataset[rows]}
        if rows is None:
            raise ValueError("evaluate needs held-out rows: give eval_dataset, here or to the trainer")
        if self._policy.has_adapter and self.result is None:
            raise ValueError(
                "a PeftModel cannot be evaluated before training: engines read the weights without the adapter; evaluate the "
                "model that merge_and_unload returns"
            )
        config = self._prepared(writes_model=self.result is None)
        if self.result is not None:
            model = dataclasses.replace(config.model, model_name_or_path=str(self._trained_folder))
            config = dataclasses.replace(config, model=model)
        if rank() != 0:
            return {}
        self._history.report_sets(rows, metric_key_prefix)
        brought = {name: value for name, value in self._brought.items() if name not in ("dataset", "eval_dataset")}
        mgrpo.evaluate(config, reward_funcs=self._functions(), eval_dataset=rows, listener=self._history, **brought)
        return dict(self._history.evaluated)

    @property
    def model(self) -> Any:
        """The model as an object of transformers or peft, in float32 on the CPU: with the trained weights once there are some."""
        return self._policy.load(self.config.hub.model_revision)

    @property
    def state(self) -> TrainerState:
        """TrainerState of transformers: global_step, epoch, log_history and more; complete on rank 0."""
        return self._history.state

    @property
    def aux_loss_enabled(self) -> bool:
        """False: routers have no auxiliary loss here."""
        return False

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus, after the last step that was logged."""
        return next(
            (line["entropy_coef"] for line in reversed(self.state.log_history) if "entropy_coef" in line),
            self.config.algorithm.entropy_coef,
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers, an object or a class."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove this callback, or the first one of this class."""
        self._callbacks.remove(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback as `remove_callback` does, and return it."""
        return self._callbacks.remove(callback)

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained model, or the best one (load_best_model_at_end), with its tokenizer to a folder, by default the run's.

        Without its checksums: scripts write the tokenizer, or a configuration, into the folder afterwards.
        """
        if self.is_world_process_zero():
            model, copied = self._trained_folder, Path(output_dir or self._finished.output_dir)
            shutil.copytree(model, copied, dirs_exist_ok=True)
            for sums in model.rglob(SUMS):
                (copied / sums.relative_to(model)).unlink()

    def push_to_hub(self, commit_message: str | None = None, *, revision: str | None = None, **_: object) -> None:
        """Upload the model that `save_model` copies, with its card, unless the run has (push_to_hub=True) or did nothing.

        Args:
            revision: branch; by default hub_revision.
        Other arguments of TRL describe a card or wait less, and have no effect.
        """
        hub = self.config.hub
        if not self.is_world_process_zero() or hub.push_to_hub:
            return
        model = self._trained_folder
        hub = dataclasses.replace(hub, push_to_hub=True, hub_revision=revision or hub.hub_revision)
        config = dataclasses.replace(self.config, hub=hub)
        if warning := token_warning(config):
            raise RuntimeError(warning)
        Uploads(config).finish(model, step_of(model), message=commit_message)

    def is_world_process_zero(self) -> bool:
        """True on rank 0."""
        return rank() == 0

    def _prepared(self, *, writes_model: bool) -> Config:
        """The configuration, once the folders of loaded objects are written. Every rank must call."""
        config = self.config
        if writes_model:
            self._policy.write(self._given, beta=config.loss.beta)
        if self.processing_class is None:
            return config
        name = self.processing_class
        if not isinstance(name, (str, Path)):
            name = written(name.save_pretrained, self._given / "processing_class")
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_name_or_path=str(name)))

    def _functions(self) -> list[Any] | None:
        folder = self._given / "reward_models"
        return as_reward_functions(self.reward_funcs, self.reward_processing_classes, folder) or None

    @property
    def _trained_folder(self) -> Path:
        model = self._finished.best or self._finished.exported
        if model is None:
            raise RuntimeError("there is no trained model: save_final is false")
        return model

    @property
    def _finished(self) -> TrainResult:
        if self.result is None:
            raise RuntimeError("the model has not been trained; call train() first")
        return self.result

    def __getattr__(self, name: str) -> Any:
        has = sorted(own for own in dir(type(self)) if not own.startswith("_"))
        raise AttributeError(f"mgrpo.trl.GRPOTrainer has no {name}; it has {', '.join(has)}")


class AsyncGRPOTrainer(GRPOTrainer):
    """TRL's trainer of trl.experimental.async_grpo: a `GRPOTrainer` with an `AsyncGRPOConfig`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Rows | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[object, object] = (None, None),
        peft_config: Any = None,
        tools: Sequence[str | Callable] | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        rollout_worker: object = None,
        weight_transfer: object = None,
    ) -> None:
        """
        Args:
            args: an `AsyncGRPOConfig`, of mgrpo.trl or of TRL.
        Other arguments are those of `GRPOTrainer`.
        Raises:
            ConfigError: everything that cannot be done here.
        """
        parts = {"rollout_worker": rollout_worker, "weight_transfer": weight_transfer}
        problems = [
            f"{name} is not supported: engines and weight sync are the run's own; leave it out"
            for name, part in parts.items()
            if part is not None
        ]
        args = AsyncGRPOConfig(f"{PolicyModel(model).name}-AsyncGRPO") if args is None else args
        if grpo_config.preset_of(args) != "trl_async":
            problems.append(f"args must be an AsyncGRPOConfig, got {type(args).__name__}")
        if problems:
            raise ConfigError(problems)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
        )


def _fields(args: object) -> dict[str, object]:
    """The fields that a script has given; metrics of an evaluation by their names here."""
    fields = dict(args) if isinstance(args, Mapping) else {} if args is None else grpo_config.given_fields(args)
    if name := fields.get("metric_for_best_model"):
        fields["metric_for_best_model"] = evaluated(str(name))
    return fields
