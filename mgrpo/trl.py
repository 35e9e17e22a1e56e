"""TRL's `GRPOConfig` and `GRPOTrainer` on this project: a script of TRL ports by changing its import.

    from mgrpo.trl import GRPOConfig, GRPOTrainer

Names and defaults are TRL's (preset trl_main). What cannot be done is an error that says so, before anything is started.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mgrpo
from mgrpo.config import Config, ConfigError
from mgrpo.moving import grpo_config
from mgrpo.moving.trl_config import GRPOConfig as GRPOConfig
from mgrpo.run.ranks.process import rank
from mgrpo.run.report.result import step_of
from mgrpo.run.report.upload import Uploads, token_warning

if TYPE_CHECKING:
    from mgrpo.run.report.result import TrainResult

LORA_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "init_lora_weights": "init_lora_weights",
}
"""Names of peft's LoraConfig here."""
WITHOUT_EFFECT = (
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "inference_mode",
    "runtime_config",
)
"""Fields of LoraConfig that do not change what is trained."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""The modules that peft adapts in the models of this project where target_modules is None."""


class GRPOTrainer:
    """Trains when `train` is called; under `mgrpo train`'s launcher, torchrun or accelerate every rank makes one."""

    def __init__(
        self,
        model: str,
        reward_funcs: Sequence[str | Callable] | str | Callable | None = None,
        args: object = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processing_class: Any = None,
        reward_processing_classes: object = None,
        callbacks: Sequence[object] | None = None,
        optimizers: tuple[object, object] = (None, None),
        quantization_config: object = None,
        peft_config: object = None,
        tools: Sequence[str | Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        """
        Args:
            model: folder or Hub name; the ranks load the weights themselves.
            reward_funcs: functions, or names as in the setting reward_funcs; reward models are not among them.
            args: a `GRPOConfig` of this module or of trl, or a mapping.
            eval_dataset: held-out rows; they are sampled before and after training, and as `eval_strategy` says.
            processing_class: the tokenizer, which rank 0 saves in output_dir/processing_class for all to load.
            peft_config: peft's LoraConfig.
        Raises:
            ConfigError: everything that cannot be done here.
        """
        unsupported = (
            ("reward_processing_classes", reward_processing_classes, "there are no reward models; give functions"),
            (
                "callbacks",
                callbacks,
                "leave them out; report_to names trackers, and metrics.jsonl grows by a line at each step",
            ),
            (
                "optimizers",
                any(optimizers),
                "the optimizer is AdamW, which learning_rate, adam_* and lr_scheduler_type describe",
            ),
            ("quantization_config", quantization_config, "the base of adapters is not quantised"),
        )
        adapters, about_adapters = lora_settings(peft_config)
        problems = [
            *_model_problems(model),
            *(f"{name} is not supported: {advice}" for name, given, advice in unsupported if given),
            *about_adapters,
        ]
        own = {"output_dir": f"{Path(str(model)).name}-GRPO"} | _fields(args) | adapters
        try:
            self.config = mgrpo.GRPOConfig.from_trl(
                own | {"model_name_or_path": str(model)}, preset=grpo_config.preset_of(args)
            )
        except ConfigError as err:
            problems += err.problems
        if problems:
            raise ConfigError(problems)
        self.processing_class = processing_class
        self._brought: dict[str, Any] = {
            "reward_funcs": reward_funcs,
            "dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }
        self.result: TrainResult | None = None
        """The result of `train`."""

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainResult | None:
        """Train, as `mgrpo.train` does.

        Args:
            resume_from_checkpoint: a training state, or true for the newest of output_dir.
        """
        config = self.config
        if resume_from_checkpoint:
            resume = "auto" if resume_from_checkpoint is True else resume_from_checkpoint
            config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=resume))
        if self.processing_class is not None:
            config = _with_tokenizer(config, self.processing_class)
        self.result = mgrpo.train(config, **self._brought)
        return self.result

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluation after training."""
        return dict(self._trained.after)

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained model, or the best one (load_best_model_at_end), with its tokenizer to a folder, by default the run's."""
        if self.is_world_process_zero():
            shutil.copytree(self._model, output_dir or self._trained.output_dir, dirs_exist_ok=True)

    def push_to_hub(self, commit_message: str | None = None, *, revision: str | None = None, **_: object) -> None:
        """Upload the model that `save_model` copies, with its card, unless the run has (push_to_hub=True) or did nothing.

        Args:
            revision: branch; by default hub_revision.
        Other arguments of TRL describe a card or wait less, and have no effect.
        """
        hub = self.config.hub
        if not self.is_world_process_zero() or hub.push_to_hub:
            return
        model = self._model
        hub = dataclasses.replace(hub, push_to_hub=True, hub_revision=revision or hub.hub_revision)
        config = dataclasses.replace(self.config, hub=hub)
        if warning := token_warning(config):
            raise RuntimeError(warning)
        Uploads(config).finish(model, step_of(model), message=commit_message)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return rank() == 0

    @property
    def _model(self) -> Path:
        """Folder of what was trained."""
        model = self._trained.best or self._trained.exported
        if model is None:
            raise RuntimeError("there is no trained model: save_final is false")
        return model

    @property
    def _trained(self) -> TrainResult:
        if self.result is None:
            raise RuntimeError("the model has not been trained; call train() first")
        return self.result

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"mgrpo.trl.GRPOTrainer has no {name}; it has config, result, train, evaluate, save_model, push_to_hub "
            "and is_world_process_zero"
        )


def lora_settings(config: Any) -> tuple[dict[str, object], list[str]]:
    """Settings for adapters as peft's LoraConfig describes them, none without one; and what has no counterpart here."""
    if config is None:
        return {}, []
    if not dataclasses.is_dataclass(config) or isinstance(config, type) or not hasattr(config, "lora_alpha"):
        return {}, [f"peft_config is {type(config).__name__}; adapters are LoRA, give a peft.LoraConfig"]
    problems = [
        f"peft_config: {name}={value!r} is not supported"
        for name, value in sorted(grpo_config.changed_fields(config).items())
        if name not in (*LORA_NAMES, *WITHOUT_EFFECT)
    ]
    given = {ours: getattr(config, name, None) for name, ours in LORA_NAMES.items()}
    targets = given["lora_target_modules"]
    if not isinstance(targets, str):
        given["lora_target_modules"] = tuple(sorted(targets)) if targets else PEFT_TARGETS
    return {"use_peft": True} | {name: value for name, value in given.items() if value is not None}, problems


def _model_problems(model: object) -> list[str]:
    if isinstance(model, (str, Path)):
        return []
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return [
        f"model is {type(model).__name__}, expected a folder or a Hub name, from which the ranks load the weights; pass "
        + (f"{name!r}, or the folder of model.save_pretrained" if name else "the folder of model.save_pretrained")
    ]


def _fields(args: object) -> dict[str, object]:
    """The fields that a script has given."""
    if args is None:
        return {}
    if isinstance(args, Mapping):
        return dict(args)
    return grpo_config.given_fields(args)


def _with_tokenizer(config: Config, tokenizer: Any) -> Config:
    """`config` with a tokenizer that a script has made, perhaps with tokens or a template of its own."""
    name = str(tokenizer)
    if not isinstance(tokenizer, (str, Path)):
        name = str(Path(config.experiment.output_dir) / "processing_class")
        if rank() == 0:
            tokenizer.save_pretrained(name)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_name_or_path=name))
