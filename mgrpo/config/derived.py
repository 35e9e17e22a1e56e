"""What follows from a configuration and the number of learner ranks; each formula stands here or on `Config`, once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mgrpo.config.schema import Config
from mgrpo.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Values that nobody sets."""

    run_name: str
    """exp_name__seed."""
    world_size: int
    """Learner ranks."""
    data_parallel_size: int
    """world_size / (tensor x pipeline x context)."""
    batch_size: int
    """Completions a training step: prompts x samples."""
    completions_per_optimizer_step: int
    """batch_size / num_mini_batches, rounded up."""
    num_training_steps: int
    """total_episodes / batch_size, rounded down."""
    num_optimizer_steps: int
    """num_training_steps x num_epochs x num_mini_batches: the horizon of the learning rate."""
    max_model_length: int
    """Most tokens in a sequence: max_prompt_token_length + response_length, or eval_response_length if that is more."""
    max_possible_score: float
    """Highest reward of a completion with one verifier."""


def derive(config: Config, *, world_size: int) -> Derived:
    """Everything that follows from a sound `config` on `world_size` learner ranks."""
    reward = config.reward
    has_format_reward = reward.apply_r1_style_format_reward and (
        reward.additive_format_reward or not reward.apply_verifiable_reward
    )
    return Derived(
        run_name=f"{config.experiment.exp_name}__{config.experiment.seed}",
        world_size=world_size,
        data_parallel_size=layout_of(config, world_size).data,
        batch_size=config.batch_size,
        completions_per_optimizer_step=-(-config.batch_size // config.algorithm.num_mini_batches),
        num_training_steps=config.num_training_steps,
        num_optimizer_steps=config.num_optimizer_steps,
        max_model_length=config.max_model_length,
        max_possible_score=reward.verification_reward * reward.apply_verifiable_reward
        + reward.r1_style_format_reward * has_format_reward,
    )


def state_root(config: Config) -> str:
    """Folder or URL of the run's training states."""
    own = config.checkpoint
    default = os.path.join(config.experiment.output_dir, "checkpoints")
    return own.gs_checkpoint_state_dir or own.checkpoint_state_dir or default


def layout_of(config: Config, world_size: int) -> Layout:
    """The training layout that the parallel section asks of `world_size` learner ranks."""
    parallel = config.parallel
    sequence_parallel = parallel.sequence_parallel
    return Layout(
        world_size=world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        first_stage_layers=parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=parallel.num_layers_in_last_pipeline_stage,
        sequence_parallel=parallel.tensor_model_parallel_size > 1 if sequence_parallel == "auto" else sequence_parallel,
        zero_stage=parallel.zero_stage,
        shard_size=parallel.fsdp_shard_degree,
    )
