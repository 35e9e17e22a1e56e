"""Where a run keeps its training states, and how its learner ranks share the model."""

from __future__ import annotations

import os

from mgrpo.config.schema import Config
from mgrpo.layout import Layout


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
