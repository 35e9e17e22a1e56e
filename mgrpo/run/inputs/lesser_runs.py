"""Configurations of reduced runs: an evaluation alone, and one step that leaves no files.

Sections that such a run hardly needs start from their defaults. In the others each setting is deliberately changed here or kept:
a test lists them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mgrpo.config import Config
from mgrpo.config.distillation import Distillation
from mgrpo.config.fields import flat
from mgrpo.config.loss import LossConfig
from mgrpo.config.schema import Algorithm, Checkpoint, Engine, Optimizer, Parallel, Reward
from mgrpo.config.tracking import Tracking


def for_evaluation(config: Config) -> Config:
    """`config` without training-only settings, so that their rules do not apply, and with its own output folder."""
    rollout = config.rollout
    longest = config.data.max_prompt_token_length + rollout.response_length
    changed = dataclasses.replace(
        config,
        experiment=dataclasses.replace(
            config.experiment,
            total_episodes=config.batch_size,
            num_train_epochs=None,
            output_dir=str(Path(config.experiment.output_dir) / "eval" / model_name(config)),
        ),
        data=dataclasses.replace(config.data, dataset_mixer_list=(), dataset_mixer_list_splits=("train",)),
        rollout=dataclasses.replace(
            rollout, async_steps=0, max_staleness=None, inflight_updates=False, save_traces=False
        ),
        reward=dataclasses.replace(
            config.reward,
            apply_evolving_rubric_reward=False,
            max_active_rubrics=Reward().max_active_rubrics,
            cache_evolving_rubric_data_dir=None,
        ),
        loss=LossConfig(),
        algorithm=Algorithm(
            overlong_cache_length=config.algorithm.overlong_cache_length,
            reward_weights=config.algorithm.reward_weights,
        ),
        distillation=Distillation(),
        optimizer=Optimizer(),
        parallel=Parallel(pack_length=longest),
        checkpoint=Checkpoint(resume="never"),
        tracking=Tracking(report_to=("tensorboard",) if config.tracking.asks_for("tensorboard") else ("none",)),
        engine=config.engine if config.engine.vllm_mode != "server" else _own_engine(config.engine),
    )
    values = flat(changed)
    sources = {name: source for name, source in config.provenance.sources.items() if values[name] == flat(config)[name]}
    return dataclasses.replace(changed, provenance=dataclasses.replace(config.provenance, sources=sources, expected={}))


def _own_engine(settings: Engine) -> Engine:
    """Engine settings of one engine in Ray: a server may have the weights of any run."""
    return dataclasses.replace(
        settings, vllm_mode="ray", vllm_num_engines=1, vllm_server_base_url=(), vllm_server_timeout=240.0
    )


def model_name(config: Config) -> str:
    """The name of the model's folder."""
    return Path(config.model.model_name_or_path or "model").absolute().name


def for_one_step(config: Config, folder: str) -> Config:
    """`config` for one training step in `folder`, with no trackers, traces, exports or states, and nothing continued."""
    return dataclasses.replace(
        config,
        experiment=dataclasses.replace(
            config.experiment,
            total_episodes=config.batch_size,
            num_train_epochs=None,
            output_dir=folder,
            local_eval_every=-1,
        ),
        rollout=dataclasses.replace(config.rollout, save_traces=False),
        reward=dataclasses.replace(config.reward, cache_evolving_rubric_data_dir=None),
        # A model that is always right or always wrong must do its step as well.
        algorithm=dataclasses.replace(config.algorithm, filter_zero_std_samples=False, active_sampling=False),
        checkpoint=Checkpoint(save_final=False, resume="never"),
        tracking=Tracking(report_to=("none",)),
    )
