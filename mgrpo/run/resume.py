"""The saved states of a run as all its learner ranks see them: written together, and opened only when every rank agrees."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mgrpo.checkpoint.folder import latest, step_path
from mgrpo.checkpoint.reader import Checkpoint, open_checkpoint
from mgrpo.checkpoint.saver import Saver
from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import state_root
from mgrpo.models.family import ModelShape
from mgrpo.parallel.broadcast import Channel
from mgrpo.parallel.gather import gather_values
from mgrpo.run.learner import Learner


class States:
    """Every rank makes one; `save` and `open` are for all ranks at once."""

    def __init__(self, config: Config, channel: Channel, host_group: ProcessGroup) -> None:
        self.config, self.channel, self.host_group = config, channel, host_group
        self.root = state_root(config)
        self.is_head = dist.get_rank() == 0
        self.saver = Saver(
            self.root,
            dist.get_rank(),
            dist.get_world_size(),
            keep_last_n=config.checkpoint.keep_last_n_checkpoints,
            asynchronous=config.checkpoint.checkpoint_async,
            timeout_s=60 * config.experiment.backend_timeout,
        )

    def open(self, path: str | None, shape: ModelShape) -> Checkpoint | None:
        """The checkpoint that rank 0 says this run continues, once its files have been compared with their checksums.

        Raises:
            ConfigError: it is damaged, or of another model than `shape`; on all ranks, whoever noticed.
        """
        told = self.channel.arrays({"path": np.frombuffer((path or "").encode(), np.uint8)} if self.is_head else None)
        path = told["path"].tobytes().decode()
        if not path:
            return None
        checkpoint, problem = None, ""
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify(dist.get_rank(), dist.get_world_size())
            if ModelShape.from_dict(checkpoint.state["model"]) != shape:
                problem = f"{path} is of another model than {self.config.model.model_name_or_path}; resume with its own"
        except (ValueError, OSError) as err:
            problem = str(err)
        problems = gather_values(
            torch.frombuffer(bytearray(problem.encode() + b"\n"), dtype=torch.uint8), self.host_group
        )
        found = problems.numpy().tobytes().decode().split("\n")
        if any(found):
            raise ConfigError([next(filter(None, found))])
        return checkpoint

    def save(self, step: int, learner: Learner, state: dict[str, Any]) -> str:
        """Write the state of the whole run after `step`, from which it, or one on another layout, continues exactly.

        Args:
            state: all that is no tensor, in JSON; rank 0's counts.
        Returns:
            Where it lies, or will lie when it is written in the background.
        """
        if self.config.checkpoint.checkpoint_async:
            # Whoever has written its share of the one before must not wait for rank 0 on the impatient channel.
            self.saver.wait()
            dist.barrier(group=self.host_group)
        token = self.channel.arrays(
            {"token": np.frombuffer(secrets.token_bytes(8), np.uint8)} if self.is_head else None
        )
        self.saver.save(step, learner.state.parts(), state, learner.state.full_shapes(), token["token"].tobytes().hex())
        if not self.config.checkpoint.checkpoint_async:
            dist.barrier(group=self.host_group)
        return step_path(self.root, step)

    def last_good(self) -> str:
        """What to go on from after a run that failed, in words."""
        newest = latest(self.root)
        if newest:
            return f"the last good checkpoint is {newest}, continue from it with --resume {newest}"
        exports = f"{self.config.experiment.output_dir}/hf"
        return f"exports lie in {exports}; there is no checkpoint, set checkpoint_state_freq"

    def stop(self) -> None:
        """Give up what is being written."""
        self.saver.stop()

    def close(self) -> None:
        """Wait until everything is written."""
        self.saver.close()
